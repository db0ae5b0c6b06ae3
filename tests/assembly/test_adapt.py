import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, ROOT, Script
from torch import nn

from boltcutter.assembly.adapt import DEFAULT_CLIPPING, adapt, load_compiled
from boltcutter.config.errors import ConfigError


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def trainer(**options: float) -> L.Trainer:
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", enable_model_summary=False, **plain, **options)  # type: ignore[arg-type]


def test_gradient_clipping_is_disabled_for_manual_optimization(capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(gradient_clip_val=1.0)
    adapt(made, Manual())
    assert made.gradient_clip_val is None
    assert "trainer.gradient_clip_val=1.0" in capsys.readouterr().out


class Clips(L.LightningModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=3.0)


def test_the_default_clipping_gives_way_to_that_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(gradient_clip_val=DEFAULT_CLIPPING)
    adapt(made, Clips())
    assert made.gradient_clip_val is None
    assert "trainer.gradient_clip_val=1.0" in capsys.readouterr().out
    chosen = trainer(gradient_clip_val=0.5)
    adapt(chosen, Clips())  # it is passed to the module
    assert chosen.gradient_clip_val == 0.5
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("given", [DEFAULT_CLIPPING, 0.5])
def test_a_value_of_a_trainer_of_the_user_is_no_default(given: float) -> None:
    made = trainer(gradient_clip_val=given)
    adapt(made, Clips(), is_own=True)
    assert made.gradient_clip_val == given
    with pytest.raises(ConfigError, match=rf"gradient_clip_val={given} .*gradient_clip_val=null"):
        adapt(made, Manual(), is_own=True)


def test_the_default_is_that_of_the_trainer() -> None:
    assert f"\ngradient_clip_val: {DEFAULT_CLIPPING} " in (ROOT / "configs" / "trainer" / "default.yaml").read_text()


def test_an_explicit_clipping_is_refused_for_manual_optimization() -> None:
    with pytest.raises(ConfigError, match=r"gradient_clip_val=0\.5 .*gradient_clip_val=null"):
        adapt(trainer(gradient_clip_val=0.5), Manual())


def test_accumulation_is_refused_for_manual_optimization() -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches=2"):
        adapt(trainer(accumulate_grad_batches=2), Manual())


TASK = """
import torch
from third_party.examples import LitAutoEncoder


class Compiles(LitAutoEncoder):
    def setup(self, stage):
        if stage == "fit":
            self.encoder = torch.compile(self.encoder, backend="eager")
"""


class Wrapped(L.LightningModule):
    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.net = torch.compile(net, backend="eager") if compiled else net
        load_compiled(self)


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_are_loaded_with_and_without_the_wrapper(compiled: bool) -> None:
    one, other = Wrapped(compiled=compiled), Wrapped(compiled=not compiled)
    other.load_state_dict(one.state_dict())  # strict
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(one.state_dict() | {"else": torch.zeros(1)})


@pytest.mark.slow
def test_a_module_that_compiles_in_training_is_tested_evaluated_and_resumed(script: Script, tmp_path: Path) -> None:
    (tmp_path / "compiles.py").write_text(TASK)
    (tmp_path / "task.yaml").write_text("_target_: compiles.Compiles\n")
    (tmp_path / "data.yaml").write_text("_target_: third_party.examples.DigitsDataModule\n")
    env = {"PYTHONPATH": f"{tmp_path}:tests"}
    folder = tmp_path / "run"
    chosen = [f"task={tmp_path}/task.yaml", f"data={tmp_path}/data.yaml", f"folder={folder}"]
    done = script("train", *QUICK, *chosen, env=env)
    assert done.returncode == 0, done.stderr
    assert any("_orig_mod" in name for name in torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"])
    done = script("evaluate", f"run={folder}", f"output={tmp_path}/out", env=env)
    assert done.returncode == 0, done.stderr
    known = json.loads((folder / "record.json").read_text())["test"]
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == pytest.approx(known)
    done = script("train", f"resume={folder}", "trainer.max_epochs=3", env=env)
    assert done.returncode == 0, done.stderr
    again = [f"init_from={folder}/checkpoints/last.ckpt", *chosen[:2], f"folder={tmp_path}/new"]
    done = script("train", *QUICK, *again, env=env)
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stdout
