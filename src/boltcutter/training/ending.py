"""The end of training: validate once more, record an early stop in the checkpoint, respect it on resume.

Lightning ends when ``max_epochs`` or ``max_steps`` is reached, or when ``trainer.should_stop`` is set (by early
stopping or ``max_time``) and ``min_epochs`` and ``min_steps`` allow it. It validates only where an interval says so,
counts an epoch that ended early as complete, keeps ``should_stop`` in no checkpoint, and updates ReduceLROnPlateau
after the checkpoints of an epoch are saved. What is changed, in the order of a run:

1. ``load_initial_state`` asks ``resume`` whether the checkpoint had stopped under the same limits; then
   ``on_fit_start`` sets ``should_stop``, and nothing is trained.
2. ``on_load_checkpoint`` lets Lightning enter an epoch that had reached ``max_steps``, but was saved before its last
   validation.
3. ``on_train_start`` replaces the decision whether to validate after a batch: when Lightning does, and when training
   ends.
4. ``on_train_epoch_end`` updates ReduceLROnPlateau before the checkpoints of the epoch are saved.
5. ``on_save_checkpoint`` corrects the position of an epoch that ended early, and adds what has stopped training.
6. ``on_train_end``, or ``on_exception``, restores Lightning's loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)

from boltcutter.config.settings import Settings
from boltcutter.internals import can_stop_early, is_last_batch
from boltcutter.task.after_hook import AfterHook

LIMITS = ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")


class EndOfTraining(Callback):
    """Makes the end of training resumable and evaluated.

    - If training ends between two validations (``max_steps``, ``val_check_interval``, ``check_val_every_n_epoch``), it
      validates once more, so that the last weights are evaluated and can become the best ones, unless
      ``final_validation`` is false.
    - A checkpoint of an epoch that ended early keeps its position within the epoch, where Lightning would count the
      epoch as complete.
    - A checkpoint records whether training stopped before its limits: early stopping, ``max_time``, or anything else
      that sets ``trainer.should_stop``.

    Args:
        cfg: The configuration of the run.

    Attributes:
        finished: Whether the resumed run had stopped early under the same limits, so that there is nothing to train.
    """

    def __init__(self, cfg: Settings) -> None:
        self.limits, self.validates = limits(cfg), bool(cfg.final_validation)
        self.finished = False
        self._stopped_by: str | None = None  # of the resumed run
        self._is_stopping = False  # whether the resumed run was to stop when ``min_steps`` allows it
        self._max_steps: int | None = None  # the limit, while it is raised for the final validation

    def resume(self, saved: dict[str, Any]) -> str | None:
        """Read from a checkpoint whether training had stopped early.

        Returns:
            One line on what the resumed run does in that case; None if training had not stopped early.
        """
        self._is_stopping = saved.get("stopping") == self.limits
        stopped = saved.get("stopped_early")
        if not stopped:
            return None
        self.finished = stopped == self.limits
        stop = f"training had stopped early at step {saved.get('global_step', 0)}"
        self._stopped_by = saved.get("stopped_by")
        if self.finished and self._stopped_by == "trainer.max_time":
            spent = f"trainer.max_time={self.limits['trainer']['max_time']} is used up"
            return f"{stop}: {spent}; to continue, set trainer.max_time=<more>"
        if self.finished:
            return f"{stop} and does not continue; to continue, set trainer.max_epochs=<more> or change the callback"
        changed = [name for name in LIMITS if stopped["trainer"][name] != self.limits["trainer"][name]]
        what = ", ".join(f"trainer.{name}={self.limits['trainer'][name]}" for name in changed) or "other callbacks"
        return f"{stop}; it continues with {what}"

    def stopped_by(self, trainer: L.Trainer) -> str | None:
        """What ended training early: ``trainer.max_time`` or a ``callback``; None if another limit did."""
        if self.finished:
            return self._stopped_by
        return stopped_by(trainer) if trainer.should_stop and can_stop_early(trainer) else None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Skip training if the resumed run had finished, or let it stop as it would have."""
        if self.finished or self._is_stopping:
            trainer.should_stop = True

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning enter an epoch that reached ``max_steps`` but was saved before its final validation.

        With ``max_steps``, Lightning would also repeat the end of a complete epoch, and count one step too many.
        """
        trainer.fit_loop._iteration_based_training = _never  # type: ignore[method-assign]
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current")
        loop = trainer.fit_loop.epoch_loop
        reached = 0 <= loop.max_steps <= checkpoint.get("global_step", 0)
        if trainer.state.fn == "fit" and progress and reached and progress["processed"] < progress["started"]:
            validation = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"]
            if validation["completed"] < validation["ready"]:
                self._max_steps, loop.max_steps = loop.max_steps, loop.max_steps + 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate at the end of training."""
        loop: Any = trainer.fit_loop.epoch_loop
        loop._should_check_val_fx = partial(self._should_validate, trainer)
        if trainer.fit_loop.restarted_mid_epoch:
            # After on_train_start, where GradientAccumulationScheduler checks the trainer's initial value.
            trainer.fit_loop.on_advance_start = partial(_begin_epoch_again, trainer)  # type: ignore[method-assign]

    def _should_validate(self, trainer: L.Trainer, fetcher: Any) -> bool:
        """Whether to validate after this batch: when Lightning does, and at the end of training."""
        loop: Any = trainer.fit_loop.epoch_loop
        if self._max_steps is not None:
            loop.max_steps, self._max_steps = self._max_steps, None
        if type(loop)._should_check_val_fx(loop, fetcher):
            return True
        is_ours = self in trainer.callbacks  # type: ignore[attr-defined]  # not in a trial of BatchSizeFinder
        return self.validates and is_ours and is_ending(trainer) and trainer.enable_validation

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Update ReduceLROnPlateau as soon as the module has logged its metric."""
        configs = trainer.lr_scheduler_configs
        if is_last_batch(trainer) and any(each.reduce_on_plateau and each.interval == "epoch" for each in configs):
            AfterHook(pl_module, "on_train_epoch_end", partial(_update_plateaus, trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore Lightning's loop."""
        loop = trainer.fit_loop
        for owner in (loop, loop.epoch_loop):
            for name in ("_iteration_based_training", "_should_check_val_fx", "update_lr_schedulers"):
                if name in vars(owner):
                    delattr(owner, name)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore Lightning's loop, since ``on_train_end`` is not called after an exception."""
        self.on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the position within an epoch that ended early, and whether training stopped early, or is to."""
        if trainer.should_stop:
            checkpoint["stopping"] = self.limits
        loop = trainer.fit_loop
        progress: Any = loop.epoch_progress.current
        if not progress.started == progress.processed > 0:
            return  # within an epoch
        if trainer.should_stop and can_stop_early(trainer):
            checkpoint |= {"stopped_early": self.limits, "stopped_by": stopped_by(trainer)}
        if ended_mid_epoch(trainer):
            checkpoint["epoch"] -= 1
            saved = checkpoint["loops"]["fit_loop"]["epoch_progress"]
            for counts in (saved["total"], saved["current"]):
                counts["processed"] = counts["started"] - 1
                counts["completed"] = min(counts["completed"], counts["processed"])


def _update_plateaus(trainer: L.Trainer) -> None:
    """Update ReduceLROnPlateau before the checkpoints of an epoch are saved.

    Lightning updates it after they are saved, and never in an epoch within which a run is resumed.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    type(loop).update_lr_schedulers(loop, "epoch", update_plateau_schedulers=True)
    loop.update_lr_schedulers = partial(_update_others, loop)


def _update_others(loop: Any, interval: str, update_plateau_schedulers: bool) -> None:
    """Update schedulers, without those of plateaus at the end of the epoch."""
    if interval == "epoch" and update_plateau_schedulers:
        del loop.update_lr_schedulers
    else:
        type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)


def _never() -> bool:  # no lambda, as a trainer may be pickled
    return False


def _begin_epoch_again(trainer: L.Trainer) -> None:
    """Let callbacks do, in an epoch within which a run is resumed, what they do only at the start of an epoch.

    GradientAccumulationScheduler sets its value, and StochasticWeightAveraging its schedule; statistics of BatchNorm,
    which the latter computes anew in the last epoch, are kept.
    """
    loop: Any = trainer.fit_loop
    del loop.on_advance_start
    loop.on_advance_start()
    module = trainer.lightning_module
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            callback.on_train_epoch_start(trainer, module)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def limits(cfg: Settings) -> dict[str, Any]:
    """Collect the settings that decide when training ends: limits of the trainer, and numbers of its callbacks."""
    trainer, callbacks = cfg.written["trainer"], cfg.written.get("callback") or {}
    return {
        "trainer": {name: trainer.get(name) for name in LIMITS},
        "callback": {
            name: {key: value for key, value in options.items() if isinstance(value, int | float)}
            for name, options in callbacks.items()
            if options
        },
    }


def stopped_by(trainer: L.Trainer) -> str:
    """What has set ``trainer.should_stop``: ``trainer.max_time``, or another ``callback``."""
    timers = (callback for callback in trainer.callbacks if isinstance(callback, Timer))  # type: ignore[attr-defined]
    is_over = any((rest := timer.time_remaining()) is not None and rest <= 0 for timer in timers)
    return "trainer.max_time" if is_over else "callback"


def early_stop(trainer: L.Trainer, stopped_by: str | None) -> str | None:
    """One line on which callback has stopped training, and why; None if it was ``trainer.max_time``, or none has."""
    if stopped_by != "callback" or not trainer.should_stop:
        return None
    stopping = (callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping))  # type: ignore[attr-defined]
    reasons = (
        f"{type(callback).__name__}: {message.partition(' Signaling')[0].rstrip('.')}"
        for callback in stopping
        if (message := callback.stopping_reason_message)
    )
    why = next(reasons, "a callback or the task has set trainer.should_stop")
    progress: Any = trainer.fit_loop.epoch_progress.current
    epoch = progress.started
    limit = "" if trainer.max_epochs in (None, -1) else f" of {trainer.max_epochs}"
    return f"stopped early in epoch {epoch}{limit}, after {trainer.global_step:,} steps: {why}"


def unfinished_schedule(trainer: L.Trainer, stopped_by: str | None) -> str | None:
    """One line if ``trainer.max_time`` left out steps over which the learning rate was planned; None if it did not."""
    planned = getattr(trainer.lightning_module, "scheduled_steps", 0)
    if stopped_by != "trainer.max_time" or trainer.global_step >= planned:
        return None
    return (
        f"warning: scheduler: planned over {planned:.0f} steps, but trainer.max_time ended training after "
        f"{trainer.global_step}, before the learning rate had decayed; set trainer.max_steps={trainer.global_step}"
    )


def is_ending(trainer: L.Trainer) -> bool:
    """Whether training ends after the current batch."""
    loop = trainer.fit_loop
    is_last_step = 0 <= loop.epoch_loop.max_steps <= loop.epoch_loop.global_step
    if is_last_step or (trainer.should_stop and can_stop_early(trainer)):
        return True
    if not loop.epoch_loop.batch_progress.is_last_batch:
        return False
    return loop.max_epochs is not None and 0 <= loop.max_epochs <= trainer.current_epoch + 1


def ended_mid_epoch(trainer: L.Trainer) -> bool:
    """Whether the current or last epoch ended before its last batch."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.current.ready > 0 and not is_last_batch(trainer)
