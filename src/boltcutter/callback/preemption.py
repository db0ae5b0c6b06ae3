"""Preemption: save a checkpoint and exit on all ranks after a signal.

Lightning handles SIGTERM, and on SLURM the signal before a requeue, in the handler itself: it broadcasts, or saves a
checkpoint, wherever a rank is, so that ranks at different places deadlock; a checkpoint may hold half of a step. At
SIGTERM it ends training without one. What is changed, in the order of a run:

1. ``setup`` installs handlers that only set a flag, in place of Lightning's, and a group of gloo for the flags.
2. Before the first batch of each optimizer step, and before each batch of a validation or test that all ranks have, the
   ranks take the largest flag. Without a signal, a save that is due is made.
3. If one has received a signal, all save ``last-preempted.ckpt``. ``on_save_checkpoint`` records the batch, or
   validation, that was about to begin as not started, as Lightning would skip it.
4. All exit with 128 + the signal's number; ``train_command`` prints how to continue.
5. ``teardown``, or ``on_exception``, restores the handlers.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging

from boltcutter.callback.checkpoint import DelayedSaves, saves_within_epochs
from boltcutter.environment import lease, startup
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.workers import protect_workers
from boltcutter.internals import (
    data_fetcher,
    get_timeout,
    is_accumulating,
    replace_signal_handling,
    restore_signal_handling,
)
from boltcutter.protocols import BuffersMetrics, WaitsForWrites

UNLIMITED = 2**31 - 1  # batches of a dataset of unknown length


class Preemption(Callback):
    """Save a checkpoint at the next step and exit, if any rank has received a signal.

    Signal handlers only set a flag. Before the first batch of each optimizer step, and before each batch of validation
    or test, the ranks compare their flags; if one is set, they save one checkpoint and exit with 128 + the signal's
    number. An interrupted validation restarts on resume. A second SIGINT exits immediately.

    What a ``ModelCheckpoint`` saves within an epoch is saved there too. A run that resumes from it then does all that
    follows a step: it logs its values, and validates.

    Args:
        folder: Folder of ``last-preempted.ckpt``; a path or a URL.
        save_minutes: Also save every so many minutes, for machines that are lost without a signal; None: never.

    Raises:
        ValueError: ``save_minutes`` is not positive.
    """

    handles_signals = True  # so other code need not handle them

    def __init__(self, folder: str, *, save_minutes: float | None = None) -> None:
        if save_minutes is not None and save_minutes <= 0:
            raise ValueError(f"callback.preemption.save_minutes={save_minutes:g} is not positive; try 10, or null")
        self.folder, self.save_minutes = str(folder), save_minutes
        self._saved = 0.0  # time of the last regular save
        self._lease: lease.Lease | None = None  # of the parent process, if it spawned this one
        self._world: Any = None
        self._group: Any = None
        self._installed_handlers = False
        self._delayed: list[DelayedSaves] = []
        self._all_reduce_max: Any = None  # of a strategy with a faster reduction of an integer
        self._common = self._seen = 0  # batches of a validation or test that all ranks have, and those started

    def __getstate__(self) -> dict[str, Any]:
        """Pass the lease to spawned processes."""
        return {**vars(self), "_lease": lease.current()}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install signal handlers in place of Lightning's, which run collectives."""
        self._installed_handlers |= not signals.handlers_installed()
        # First: another rank may have exited at the same signal, and this one would set its flag and wait for minutes.
        if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not self._world:
            # The flag is reduced on the host; on the device it would synchronize each step with the previous one.
            self._world, self._group = (
                dist.group.WORLD,
                dist.new_group(backend="gloo", timeout=get_timeout(trainer.strategy)),
            )
        startup.finish()
        lease.watch(self._lease)
        protect_workers()
        self._all_reduce_max = getattr(trainer.strategy, "all_reduce_max", None)
        replace_signal_handling(trainer, signals.install_handlers)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Clean up like ``teardown``, which is not called after an exception."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        restore_signal_handling(trainer)
        if self._installed_handlers:
            signals.restore_handlers()
        while self._delayed:
            self._delayed.pop().restore()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure the time, and delay what is saved within an epoch."""
        self._saved = time.monotonic()
        delayed = [each.callback for each in self._delayed]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and saves_within_epochs(callback) and callback not in delayed:
                self._delayed.append(DelayedSaves(trainer, callback))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compare flags where all ranks are at the same step and no gradients are partly accumulated."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        is_due = self.save_minutes and time.monotonic() >= self._saved + 60 * self.save_minutes
        number, due = self._agree(is_due=bool(is_due) and trainer.is_global_zero)
        if number:
            self._save_and_exit(trainer, pl_module, number)
        if due:
            self.save(trainer, pl_module, wait=False)
            self._saved = time.monotonic()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine how many batches all ranks have; the last rank may have one less."""
        # One that restarts must not count the interrupted batch again: to Lightning, it would still be interrupted in
        # later checkpoints, from which its last batch would be run again, and logged as a validation.
        total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        for name in ("ready", "started", "processed"):
            setattr(total, name, total.completed)
        self._count_common(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine how many batches all ranks have."""
        self._count_common(trainer.num_test_batches)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Exit during validation, which restarts on resume, unless gradients are partly accumulated."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or is_accumulating(trainer):
            return
        if number := self._agree_in_evaluation():
            self._save_and_exit(trainer, pl_module, number)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Exit during a test; training has already saved a checkpoint."""
        if number := self._agree_in_evaluation():
            _exit_if_lease_lost(trainer, number)
            signals.exit(number, "trained but not tested")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record that the current batch, or validation, has not started, so that Lightning runs it on resume.

        Raises:
            LeaseLostError: Another process trains in the folder.
        """
        _check_lease(trainer)
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.val_loop.batch_progress" if trainer.validating else "epoch_loop.batch_progress"]
        if progress["current"]["ready"] == progress["current"]["started"]:
            return
        if trainer.validating:
            started = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # so Lightning restarts it
            progress.update(total=dict(started), current=dict(started), is_last_batch=False)
            return
        for counts in (progress["total"], progress["current"]):
            counts["ready"] -= 1
        progress["is_last_batch"] = False
        if _is_validation_due(trainer):
            # Lightning then skips one validation, and counts one step too many for the loggers.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _count_common(self, batches: list[int | float]) -> None:
        self._seen = 0
        count = int(min(sum(map(float, batches)), UNLIMITED))
        if count == UNLIMITED and self._group is not None:
            count = 0  # the shortest rank is unknown, and the others would wait for it
        self._common = self._reduce(count, dist.ReduceOp.MIN)

    def _agree_in_evaluation(self) -> int:
        self._seen += 1
        return self._agree()[0] if self._seen <= self._common else 0

    def _agree(self, *, is_due: bool = False) -> tuple[int, int]:
        """Largest signal number that any rank has received, 0 if none; without any, whether a regular save is due."""
        flags = 2 * signals.received_signal() + is_due  # one collective for both
        found = self._all_reduce_max(flags) if self._all_reduce_max else None
        number, due = divmod(self._reduce(flags, dist.ReduceOp.MAX) if found is None else found, 2)
        return number, due

    def _reduce(self, number: int, how: Any) -> int:
        if self._group is None:
            return number
        flag = torch.tensor(number, dtype=torch.int32)
        dist.all_reduce(flag, how, group=self._group)
        return int(flag)

    def save(self, trainer: L.Trainer, pl_module: L.LightningModule, *, wait: bool = True) -> str:
        """Save a checkpoint from which the current batch, or validation, is repeated; called on all ranks.

        Args:
            trainer: The trainer.
            pl_module: The task.
            wait: Whether to wait until an asynchronous write has ended.

        Returns:
            The path of the checkpoint.
        """
        if trainer.validating:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    callback.on_validation_epoch_end(
                        trainer, pl_module
                    )  # restores the weights, which validation replaced by their average
        path = f"{self.folder}/last-preempted.ckpt"
        trainer.save_checkpoint(path)
        if wait and isinstance(trainer.strategy.checkpoint_io, WaitsForWrites):
            trainer.strategy.checkpoint_io.wait()
        return path

    def _save_and_exit(self, trainer: L.Trainer, pl_module: L.LightningModule, number: int) -> None:
        _exit_if_lease_lost(trainer, number)
        signals.exit(number, f"saved {self.save(trainer, pl_module)}")


def _exit_if_lease_lost(trainer: L.Trainer, number: int) -> None:
    """Exit without saving, on all ranks, if another process trains in the folder.

    Raises:
        LeaseLostError: On the rank that held the lease.
        SystemExit: On the others.
    """
    if number == signals.LEASE_LOST:
        _check_lease(trainer)
        raise SystemExit(1)


def _check_lease(trainer: L.Trainer) -> None:
    """Check that no other process trains in the folder; otherwise loggers write nothing more there.

    Raises:
        LeaseLostError: Another process does.
    """
    try:
        lease.check_lease()
    except lease.LeaseLostError:
        for logger in trainer.loggers:
            if isinstance(logger, BuffersMetrics):
                logger.discard()
        raise


def _is_validation_due(trainer: L.Trainer) -> bool:
    """Whether Lightning, resumed before the batch just fetched, would run a validation first."""
    loop: Any = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    last, progress.is_last_batch = progress.is_last_batch, False
    progress.total.ready -= 1
    progress.current.ready -= 1
    due = bool(loop._should_check_val_fx(data_fetcher(trainer)))
    progress.total.ready += 1
    progress.current.ready += 1
    progress.is_last_batch = last
    return due
