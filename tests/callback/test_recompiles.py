import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from boltcutter.callback.recompiles import RecompileMonitor


class Task:
    """A task with the interface that the callback uses."""

    compile_model: Any = "xla"

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.logged: list[float] = []

    def recompile_reasons(self) -> list[str]:
        return self.reasons

    def log(self, name: str, value: float) -> None:
        assert name == "recompiles"
        self.logged.append(value)


def test_recompiles_are_logged_and_many_warn_once_with_the_reason() -> None:
    callback, task = RecompileMonitor(warn_after=2), Task()
    trainer: Any = SimpleNamespace(log_every_n_steps=10, global_step=10)
    callback.on_train_batch_end(trainer, task, None, None, 0)  # type: ignore[arg-type]
    trainer.global_step = 11
    callback.on_train_batch_end(trainer, task, None, None, 0)  # type: ignore[arg-type]
    assert task.logged == [0.0]  # at logging steps
    task.reasons = ["one", "two", "three\nand more"]
    with pytest.warns(UserWarning, match=r"^task.compile=xla: .*3 times.*three and more; .*task.compile=false"):
        callback.on_train_epoch_end(trainer, task)  # type: ignore[arg-type]
    task.reasons.append("four")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_epoch_end(trainer, task)  # type: ignore[arg-type]
    assert task.logged == [0.0, 3.0, 4.0]


def test_a_task_that_is_not_compiled_logs_nothing() -> None:
    callback, task = RecompileMonitor(), Task()
    task.compile_model = False
    trainer: Any = SimpleNamespace(log_every_n_steps=1, global_step=10)
    callback.on_train_batch_end(trainer, task, None, None, 0)  # type: ignore[arg-type]
    callback.on_train_epoch_end(trainer, task)  # type: ignore[arg-type]
    assert not task.logged


def test_a_negative_warn_after_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^callback.recompiles.warn_after=-1 .*; try 3$"):
        RecompileMonitor(warn_after=-1)
