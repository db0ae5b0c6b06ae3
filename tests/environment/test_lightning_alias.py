"""Modules, callbacks and data modules of ``pytorch_lightning`` are those of ``lightning.pytorch``."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

NOT_INSTALLED = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
ONE = """
import pytorch_lightning.callbacks.early_stopping, lightning.pytorch.callbacks
from pytorch_lightning.utilities.types import STEP_OUTPUT
from lightning_fabric.utilities.seed import seed_everything
import pytorch_lightning as pl, lightning as L, pickle, importlib.util
assert pl.LightningModule is L.LightningModule
assert pl.callbacks.early_stopping.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
assert seed_everything is L.seed_everything
assert pickle.loads(b"cpytorch_lightning.callbacks\\nEarlyStopping\\n.") is L.pytorch.callbacks.EarlyStopping
assert importlib.util.find_spec("pytorch_lightning.trainer").origin == L.pytorch.trainer.__file__
try:
    import pytorch_lightning.metrics
except ModuleNotFoundError as error:
    assert error.name == "pytorch_lightning.metrics"
"""
CHECK = "from boltcutter.cli.commands import main; main(['check', {}])"
TASK = ["task=tests/third_party/configs/task/vae.yaml", "data=tests/third_party/configs/data/images.yaml"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_both_names_are_one_package_where_only_lightning_is_installed() -> None:
    done = python(f"{NOT_INSTALLED}\nimport boltcutter\n{ONE}")
    assert done.returncode == 0, done.stderr


def test_a_search_for_the_package_imports_nothing() -> None:
    code = "import boltcutter, sys, importlib.util as u; assert u.find_spec('pytorch_lightning')"
    done = python(f"{code}; assert not {{'lightning', 'torch'}} & sys.modules.keys()")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_notebook_may_import_pytorch_lightning_first() -> None:
    done = python(f"import pytorch_lightning\nimport boltcutter\n{ONE}\n{CHECK.format(str(TASK)[1:-1])}")
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout


@pytest.mark.slow
def test_classes_of_two_packages_are_refused_with_the_remedy(tmp_path: Path) -> None:
    both = "import lightning, pytorch_lightning\n"
    factory = tmp_path / "task.yaml"
    factory.write_text("_target_: third_party.published.make_module\n")
    callback = "+callback.lr._target_=third_party.published.make_callback"
    for arguments in (TASK, [f"task={factory}", TASK[1]], [callback]):
        done = python(both + CHECK.format(str(arguments)[1:-1]))
        assert done.returncode == 2, done.stderr
        errors = done.stderr.strip().splitlines()
        assert all("_target_=third_party.published" in line or "=third_party" in line for line in errors), errors
        assert any("import boltcutter first" in line for line in errors), errors
