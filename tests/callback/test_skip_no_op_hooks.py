import functools
import pickle
import sys
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback import skip_no_op_hooks
from boltcutter.callback.skip_no_op_hooks import REPLACED, SkipNoOpHooks
from boltcutter.data.digits import Digits
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in (
        "does not have many workers",
        "is smaller than the logging interval",
        "You have overridden",
        "Be aware that when using",
    )
]


class Record(L.Callback):
    """Records what is called with it, by hook."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def of(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append(name)


class Module(Classification):
    def __init__(self) -> None:
        super().__init__(Linear((1, 8, 8), 10), optimizer=torch.optim.SGD)
        self.before_backward = 0

    def on_before_backward(self, loss: Tensor) -> None:
        self.before_backward += 1


def fit(
    folder: Path,
    *callbacks: L.Callback,
    module: type[Any] | None = None,
    **options: Any,
) -> tuple[L.Trainer, Any]:
    L.seed_everything(0, verbose=False)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, ModelCheckpoint(folder)],
        use_distributed_sampler=False,
        **silent | options,
    )
    trained = (module or Module)()
    own = hasattr(trained, "batch_size")
    trainer.fit(trained, datamodule=None if own else Digits())
    return trainer, trained


def is_restored() -> bool:
    return not any(getattr(owner, name) is function for owner, name, function in REPLACED)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_identical_and_lightning_is_restored(tmp_path: Path, accumulate: int) -> None:
    trainer, direct = fit(tmp_path, SkipNoOpHooks(), accumulate_grad_batches=accumulate)
    other, plain = fit(tmp_path / "plain", accumulate_grad_batches=accumulate)
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), plain.parameters(), strict=True))
    assert trainer.fit_loop.state_dict() == other.fit_loop.state_dict()  # includes Lightning's progress counters
    assert is_restored()


class Later(L.Callback):
    """Sets a hook at a batch of the second epoch, on one of the objects that have hooks."""

    def __init__(self, owner: str, hook: str, record: Record) -> None:
        self.owner, self.hook, self.record = owner, hook, record
        self.undo: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != (1, 4):
            return
        idle = next(callback for callback in trainer.callbacks if type(callback) is Idle)
        strategy, data = trainer.strategy, trainer.datamodule
        owners = {"callback": idle, "class": Idle, "module": module, "strategy": strategy, "data": data}
        owner, original = owners[self.owner], getattr(owners[self.owner], self.hook)
        called = self.record.of(self.hook)

        def hook(*args: Any, **options: Any) -> Any:
            called()
            return original(*args, **options)

        setattr(owner, self.hook, hook)

    def on_train_end(self, *_: Any) -> None:
        if self.owner == "class":
            delattr(Idle, self.hook)


class Idle(L.Callback):
    """Overrides no hook."""


@pytest.mark.parametrize(
    ("owner", "hook"),
    [
        ("callback", "on_after_backward"),
        ("callback", "on_train_batch_start"),
        ("class", "on_before_zero_grad"),
        ("module", "on_before_optimizer_step"),
        ("module", "on_after_batch_transfer"),
        ("module", "training_step"),
        ("strategy", "on_train_batch_start"),
        ("strategy", "backward"),
        ("data", "on_before_batch_transfer"),
        ("data", "transfer_batch_to_device"),
    ],
)
def test_a_hook_that_is_set_during_training_is_called(tmp_path: Path, owner: str, hook: str) -> None:
    counts = []
    for direct in ([SkipNoOpHooks()], []):
        record = Record()
        fit(tmp_path / str(len(counts)), *direct, Later(owner, hook, record), Idle(), max_epochs=2)
        counts.append(len(record.calls))
    assert counts[0] == counts[1] >= 14


def test_a_hook_that_is_removed_or_added_within_its_own_call(tmp_path: Path) -> None:
    class Once(L.Callback):
        """Removes its hook when it is called, adds a callback, and sets the hook of the next one."""

        calls = 0

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls += 1
            self.on_train_batch_end = None  # type: ignore[method-assign, assignment]
            trainer.callbacks.append(added)  # type: ignore[attr-defined]
            following.on_train_batch_end = record.of("following")  # type: ignore[method-assign]

    found = []
    for direct in ([SkipNoOpHooks()], []):
        once, following, added, record = Once(), Idle(), Idle(), Record()
        added.on_train_batch_end = record.of("added")  # type: ignore[method-assign]
        fit(tmp_path / str(len(found)), *direct, once, following)
        assert once.calls == 1
        found.append(record.calls)
    assert found[0] == found[1]
    assert found[0].count("following") == 19
    assert found[0].count("added") >= 18


def test_a_hook_called_by_another_callback(tmp_path: Path) -> None:
    class Calls(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            inner.on_train_batch_end(*args)
            args[1].on_before_zero_grad(None)

    inner = Idle()
    trainer, _ = fit(tmp_path, SkipNoOpHooks(), inner, Calls())
    assert trainer.global_step == 19


class Sized(L.LightningModule):
    """Has a batch size and a learning rate, which Lightning's callbacks for tuning change."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.batch_size, self.lr = torch.nn.Linear(64, 10), 64, 0.1

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.cross_entropy(self.model(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(512, 1, 8, 8), torch.randint(10, (512,))), self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("tuner", [BatchSizeFinder, LearningRateFinder])
def test_callbacks_that_train_within_an_epoch(tmp_path: Path, tuner: type[Any]) -> None:
    class AtEpochs(tuner):  # type: ignore[misc]
        """As in the documentation of Lightning's callbacks."""

        def on_fit_start(self, *_: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
            run = self.scale_batch_size if tuner is BatchSizeFinder else self.lr_find
            run(trainer, module)

    class Counts(L.Callback):
        def __init__(self) -> None:
            self.batches: dict[int, int] = {}

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.batches[trainer.current_epoch] = self.batches.get(trainer.current_epoch, 0) + 1

    options = {"max_trials": 2, "steps_per_trial": 2} if tuner is BatchSizeFinder else {"num_training_steps": 10}
    found = []
    for direct in ([SkipNoOpHooks()], []):
        counts = Counts()
        _, module = fit(tmp_path / str(len(found)), *direct, AtEpochs(**options), counts, module=Sized, max_epochs=2)
        found.append((counts.batches, module.batch_size, module.lr))
    assert found[0] == found[1]
    assert sum(found[0][0].values()) >= 8
    assert is_restored()


def test_validation_that_is_turned_on_and_off_during_training(tmp_path: Path) -> None:
    class Changes(L.Callback):
        epochs: list[int]

        def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
            trainer.limit_val_batches = float(trainer.current_epoch not in (1, 2))
            trainer.check_val_every_n_epoch = 1 if trainer.current_epoch < 4 else 2

        def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
            if not trainer.sanity_checking:
                self.epochs.append(trainer.current_epoch)

    found = []
    for direct in ([SkipNoOpHooks()], []):
        changes = Changes()
        changes.epochs = []
        fit(tmp_path / str(len(found)), *direct, changes, max_epochs=6)
        found.append(changes.epochs)
    assert found[0] == found[1] == [0, 3, 5]


def with_attribute(hook: Any) -> Any:
    @functools.wraps(hook)
    def wrapper(*args: Any, **options: Any) -> Any:
        return hook(*args, **options)

    return wrapper


class Transfers(L.LightningModule):
    """Has its own hook in the forms that Lightning knows, and others."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    on_before_batch_transfer = with_attribute(L.LightningModule.on_before_batch_transfer)

    def training_step(self, batch: Any, *more: Any) -> None:  # type: ignore[override]
        pass


def set_on_instance(name: str, hook: Any) -> L.LightningModule:
    module = L.LightningModule()
    setattr(module, name, hook)
    return module


@pytest.mark.parametrize("name", ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"])
@pytest.mark.parametrize(
    "make",
    [
        L.LightningModule,
        L.LightningDataModule,
        Digits,
        Transfers,
        lambda: set_on_instance("on_after_batch_transfer", lambda batch, index: batch),
        lambda: set_on_instance("on_after_batch_transfer", None),
        lambda: set_on_instance("on_after_batch_transfer", Mock(wraps=L.LightningModule().on_after_batch_transfer)),
        lambda: set_on_instance("on_before_batch_transfer", partial(Transfers().on_after_batch_transfer)),
    ],
)
def test_hooks_of_the_data_are_overridden_as_lightning_finds(make: Any, name: str) -> None:
    owner = make()
    assert skip_no_op_hooks._is_overridden(name, owner) == is_overridden(name, owner)


@pytest.mark.parametrize(
    "step",
    [
        Module().training_step,
        Transfers().training_step,
        lambda batch: None,
        lambda self, batch, batch_idx: None,
        partial(Module().training_step),
        MethodType(lambda self, batch: None, object()),
        MethodType(lambda self, batch, *, batch_idx: None, object()),
        MethodType(lambda self, *batch: None, object()),
        MethodType(lambda self, batch, /, number: None, object()),
        MethodType(with_attribute(lambda self, batch: None), object()),
    ],
)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("least", [None, 2])
def test_a_step_takes_what_lightning_finds(step: Any, explicit: bool, least: int | None) -> None:
    found = skip_no_op_hooks._takes(step, "batch_idx", explicit, least)
    assert found == is_param_in_hook_signature(step, "batch_idx", explicit, least)


def test_stages_are_compared_as_lightning_does(tmp_path: Path) -> None:
    others = [*RunningStage, *TrainerFn, "train", "TRAIN", "validate", None, 3, object()]
    pairs = [(stage, other) for stage in (*RunningStage, *TrainerFn) for other in others]
    expected = [(stage == other, other == stage) for stage, other in pairs]

    class Compares(L.Callback):
        found: Any = None

        def on_train_start(self, *_: Any) -> None:
            self.found = [(stage == other, other == stage) for stage, other in pairs]
            assert {RunningStage.TRAINING: 1}[RunningStage.TRAINING] == 1

    compares = Compares()
    fit(tmp_path, SkipNoOpHooks(), compares)
    assert compares.found == expected


def test_the_loss_of_outputs_shares_no_memory_with_that_of_the_module(tmp_path: Path) -> None:
    class Keeps(Module):
        last: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.last = super().training_step(batch, batch_idx)
            return self.last

    class Changes(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            outputs["loss"].zero_()
            assert module.last > 0

    fit(tmp_path, SkipNoOpHooks(), Changes(), module=Keeps)


def test_a_training_step_that_is_replaced_by_one_without_batch_idx(tmp_path: Path) -> None:
    class Replaces(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                step = module.training_step
                module.training_step = lambda batch: record.of("step")() or step(batch, 0)

    record = Record()
    trainer, _ = fit(tmp_path, SkipNoOpHooks(), Replaces())
    assert trainer.global_step == 19
    assert len(record.calls) == 14


def test_a_training_step_without_batch_idx(tmp_path: Path) -> None:
    class BatchOnly(Module):
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    trainer, _ = fit(tmp_path, SkipNoOpHooks(), module=BatchOnly)
    assert trainer.global_step == 19


def test_a_profiler_records_the_same_actions(tmp_path: Path) -> None:
    actions = []
    for direct in ([SkipNoOpHooks()], []):
        trainer, _ = fit(tmp_path / str(len(actions)), *direct, profiler="simple")
        recorded = trainer.profiler.recorded_durations  # type: ignore[attr-defined]
        actions.append({name: len(times) for name, times in recorded.items() if "SkipNoOpHooks" not in name})
    assert actions[0] == actions[1]
    assert any("transfer_batch_to_device" in action for action in actions[0])


def test_a_profiler_that_is_set_during_training(tmp_path: Path) -> None:
    class Sets(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.profiler = SimpleProfiler()

    trainer, _ = fit(tmp_path, SkipNoOpHooks(), Sets(), max_epochs=2)
    recorded = trainer.profiler.recorded_durations  # type: ignore[attr-defined]
    assert len(recorded["[Strategy]SingleDeviceStrategy.backward"]) == 19


def test_lightning_is_restored_after_an_error(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(tmp_path, SkipNoOpHooks(), Fails())
    assert is_restored()


def test_a_copy_in_another_process_restores_nothing(tmp_path: Path) -> None:
    class Copies(L.Callback):
        copy: Any = None

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.copy = pickle.loads(pickle.dumps(direct))
            self.copy.teardown(trainer, module, "fit")
            assert not is_restored()

    direct = SkipNoOpHooks()
    fit(tmp_path, direct, Copies())
    assert is_restored()


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


def test_a_step_takes_half_of_the_python_calls(tmp_path: Path) -> None:
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
    assert counts[0] < 0.5 * counts[1], counts
