import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from lightning_tests import suite
from lightning_tests.suite import GROUPS, NOT_COLLECTED, report

ROOT = Path(__file__).parents[1]
PLAIN = {"a.py::one": "passed", "a.py::two[1]": "passed", "a.py::three": "failed", "a.py::four": "passed"}
TREATED = {"a.py::one": "passed", "a.py::two[1]": "failed", "a.py::three": "failed", "a.py::four": "skipped"}


def test_a_test_that_passes_plain_only_needs_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(PLAIN, TREATED, {}, record=False) == 1
    assert "a.py::two[1]" in capsys.readouterr().out
    assert report(PLAIN, TREATED, {"for a reason": ["a.py::two"]}, record=False) == 0
    assert report(PLAIN, TREATED, {"for a reason": ["a.py::two[1]"]}, record=False) == 0
    assert report(PLAIN, TREATED, {}, quiet={"a.py::two[1]": "passed"}, record=False) == 0
    assert report(PLAIN, TREATED, {}, quiet={"a.py::two[1]": "failed"}, record=False) == 1
    assert report({}, {}, {}, record=False) == 1


@pytest.mark.parametrize("has_git", [True, False])
def test_a_clone_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_git: bool) -> None:
    monkeypatch.setattr(suite, "REPOSITORY", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^error: tag=9\.9: cannot clone .*nowhere \(.*\); give .*checkout.*$"):
        suite.main(None, ["tag=9.9", "loops"])
    assert not [*tmp_path.iterdir()]


def test_a_difference_that_is_gone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"for a reason": ["a.py::two", "a.py::one", "not_run.py::test"]}
    assert report(PLAIN, TREATED, known, record=False) == 0
    output = capsys.readouterr().out
    assert "a.py::one" in output
    assert "not_run.py" not in output


def test_files_that_cannot_be_imported_are_found() -> None:
    log = (
        "ERROR tests_pytorch/a.py - ImportError whil...\nERROR tests_pytorch/b.py::test - x\nERROR tests_pytorch/c.py\n"
    )
    assert NOT_COLLECTED.findall(log) == ["tests_pytorch/a.py", "tests_pytorch/c.py"]


def test_each_group_is_run_every_week() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "lightning.yml").read_text())
    groups = " ".join(workflow["jobs"]["suite"]["strategy"]["matrix"]["tests"]).split()
    assert sorted(groups) == sorted(GROUPS)


TEST = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
def test_two_callbacks(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, limit_val_batches=1,
                      enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer.fit(BoringModel())
    assert len(trainer.callbacks) <= 2
def test_no_metrics_file(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    assert not trainer.loggers
def test_steps(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, limit_val_batches=1,
                      enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # two processes that import all
def test_a_trainer_has_what_a_training_adds(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "tests_pytorch" / "own"
    tests.mkdir(parents=True)
    (tests / "test_own.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text("")
    command = [sys.executable, str(ROOT / "scripts" / "lightning_suite.py"), str(tmp_path), "own", "workers=1"]
    done = subprocess.run([*command, f"results={tmp_path}"], capture_output=True, text=True, timeout=500)
    log = (tmp_path / "treated.log").read_text()
    assert done.returncode == 1, done.stderr + log
    assert "passes plain only: tests_pytorch/own/test_own.py::test_two_callbacks" in done.stdout, log
    assert "2 pass plain only: 1 by what a user sees" in done.stdout, log
