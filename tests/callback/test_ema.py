import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script, Synchronizations
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.callback.ema import EMA
from boltcutter.callback.guard import Guard
from boltcutter.checkpoint.load import load_checkpoint
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


@pytest.mark.slow
def test_the_average_follows_short_training(script: Script, tmp_path: Path) -> None:
    # With a constant decay of 0.999, 60 % of the average would still be the initial weights.
    overrides = ["callback=[default,ema]", "model=mlp", "trainer.max_epochs=25", f"folder={tmp_path}/run"]
    assert script("train", *QUICK, *overrides).returncode == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text())["test"]["test/accuracy"] > 0.9


class Watch(Callback):
    """Counts synchronizations of some steps, from the third on, as the first two initialize everything."""

    def __init__(self, waits: Synchronizations, steps: range, *, begins: bool) -> None:
        self.waits, self.steps, self.begins = waits, steps, begins

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if self.begins and index in self.steps:
            self.waits.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if not self.begins and index in self.steps:
            self.waits.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:.*smaller than the logging")
@pytest.mark.parametrize(
    ("looks", "steps"), [([], range(9, 15)), (["callback.invariants=null"], range(2, 1000))], ids=["between", "without"]
)
def test_no_default_callback_waits_for_the_device(
    looks: list[str], steps: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Invariants`` waits when it looks, at steps 8 and 16, and at no step in between."""
    # As on a GPU; clipping waits on the CPU only.
    monkeypatch.setattr(Guard, "_can_defer", lambda guard, norm, optimizer: True)
    overrides = [
        *QUICK,
        *looks,
        "callback=[default,ema]",
        "model=mlp",
        "trainer.gradient_clip_val=null",
        "trainer.devices=1",
    ]
    overrides += ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1000", "trainer.max_epochs=1"]
    cfg = read_config(Project.find(__file__), [*overrides, f"folder={tmp_path}", f"checkpoints={tmp_path}"])
    with restored_signals():
        waits = Synchronizations()
        components = assemble(cfg)
        callbacks: list[L.Callback] = components.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [Watch(waits, steps, begins=True), *callbacks, Watch(waits, steps, begins=False)]
        components.trainer.fit(components.task, datamodule=components.data)
    assert components.trainer.global_step > 15
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


FSDP2 = ["trainer=fsdp2", "trainer.devices=2"]
SHARDS = ["trainer.strategy.tensor_parallel_size=2", "trainer.strategy.save_distributed_checkpoint=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "then"),
    [
        (FSDP2, []),
        pytest.param([*FSDP2, *SHARDS], [], marks=pytest.mark.slow),
        ([*FSDP2, *SHARDS], ["trainer=default", "trainer.accelerator=cpu"]),
        pytest.param(["trainer=pipeline", "trainer.devices=2"], [], marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "sharded", "resumed-by-one", "pipeline"],
)
def test_ranks_average_their_part_of_the_weights(
    script: Script, tmp_path: Path, strategy: list[str], then: list[str]
) -> None:
    overrides = [*QUICK, "callback=[default,ema]", "callback.ema.decay=0.9", "model=mlp", "optimizer=sgd"]
    for name, more, last in (("one", [], []), ("two", strategy, then)):
        first = [*overrides, "scheduler=constant", *more, "trainer.accelerator=cpu", f"folder={tmp_path}/{name}"]
        for arguments in (
            [*first, "trainer.max_steps=8"],
            [f"resume={tmp_path}/{name}", "trainer.max_steps=16", *last],
        ):
            done = script("train", *arguments, ranks=2 * bool(more) * (arguments[-1] != "trainer.accelerator=cpu"))
            assert done.returncode == 0, done.stderr
    ours, theirs = (load_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("two", "one"))
    for key in ("state_dict", "current_model_state", "averaging_state"):
        torch.testing.assert_close(dict(ours[key]), dict(theirs[key]), rtol=0, atol=1e-6)
    assert all(not torch.equal(value, ours["current_model_state"][k]) for k, value in ours["state_dict"].items())
    one, two = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "two"))
    assert two["test"] == pytest.approx(one["test"], abs=1e-5)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5)


class Later(L.LightningModule):
    """A module on the CPU that is moved to another device after ``setup``, as by every strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def test_the_average_is_where_the_weights_are() -> None:
    ema, module = EMA(), Later()
    trainer: Any = SimpleNamespace(strategy=None, global_step=1)
    ema.setup(trainer, module, "fit")
    module.to("meta")  # stands for a GPU
    ema.on_train_start(trainer, module)
    assert {average.device.type for average in ema.averages} == {"meta"}


@pytest.mark.parametrize("strategy", [FSDPStrategy(), DeepSpeedStrategy.__new__(DeepSpeedStrategy)])
def test_strategies_that_hide_weights_are_refused(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match=r"^callback\.ema: .*trainer=fsdp2"):
        EMA().setup(SimpleNamespace(strategy=strategy), Later(), "fit")  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_invalid_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"callback.ema.decay="):
        EMA(decay)
