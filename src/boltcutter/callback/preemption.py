"""Signals: save, and leave together."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Preempted(SystemExit):
    """The process leaves with 128 + the signal's number, after it has saved."""

    def __init__(self, number: int, checkpoint: Path) -> None:
        super().__init__(128 + number)
        self.reason = f"preempted by {signal.Signals(number).name}, saved {checkpoint}"

    def __str__(self) -> str:
        return self.reason


class Preemption(Callback):
    """Save at the next step and leave, when a signal has come to any of the ranks.

    A handler only sets a flag: a collective inside a handler hangs when the ranks stand at different places. Before
    each optimizer step's first batch the ranks compare their flags, and if one is set they all save there, once, and
    leave with 128 + the signal's number. A second interrupt from the keyboard leaves at once. A validation that has
    begun is finished first, so that best checkpoint and early stopping see all of it.

    Args:
        folder: Where ``last-preempted.ckpt`` goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.received = 0
        self._before: dict[int, Any] = {}
        self._group: Any = None
        self._saving = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen from here on; a signal before this ends the process at once, with nothing to lose."""
        if stage == "fit":
            self._listen()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen again, since Lightning has put its own handlers in place."""
        self._listen()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_backend() != "gloo":
            # The flag stays on the host: on the device it would make each step wait for the one before.
            self._group = torch.distributed.new_group(backend="gloo")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Where all ranks are at the same place and no gradient is half added up."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        number = self._agree()
        if number:
            self._save_and_leave(trainer, number)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The batch that was fetched and will not be trained on is not ready: it comes again."""
        if not self._saving:
            return
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts["ready"] -= 1
        progress["is_last_batch"] = False
        if _validates_first(trainer):
            # Lightning then passes over one validation, and counts a step for the loggers that is none.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hear no more: saving is over, and what comes after is short."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _save_and_leave(self, trainer: L.Trainer, number: int) -> None:
        for ignored in SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)  # one is enough; what follows must not be cut short
        path = self.folder / "last-preempted.ckpt"
        self._saving = True
        trainer.save_checkpoint(path)
        self._saving = False
        raise Preempted(number, path)

    def _agree(self) -> int:
        """The largest signal number that any rank has received; 0 for none."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return self.received
        flag = torch.tensor(self.received, dtype=torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(flag)

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # of a notebook's or another library's thread: Python gives signals to the main one only
        for number in SIGNALS:
            before = signal.signal(number, self._receive)
            if before != self._receive:
                self._before.setdefault(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


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
