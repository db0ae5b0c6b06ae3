"""What a step does not need, it does not do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler

HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


class Lean(Callback):
    """Take out of each step what does nothing: hooks that nobody has written, and profiling where nobody asked for it.

    Lightning passes over a hook that cannot be called. Otherwise it calls all of them, of each callback and of the
    module, and prepares a line for the profiler each time, which takes longer than a step of a small model.
    """

    def __init__(self) -> None:
        self._emptied: list[tuple[Any, str]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take out."""
        if type(trainer.profiler) is PassThroughProfiler:
            trainer.profiler = NoProfiler()
        for owner, base in (*((callback, Callback) for callback in trainer.callbacks), (pl_module, L.LightningModule)):  # type: ignore[attr-defined]
            for hook in HOOKS:
                if getattr(type(owner), hook) is getattr(base, hook) and hook not in vars(owner):
                    setattr(owner, hook, None)
                    self._emptied.append((owner, hook))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put back."""
        self._put_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put back."""
        self._put_back()

    def _put_back(self) -> None:
        while self._emptied:
            delattr(*self._emptied.pop())


class NoProfiler(PassThroughProfiler):
    """Does nothing, and takes less time for it than Lightning's."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Nothing."""
        return self._nothing
