"""What a step does not need, it does not do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from boltcutter.environment.process import release_freed_memory

HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
AROUND_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")


class SkipNoOpHooks(Callback):
    """Take out of each step what does nothing: hooks that nobody has written, and profiling where nobody asked for it.

    Lightning passes over a hook that cannot be called. Otherwise it calls all of them, of each callback and of the
    module, and prepares a line for the profiler each time; together that takes as long as a step of a small model.
    """

    def __init__(self) -> None:
        self._emptied: list[tuple[Any, str]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take out."""
        release_freed_memory()  # of the sanity check, whose batches left it in pieces
        if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
            trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for owner in (*callbacks, pl_module):
            for hook in HOOKS:
                if not overrides_hook(hook, owner) or _saves_at_no_step(owner, hook):
                    self._put(owner, hook, None)
        data = trainer.datamodule  # type: ignore[attr-defined]
        owners = [owner for owner in (pl_module, data) if owner is not None]
        # Lightning looks at each batch who has written these.
        if not any(overrides_hook(hook, owner) for hook in AROUND_TRANSFER for owner in owners):
            mover = owners[-1] if overrides_hook("transfer_batch_to_device", owners[-1]) else pl_module
            self._put(pl_module, "_on_before_batch_transfer", _as_it_is)
            self._put(pl_module, "_apply_batch_transfer_handler", partial(_move, mover))
        # Ranks agree on signals already; Lightning would ask again at each step, and wait for the device.
        if any(getattr(callback, "handles_signals", False) for callback in callbacks):
            self._put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _nothing)
        self._shorten(
            trainer,
            pl_module,
            {hook for hook in HOOKS if any(overrides_hook(hook, o) for o in (*callbacks, pl_module))},
        )

    def _shorten(self, trainer: L.Trainer, pl_module: L.LightningModule, wanted: set[str]) -> None:
        """Take out what stands around the hooks that nobody has written, and what is found anew at each step."""
        epoch, plugin = trainer.fit_loop.epoch_loop, trainer.precision_plugin
        numbered = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        self._put(epoch, "_build_kwargs", partial(_arguments, numbered))
        self._put(epoch.automatic_optimization, "output_result_cls", Result)
        self._put(epoch, "_should_check_val_epoch", partial(_validates, trainer, trainer.enable_validation))
        if "on_before_zero_grad" not in wanted:
            self._put(epoch.automatic_optimization, "_on_before_zero_grad", partial(_count_zero_grad, trainer))
        for name, hook in (("pre_backward", "on_before_backward"), ("post_backward", "on_after_backward")):
            if hook not in wanted and getattr(type(plugin), name) is getattr(Precision, name):
                self._put(plugin, name, _the_same)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put back."""
        self._put_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put back."""
        self._put_back()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name) and name not in vars(owner):
            setattr(owner, name, value)
            self._emptied.append((owner, name))

    def _put_back(self) -> None:
        while self._emptied:
            delattr(*self._emptied.pop())


def overrides_hook(hook: str, owner: Any) -> bool:
    """Whether a hook is anybody's own, and not Lightning's empty one."""
    base = next(base for base in (Callback, L.LightningModule, L.LightningDataModule) if isinstance(owner, base))
    return hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)


def _saves_at_no_step(owner: Any, hook: str) -> bool:
    """Whether it is a checkpoint's look at a batch's end, where checkpoints are made at the end of epochs only."""
    return (
        hook == "on_train_batch_end"
        and isinstance(owner, ModelCheckpoint)
        and type(owner).on_train_batch_end is ModelCheckpoint.on_train_batch_end
        and owner._every_n_train_steps < 1
        and owner._train_time_interval is None
    )


def _nothing() -> None:
    pass


def _count_zero_grad(trainer: L.Trainer, optimizer: Optimizer) -> None:
    """All that is left of a hook that nobody has written: its place in Lightning's counts."""
    counted = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
    counted.increment_ready()
    counted.increment_started()


def _validates(trainer: L.Trainer, enabled: bool) -> bool:
    """Whether this epoch is one with a validation; Lightning looks at each step whether there is any."""
    every = trainer.check_val_every_n_epoch
    return enabled and (every is None or (trainer.current_epoch + 1) % every == 0)


def _the_same(loss: Tensor, module: L.LightningModule) -> Tensor:
    return loss


def _arguments(numbered: bool, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
    """What a training step is called with; Lightning reads its signature each time."""
    return {**kwargs, "batch": batch, "batch_idx": batch_idx} if numbered else {**kwargs, "batch": batch}


def _as_it_is(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


def _move(mover: Any, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
    return mover.transfer_batch_to_device(batch, device, dataloader_idx)


class Result(ClosureResult):
    """A step's loss, neither divided by one nor copied."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """As Lightning's."""
        if normalize == 1 and type(training_step_output) is Tensor:
            result = cls(None)
            result.closure_loss, result.loss = training_step_output, training_step_output.detach()
            return result
        return super().from_training_step_output(training_step_output, normalize)


class NoProfiler(PassThroughProfiler):
    """Does nothing, and takes less time for it than Lightning's."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Nothing."""
        return self._nothing
