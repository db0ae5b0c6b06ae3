import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer import call
from torch import Tensor

from boltcutter.data.digits import Digits
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification
from boltcutter_parallel.skip_no_op_hooks import HOOKS, SkipNoOpHooks, overrides_hook

CALLS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
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
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu",
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
    profiler, connector = trainer.profiler, trainer._logger_connector  # type: ignore[attr-defined]
    owners = (no_hooks, patched, loop, loop.automatic_optimization, trainer.precision_plugin, profiler, connector)
    private = ("_apply_batch", "_build", "_on_before", "_should", "output_result", "pre_", "post_", "profile", "on_b")
    for owner in owners:
        assert not {name for name in vars(owner) if name in HOOKS or name.startswith(private)}
    assert {vars(call)[name].__module__ for name in CALLS} == {call.__name__}


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


class Logs(Module):
    """Logs in most hooks by Lightning, whose defaults depend on the hook."""

    def log(self, *args: Any, **options: Any) -> None:
        L.LightningModule.log(self, *args, **options)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 0:
            self.log("step", loss.detach(), on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", float(batch_idx), prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val", float(batch_idx))


class Rows(CSVLogger):
    """Keeps all rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def test_values_logged_by_lightning_are_the_same(tmp_path: Path) -> None:
    found = []
    for callbacks in ([SkipNoOpHooks()], []):
        rows = Rows(tmp_path)
        options = {"max_epochs": 2, "log_every_n_steps": 2, "logger": rows}
        trainer, _ = fit(tmp_path / str(len(found)), *callbacks, module=Logs, **options)
        found.append((rows.rows, trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics))
    assert {name for _, row in found[0][0] for name in row} >= {"start", "step_step", "step_epoch", "end", "val"}
    assert str(found[0]) == str(found[1])


def test_callbacks_that_change_during_training_are_called(tmp_path: Path) -> None:
    class Once(L.Callback):
        """Removes its hook when it is called, and adds a callback."""

        calls = 0

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls += 1
            self.on_train_batch_end = None  # type: ignore[method-assign, assignment]
            trainer.callbacks.append(called)  # type: ignore[attr-defined]

    once, called = Once(), Called()
    trainer, _ = fit(tmp_path, SkipNoOpHooks(), once, max_epochs=2)
    assert once.calls == 1
    assert called.count["on_train_batch_start"] >= trainer.global_step // 2 == 19


def test_a_trainer_within_training_keeps_its_profiler(tmp_path: Path) -> None:
    class Nested(L.Callback):
        inner: Any = None

        def on_train_epoch_end(self, *_: Any) -> None:
            self.inner, _module = fit(tmp_path / "inner", profiler="simple")

    nested = Nested()
    fit(tmp_path, SkipNoOpHooks(), nested)
    durations = nested.inner.profiler.recorded_durations
    assert any(name.startswith("[Callback]") for name in durations)
    assert any(name.startswith("[Strategy]") for name in durations)


def test_a_step_takes_a_quarter_of_the_python_calls(tmp_path: Path) -> None:
    class Calls(L.Callback):
        """Counts the calls of Python functions from the second step on."""

        count = 0

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                sys.setprofile(self.add)

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 11:
                sys.setprofile(None)

        def add(self, frame: Any, event: str, argument: Any) -> None:
            self.count += event == "call"

    counts = []
    for others in ([SkipNoOpHooks()], []):
        calls = Calls()
        fit(tmp_path / str(len(counts)), *others, calls, *(L.Callback() for _ in range(10)))
        counts.append(calls.count)
    assert counts[0] < 0.25 * counts[1], counts
