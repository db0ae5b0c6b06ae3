"""Skip no-op hooks and other per-step work that has no effect."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from boltcutter.callback.checkpoint import saves_within_epochs
from boltcutter.environment.process import call_glibc
from boltcutter.internals import epoch_results, logger_connector
from boltcutter.protocols import handles_signals
from boltcutter_parallel.internals import CURRENT_HOOK, replaced

AROUND_BATCH = ("on_train_batch_start", "on_train_batch_end")
HOOKS = (*AROUND_BATCH, "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
NO_PROFILE = nullcontext()
AROUND_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")


class SkipNoOpHooks(Callback):
    """Remove no-op hooks from the training loop, and profiling if no profiler is set.

    Lightning calls every hook of each callback and of the module, enters a profiler context and formats a debug message
    each time, which takes as long as a training step of a small model. It skips hooks that are not callable, so hooks
    that are not overridden are set to None during training; the others are called directly.
    """

    def __init__(self) -> None:
        self._patched = ExitStack()  # restores what was removed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what has no effect."""
        call_glibc("malloc_trim", 0)  # memory that the batches of the sanity check left in pieces
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        overridden = {hook for hook in HOOKS for owner in (*callbacks, pl_module) if overrides_hook(hook, owner)}
        for owner in (*callbacks, pl_module):
            for hook in HOOKS:
                if not overrides_hook(hook, owner) or _never_saves_after_batch(owner, hook):
                    self._patch(owner, hook, None)
        owners = [owner for owner in (pl_module, trainer.datamodule) if owner is not None]  # type: ignore[attr-defined]
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
        index = ["batch_idx"] if is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2) else []
        self._patch(epoch, "_should_accumulate", partial(_should_accumulate, trainer, epoch.batch_progress))
        self._patch(epoch, "_build_kwargs", lambda kwargs, *step: dict(zip(["batch", *index], step, strict=False)))
        self._patch(epoch.automatic_optimization, "output_result_cls", Result)
        self._patch(epoch, "_should_check_val_epoch", partial(_is_validation_epoch, trainer, trainer.enable_validation))
        self._patch(epoch, "update_lr_schedulers", partial(_update_schedulers, trainer, epoch.update_lr_schedulers))
        if type(trainer.strategy).on_train_batch_start is Strategy.on_train_batch_start:
            self._patch(trainer.strategy, "on_train_batch_start", None)
        for name, hook in (("pre_backward", "on_before_backward"), ("post_backward", "on_after_backward")):
            if hook not in overridden and getattr(type(plugin), name) is getattr(Precision, name):
                self._patch(plugin, name, lambda loss, module: loss)
        connector, results = logger_connector(trainer), epoch_results(trainer)
        self._patch(connector, "on_batch_start", partial(_start_batch, connector, trainer.state, results))
        for name in ("on_batch_end", "update_train_step_metrics"):
            self._patch(connector, name, partial(_unless_empty, getattr(connector, name), trainer.state, results))
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if type(profiler) is PassThroughProfiler and not call.log.isEnabledFor(logging.DEBUG):
            self._patch(profiler, "profile", lambda action_name: NO_PROFILE)
            for name, function in direct_calls(trainer, pl_module).items():
                self._patched.enter_context(replaced(call, name, function))

    def on_train_end(self, *_: Any) -> None:
        """Restore what was removed."""
        self._patched.close()

    def on_exception(self, *_: Any) -> None:
        """Restore what was removed."""
        self._patched.close()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name) and name not in vars(owner):
            setattr(owner, name, value)
            self._patched.callback(vars(owner).pop, name, None)


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


def direct_calls(trainer: Any, module: L.LightningModule) -> dict[str, Callable[..., Any]]:
    """Functions of ``lightning.pytorch.trainer.call`` that call the hooks of this trainer and do nothing else."""
    overriding: dict[str, list[Callback]] = {}  # callbacks by hook, of which a step calls four
    state = vars(module)

    def call_owner(owner: Any, original: Callable[..., Any], caller: Any, hook: str, *args: Any, **options: Any) -> Any:
        if caller is not trainer or "pl_module" in options:
            return original(caller, hook, *args, **options)
        if not callable(function := getattr(owner, hook)):
            return None
        previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook
        output = function(*args, **options)
        state[CURRENT_HOOK] = previous
        return output

    def call_callbacks(original: Callable[..., Any], caller: Any, hook: str, *args: Any, **options: Any) -> None:
        if caller is not trainer or "monitoring_callbacks" in options:
            original(caller, hook, *args, **options)
            return
        previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook
        if hook == "on_train_epoch_start":
            overriding.clear()  # callbacks may have been added, or have set hooks
        if hook not in overriding:
            overriding[hook] = [callback for callback in trainer.callbacks if callable(getattr(callback, hook))]
        for callback in overriding[hook]:
            if callable(function := getattr(callback, hook)):  # some remove their hook when they are done
                function(trainer, module, *args, **options)
        state[CURRENT_HOOK] = previous

    return {
        "_call_callback_hooks": partial(call_callbacks, call._call_callback_hooks),
        "_call_lightning_module_hook": partial(call_owner, module, call._call_lightning_module_hook),
        "_call_strategy_hook": partial(call_owner, trainer.strategy, call._call_strategy_hook),
    }


def _start_batch(connector: Any, state: Any, results: Any, batch: Any, *index: int) -> None:
    """Begin the results of a step; Lightning looks for them by comparing the names of stages."""
    if state.stage is RunningStage.TRAINING and connector._first_loop_iter is False:
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
    else:
        type(connector).on_batch_start(connector, batch, *index)


def _update_schedulers(
    trainer: Any, update: Callable[..., None], interval: str, update_plateau_schedulers: bool
) -> None:
    """Update learning rates if there is a scheduler of this kind, for which Lightning looks twice at each step."""
    for config in trainer.strategy.lr_scheduler_configs:
        if config.interval == interval and config.reduce_on_plateau == update_plateau_schedulers:
            update(interval, update_plateau_schedulers)
            return


def _unless_empty(update: Callable[[], None], state: Any, results: Any) -> None:
    """Collect the logged values of a step; without any, Lightning would update empty dictionaries."""
    if state.stage is not RunningStage.TRAINING or any(True for _ in results.valid_items()):
        update()
    else:
        results.batch = results.batch_size = None


def _should_accumulate(trainer: L.Trainer, progress: Any) -> bool:
    """Whether the batch has no optimizer step; Lightning asks six times at each step, each by ten calls."""
    ready = progress.current.ready
    if ready % trainer.accumulate_grad_batches == 0:
        return False
    is_last = progress.is_last_batch or ready == trainer.num_training_batches
    return trainer.strategy.handles_gradient_accumulation or not is_last


def _is_validation_epoch(trainer: L.Trainer, enabled: bool) -> bool:
    """Whether validation runs in this epoch; Lightning checks at each step whether there is any validation."""
    return enabled and (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0


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
