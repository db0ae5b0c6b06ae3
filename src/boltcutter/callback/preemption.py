"""Signals: save, and leave together."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging

from boltcutter.environment import lease, signals, startup
from boltcutter.environment.workers import protect_workers

ENDLESS = 2**31 - 1  # batches of a stream


class Preemption(Callback):
    """Save at the next step and leave, when a signal has come to any of the ranks.

    A handler only sets a flag. Before each optimizer step's first batch, and before each batch of a validation or a
    test, the ranks compare their flags; if one is set they all save there, once, and leave with 128 + the signal's
    number. A validation that was cut short begins again on resume. A second interrupt from the keyboard leaves at once.

    Args:
        folder: Where ``last-preempted.ckpt`` goes; a path or a URL.
    """

    handles_signals = True  # so that nobody else has to

    def __init__(self, folder: str) -> None:
        self.folder = str(folder)
        self._lease: lease.Lease | None = None  # where this process was spawned by the one that holds it
        self._world: Any = None
        self._group: Any = None
        self._saving = self._began_to_listen = False
        self._common = self._seen = 0  # batches of a validation or test that all ranks have, and those seen

    def __getstate__(self) -> dict[str, Any]:
        """Hand the lease to a process that is spawned."""
        return {**vars(self), "_lease": lease.current()}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen from here on, in place of Lightning, whose handlers run collectives."""
        self._began_to_listen |= not signals.handlers_installed()
        startup.finish()
        lease.watch(self._lease)
        protect_workers()
        trainer._signal_connector.register_signal_handlers = signals.install_handlers  # type: ignore[method-assign]
        if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not self._world:
            # The flag stays on the host: on the device it would make each step wait for the one before.
            self._world, self._group = (
                dist.group.WORLD,
                dist.new_group(backend="gloo", timeout=getattr(trainer.strategy, "_timeout", None)),
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """As ``teardown``, which does not come then."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back to whom they belonged."""
        if self._began_to_listen:
            signals.restore_handlers()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Where all ranks are at the same place and no gradient is half added up."""
        if batch_idx % trainer.accumulate_grad_batches == 0 and (number := self._agree(trainer)):
            self._save_and_leave(trainer, pl_module, number)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See how far all ranks go together; the last one may have a batch less."""
        self._begin(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See how far all ranks go together."""
        self._begin(trainer.num_test_batches)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Leave a validation, to begin it again; but not in mid-step, where half a gradient would be lost."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fit_loop._should_accumulate():
            return
        if number := self._agree_in_evaluation(trainer):
            self._save_and_leave(trainer, pl_module, number)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Leave a test; training has saved what there is."""
        if number := self._agree_in_evaluation(trainer):
            _refuse_if_lost(trainer, number)
            signals.exit(number, "trained but not tested")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning think that the batch which will not be trained on, or the validation, has not begun.

        Raises:
            LeaseLostError: Another process trains in the folder.
        """
        _check_lease(trainer)
        if not self._saving:
            return
        loops = checkpoint["loops"]["fit_loop"]
        if trainer.validating:
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # Lightning then runs it from its start
            progress = loops["epoch_loop.val_loop.batch_progress"]
            progress.update(total=dict(begun), current=dict(begun), is_last_batch=False)
            return
        progress = loops["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts["ready"] -= 1
        progress["is_last_batch"] = False
        if _validates_first(trainer):
            # Lightning then passes over one validation, and counts a step for the loggers that is none.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _begin(self, batches: list[int | float]) -> None:
        self._seen = 0
        count = int(min(sum(map(float, batches)), ENDLESS))
        if count == ENDLESS and self._group is not None:
            count = 0  # nobody knows which rank has the fewest, and the others would wait for it
        self._common = self._reduce(count, dist.ReduceOp.MIN)

    def _agree_in_evaluation(self, trainer: L.Trainer) -> int:
        self._seen += 1
        return self._agree(trainer) if self._seen <= self._common else 0

    def _agree(self, trainer: L.Trainer) -> int:
        """The largest signal number that any rank has received; 0 for none."""
        largest = getattr(trainer.strategy, "all_reduce_max", None)
        found: int | None = largest(signals.received_signal()) if largest else None
        return found if found is not None else self._reduce(signals.received_signal(), dist.ReduceOp.MAX)

    def _reduce(self, number: int, how: Any) -> int:
        if self._group is None:
            return number
        flag = torch.tensor(number, dtype=torch.int32)
        dist.all_reduce(flag, how, group=self._group)
        return int(flag)

    def _save_and_leave(self, trainer: L.Trainer, pl_module: L.LightningModule, number: int) -> None:
        _refuse_if_lost(trainer, number)
        if trainer.validating:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    callback.on_validation_epoch_end(trainer, pl_module)  # the average stood in for the weights
        path = f"{self.folder}/last-preempted.ckpt"
        self._saving = True
        trainer.save_checkpoint(path)
        self._saving = False
        getattr(trainer.strategy.checkpoint_io, "wait", int)()  # until an asynchronous one is on the disk
        signals.exit(number, f"saved {path}")


def _refuse_if_lost(trainer: L.Trainer, number: int) -> None:
    """End without saving, on all ranks, where another process trains in the folder.

    Raises:
        LeaseLostError: On the rank that held the lease.
        SystemExit: On the others.
    """
    if number == signals.LEASE_LOST:
        _check_lease(trainer)
        raise SystemExit(1)


def _check_lease(trainer: L.Trainer) -> None:
    """See that no other process trains in the folder; else nothing more is written there.

    Raises:
        LeaseLostError: One does.
    """
    try:
        lease.check()
    except lease.LeaseLostError:
        for logger in trainer.loggers:
            getattr(logger, "discard", int)()
        raise


def _validates_first(trainer: L.Trainer) -> bool:
    """Whether Lightning, resumed before the batch that has just been fetched, thinks a validation is due."""
    loop: Any = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    last, progress.is_last_batch = progress.is_last_batch, False
    progress.total.ready -= 1
    progress.current.ready -= 1
    due = bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))
    progress.total.ready += 1
    progress.current.ready += 1
    progress.is_last_batch = last
    return due
