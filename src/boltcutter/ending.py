"""Where a training ends: it validates once more, its checkpoint says so, and a resumed run does not train on."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from boltcutter.config import DictConfig, plain

LIMITS = ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")


class Ending(Callback):
    """Ends a training such that it can be finished, or continued, later.

    Training that ends between two validations (``max_steps``, ``val_check_interval``, ``check_val_every_n_epoch``)
    validates once more, so that its last weights are measured and can become the best ones. A checkpoint of an epoch
    that was cut short keeps its place within the epoch, where Lightning would count the epoch as complete. The
    checkpoint of a training that stopped before its limits (early stopping, or anything else that sets
    ``trainer.should_stop``) says so.

    Args:
        cfg: The run's configuration.

    Attributes:
        finished: Whether the training that is resumed has ended, so that nothing is left to train.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.limits = limits(cfg)
        self.finished = False
        self._max_steps: int | None = None  # while Lightning must not see that they are reached

    def resume(self, saved: dict[str, Any]) -> str | None:
        """Learn from the checkpoint whether training had stopped early.

        Returns:
            What a resumed run does about it, in one line; None where it had not.
        """
        stopped = saved.get("stopped_early")
        if not stopped:
            return None
        self.finished = stopped == self.limits
        step = f"training had stopped early at step {saved.get('global_step', 0)}"
        if self.finished:
            return f"{step} and is not continued; to train on, set trainer.max_epochs=<more> or change the callback"
        changed = [name for name in LIMITS if stopped["trainer"][name] != self.limits["trainer"][name]]
        what = ", ".join(f"trainer.{name}={self.limits['trainer'][name]}" for name in changed) or "other callbacks"
        return f"{step}; it continues with {what}"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Skip training where it has ended."""
        if self.finished:
            trainer.should_stop = True

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning go into an epoch that reached ``max_steps`` but was saved before its last validation."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current")
        loop = trainer.fit_loop.epoch_loop
        reached = 0 <= loop.max_steps <= checkpoint.get("global_step", 0)
        if trainer.state.fn == "fit" and progress and reached and progress["processed"] < progress["started"]:
            validation = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"]
            if validation["completed"] < validation["ready"]:
                self._max_steps, loop.max_steps = loop.max_steps, loop.max_steps + 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Have training validate at its end."""
        loop: Any = trainer.fit_loop.epoch_loop
        due = loop._should_check_val_fx

        def validates(fetcher: Any) -> bool:
            if self._max_steps is not None:
                loop.max_steps, self._max_steps = self._max_steps, None
            return bool(due(fetcher)) or (ends(trainer) and trainer.enable_validation)

        loop._should_check_val_fx = validates
        if trainer.fit_loop.restarted_mid_epoch:
            _accumulate_as_scheduled(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave Lightning's loop as it was."""
        if "_should_check_val_fx" in vars(trainer.fit_loop.epoch_loop):
            del trainer.fit_loop.epoch_loop._should_check_val_fx

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """As ``on_train_end``, which is not called then."""
        self.on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the place within an epoch that was cut short, and whether training stopped early."""
        loop = trainer.fit_loop
        progress: Any = loop.epoch_progress.current
        if not progress.started == progress.processed > 0:
            return  # within an epoch
        if trainer.should_stop and loop._can_stop_early:
            checkpoint["stopped_early"] = self.limits
        if cut_short(trainer):
            checkpoint["epoch"] -= 1
            saved = checkpoint["loops"]["fit_loop"]["epoch_progress"]
            for counts in (saved["total"], saved["current"]):
                counts["processed"] = counts["started"] - 1
                counts["completed"] = min(counts["completed"], counts["processed"])


def _accumulate_as_scheduled(trainer: L.Trainer) -> None:
    """Have GradientAccumulationScheduler set the number of batches, which it does at the start of an epoch alone."""
    loop: Any = trainer.fit_loop
    advance = loop.on_advance_start

    def once() -> None:  # after on_train_start, where it insists on the number that the trainer began with
        del loop.on_advance_start
        advance()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)

    loop.on_advance_start = once


def limits(cfg: DictConfig) -> dict[str, Any]:
    """What decides how long a training takes: limits of the trainer, and the numbers of its callbacks."""
    trainer, callbacks = plain(cfg.trainer), plain(cfg.callback) if cfg.get("callback") else {}
    return {
        "trainer": {name: trainer.get(name) for name in LIMITS},
        "callback": {
            name: {key: value for key, value in options.items() if isinstance(value, int | float)}
            for name, options in callbacks.items()
            if options
        },
    }


def ends(trainer: L.Trainer) -> bool:
    """Whether training ends after the batch that has just been trained on."""
    loop = trainer.fit_loop
    if 0 <= loop.epoch_loop.max_steps <= loop.epoch_loop.global_step or (trainer.should_stop and loop._can_stop_early):
        return True
    if not loop.epoch_loop.batch_progress.is_last_batch:
        return False
    return loop.max_epochs is not None and 0 <= loop.max_epochs <= trainer.current_epoch + 1


def cut_short(trainer: L.Trainer) -> bool:
    """Whether the epoch that training is in, or has just left, ended before its last batch."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.current.ready > 0 and not loop._num_ready_batches_reached()
