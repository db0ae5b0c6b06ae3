"""Skip no-op hooks and other per-step work that has no effect."""

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

from boltcutter.callback.checkpoint import saves_within_epochs
from boltcutter.environment.process import release_freed_memory
from boltcutter.protocols import handles_signals

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
    """Remove no-op hooks from the training loop, and profiling if no profiler is set.

    Lightning calls every hook of each callback and of the module, and enters a profiler context each time, which takes
    as long as a training step of a small model. It skips hooks that are not callable, so hooks that are not
    overridden are set to None during training.
    """

    def __init__(self) -> None:
        self._patched: list[tuple[Any, str]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what has no effect."""
        release_freed_memory()  # of the sanity check, whose batches left it in pieces
        if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
            trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        overridden = {hook for hook in HOOKS for owner in (*callbacks, pl_module) if overrides_hook(hook, owner)}
        for owner in (*callbacks, pl_module):
            for hook in HOOKS:
                if not overrides_hook(hook, owner) or _never_saves_after_batch(owner, hook):
                    self._patch(owner, hook, None)
        data = trainer.datamodule  # type: ignore[attr-defined]
        owners = [owner for owner in (pl_module, data) if owner is not None]
        # Lightning checks for each batch whether these are overridden.
        if not any(overrides_hook(hook, owner) for hook in AROUND_TRANSFER for owner in owners):
            mover = owners[-1] if overrides_hook("transfer_batch_to_device", owners[-1]) else pl_module
            self._patch(pl_module, "_on_before_batch_transfer", _identity_batch)
            self._patch(pl_module, "_apply_batch_transfer_handler", partial(_transfer, mover))
        # Preemption already synchronizes signals; Lightning would broadcast at each step, and wait for the device.
        if handles_signals(callbacks):
            self._patch(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
        self._simplify_loop(trainer, pl_module, overridden)

    def _simplify_loop(self, trainer: L.Trainer, pl_module: L.LightningModule, overridden: set[str]) -> None:
        """Remove code around no-op hooks, and checks that have the same result at each step."""
        epoch, plugin = trainer.fit_loop.epoch_loop, trainer.precision_plugin
        takes_batch_idx = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        self._patch(epoch, "_build_kwargs", partial(_step_arguments, takes_batch_idx))
        self._patch(epoch.automatic_optimization, "output_result_cls", Result)
        self._patch(epoch, "_should_check_val_epoch", partial(_is_validation_epoch, trainer, trainer.enable_validation))
        if "on_before_zero_grad" not in overridden:
            self._patch(epoch.automatic_optimization, "_on_before_zero_grad", partial(_count_zero_grad, trainer))
        for name, hook in (("pre_backward", "on_before_backward"), ("post_backward", "on_after_backward")):
            if hook not in overridden and getattr(type(plugin), name) is getattr(Precision, name):
                self._patch(plugin, name, lambda loss, module: loss)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore what was removed."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore what was removed."""
        self._restore()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name) and name not in vars(owner):
            setattr(owner, name, value)
            self._patched.append((owner, name))

    def _restore(self) -> None:
        while self._patched:
            owner, name = self._patched.pop()
            vars(owner).pop(name, None)


def overrides_hook(hook: str, owner: Any) -> bool:
    """Whether ``owner`` overrides a hook of its Lightning base class."""
    base = next(base for base in (Callback, L.LightningModule, L.LightningDataModule) if isinstance(owner, base))
    return hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)


def _never_saves_after_batch(owner: Any, hook: str) -> bool:
    """Whether the hook is that of a checkpoint callback which saves at the end of epochs only."""
    return (
        hook == "on_train_batch_end"
        and isinstance(owner, ModelCheckpoint)
        and type(owner).on_train_batch_end is ModelCheckpoint.on_train_batch_end
        and not saves_within_epochs(owner)
    )


def _count_zero_grad(trainer: L.Trainer, optimizer: Optimizer) -> None:
    """Update the progress counters as Lightning does around the hook."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
    progress.increment_ready()
    progress.increment_started()


def _is_validation_epoch(trainer: L.Trainer, enabled: bool) -> bool:
    """Whether validation runs in this epoch; Lightning checks at each step whether there is any validation."""
    every = trainer.check_val_every_n_epoch
    return enabled and (every is None or (trainer.current_epoch + 1) % every == 0)


def _step_arguments(takes_batch_idx: bool, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
    """Arguments of ``training_step``; Lightning inspects its signature at each step."""
    return {**kwargs, "batch": batch, "batch_idx": batch_idx} if takes_batch_idx else {**kwargs, "batch": batch}


# Not lambdas: a dataset that refers to the module is pickled for workers.
def _identity_batch(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


def _transfer(owner: Any, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
    return owner.transfer_batch_to_device(batch, device, dataloader_idx)


class Result(ClosureResult):
    """Closure result without the division by one and the copy of the loss."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """Create the result from the output of ``training_step``."""
        if normalize == 1 and type(training_step_output) is Tensor:
            result = cls(None)
            result.closure_loss, result.loss = training_step_output, training_step_output.detach()
            return result
        return super().from_training_step_output(training_step_output, normalize)


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing, at less cost than Lightning's."""

    _context = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return a context that does nothing."""
        return self._context
