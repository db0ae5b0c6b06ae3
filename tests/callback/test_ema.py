import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script, Synchronizations
from lightning.pytorch.callbacks import Callback

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.callback.ema import EMA
from boltcutter.callback.guard import Guard
from boltcutter.environment.startup import restored_signals
from boltcutter.project import Project


def test_the_average_is_validated_saved_and_tested(script: Script, tmp_path: Path) -> None:
    overrides = ["callback=[default,ema]", "callback.ema.decay=0.95", "model=mlp", "model.norm=batchnorm"]
    done = script("train", *QUICK, *overrides, f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    again = script("evaluate", f"run={tmp_path}/run")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run" / "evaluation" / "test" / "metrics.json").read_text()) == record["test"]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    average, plain = saved["state_dict"], saved["current_model_state"]
    same = {name for name in average if torch.equal(average[name], plain[name])}
    assert same == {name for name in average if "running" in name or "num_batches" in name or "shift" in name}
    val = script("evaluate", f"run={tmp_path}/run", "ckpt=last", "split=val")
    assert val.returncode == 0, val.stderr
    found = json.loads((tmp_path / "run" / "evaluation" / "val-last" / "metrics.json").read_text())
    assert found["val/loss"] == pytest.approx(record["metrics"]["val/loss"], rel=1e-6)


def test_the_average_follows_short_training(script: Script, tmp_path: Path) -> None:
    # With a constant decay of 0.999, 60 % of the average would still be the initial weights.
    overrides = ["callback=[default,ema]", "model=mlp", "trainer.max_epochs=25", f"folder={tmp_path}/run"]
    assert script("train", *QUICK, *overrides).returncode == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text())["test"]["test/accuracy"] > 0.9


class Watch(Callback):
    """Counts synchronizations from the second step on, in which everything is initialized."""

    def __init__(self, waits: Synchronizations, *, begins: bool) -> None:
        self.waits, self.begins = waits, begins

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if self.begins and index >= 2:
            self.waits.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if not self.begins and index >= 2:
            self.waits.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:.*smaller than the logging")
def test_no_default_callback_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU; clipping waits on the CPU only.
    monkeypatch.setattr(Guard, "_can_defer", lambda guard, norm, optimizer: True)
    overrides = [*QUICK, "callback=[default,ema]", "model=mlp", "trainer.gradient_clip_val=null", "trainer.devices=1"]
    overrides += ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1000", "trainer.max_epochs=1"]
    cfg = read_config(Project.find(__file__), [*overrides, f"folder={tmp_path}", f"checkpoints={tmp_path}"])
    with restored_signals():
        waits = Synchronizations()
        components = assemble(cfg, [Watch(waits, begins=False)])
        components.trainer.callbacks.insert(0, Watch(waits, begins=True))  # type: ignore[attr-defined]
        components.trainer.fit(components.task, datamodule=components.data)
    assert components.trainer.global_step > 5
    assert not waits.counted


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")
def test_the_average_is_that_of_the_formula(tmp_path: Path) -> None:
    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.expected = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return (self.weight * batch).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # after the callbacks
            decay = min(0.5, (1 + batch_idx) / (10 + batch_idx)) if batch_idx else 0.0
            self.expected = decay * self.expected + (1 - decay) * self.weight.detach()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task, ema = Task(), EMA(0.5)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[ema], enable_model_summary=False, **options)
    trainer.fit(task, torch.utils.data.DataLoader(torch.randn(20, 3)))
    torch.testing.assert_close(task.weight.detach(), task.expected)  # the average replaces the weights at the end
    again = Task()
    trainer = L.Trainer(accelerator="cpu", max_steps=1, callbacks=[ema], enable_model_summary=False, **options)
    ema._latest_update_step = 0
    trainer.fit(again, torch.utils.data.DataLoader(torch.randn(20, 3)))
    torch.testing.assert_close(again.weight.detach(), again.expected)  # which begins anew


def test_averaging_can_start_later(script: Script, tmp_path: Path) -> None:
    overrides = [
        "callback=[default,ema]",
        "callback.ema.update_starting_at_step=1000",
        "model=mlp",
        f"folder={tmp_path}/run",
    ]
    assert script("train", *QUICK, *overrides).returncode == 0


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_invalid_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"callback.ema.decay="):
        EMA(decay)
