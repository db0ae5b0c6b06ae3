from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from boltcutter.data.digits import Digits
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification
from boltcutter_parallel.skip_no_op_hooks import HOOKS, NoProfiler, SkipNoOpHooks, overrides_hook

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "is smaller than the logging interval")
]


class Called(L.Callback):
    """Counts calls of overridden hooks, and of one that is set on the instance."""

    def __init__(self) -> None:
        self.count = dict.fromkeys((*HOOKS, "instance"), 0)
        self.on_after_backward = lambda *_: self.add("instance")  # type: ignore[method-assign]

    def add(self, name: str) -> None:
        self.count[name] += 1

    def on_train_batch_start(self, *_: Any) -> None:
        self.add("on_train_batch_start")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.add("on_before_zero_grad")


class NoHooks(L.Callback):
    """Overrides no step hook; records which of its hooks are still callable."""

    def __init__(self) -> None:
        self.callable_hooks: list[str] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.callable_hooks = [hook for hook in HOOKS if callable(getattr(self, hook))]


class Module(Classification):
    def __init__(self) -> None:
        super().__init__(Linear((1, 8, 8), 10), optimizer=torch.optim.SGD)
        self.before_backward = 0

    def on_before_backward(self, loss: Tensor) -> None:
        self.before_backward += 1


class TransferHook(Digits):
    """Overrides a hook of the transfer to the device."""

    transfers = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers += 1
        return batch


def fit(
    folder: Path,
    *callbacks: L.Callback,
    data: Digits | None = None,
    module: type["Module"] | None = None,
    **options: Any,
) -> tuple[L.Trainer, "Module"]:
    L.seed_everything(0, verbose=False)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*callbacks, ModelCheckpoint(folder)],
        use_distributed_sampler=False,
        **silent | options,
    )
    trained = (module or Module)()
    trainer.fit(trained, datamodule=data or Digits())
    return trainer, trained


def test_only_overridden_hooks_are_called(tmp_path: Path) -> None:
    called, no_hooks, data = Called(), NoHooks(), TransferHook()
    trainer, module = fit(tmp_path, SkipNoOpHooks(), called, no_hooks, data=data)
    steps = trainer.global_step
    assert steps == 19
    assert {k: v for k, v in called.count.items() if v} == dict.fromkeys(
        ("on_train_batch_start", "on_before_zero_grad", "instance"), steps
    )
    assert no_hooks.callable_hooks == []
    assert module.before_backward == steps
    assert data.transfers >= steps
    assert list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_identical_and_all_hooks_are_restored(tmp_path: Path, accumulate: int) -> None:
    no_hooks = NoHooks()
    trainer, patched = fit(tmp_path, SkipNoOpHooks(), no_hooks, accumulate_grad_batches=accumulate)
    other, plain = fit(tmp_path / "plain", accumulate_grad_batches=accumulate)
    assert all(torch.equal(a, b) for a, b in zip(patched.parameters(), plain.parameters(), strict=True))
    assert trainer.fit_loop.state_dict() == other.fit_loop.state_dict()  # includes Lightning's progress counters
    loop = trainer.fit_loop.epoch_loop
    for owner in (no_hooks, patched, loop, loop.automatic_optimization, trainer.precision_plugin):
        private = ("_apply_batch", "_build", "_on_before", "output_result", "pre_", "post_")
        assert not {name for name in vars(owner) if name in HOOKS or name.startswith(private)}
    assert isinstance(trainer.profiler, NoProfiler)  # type: ignore[attr-defined]


def test_a_training_step_without_batch_idx(tmp_path: Path) -> None:
    class BatchOnly(Module):
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    trainer, _ = fit(tmp_path, SkipNoOpHooks(), module=BatchOnly)
    assert trainer.global_step == 19


def test_profilers_and_step_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer, _ = fit(
        tmp_path,
        SkipNoOpHooks(),
        ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10),
        profiler="simple",
    )
    assert (tmp_path / "step=10.ckpt").is_file()
    assert "run_training_batch" in trainer.profiler.recorded_durations  # type: ignore[attr-defined]


def test_hooks_are_restored_after_an_error(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            raise ArithmeticError

    no_hooks = NoHooks()
    with pytest.raises(ArithmeticError):
        fit(tmp_path, SkipNoOpHooks(), no_hooks, Fails())
    assert not overrides_hook("on_before_backward", no_hooks)
    assert callable(no_hooks.on_before_backward)
