"""Signals: save, and leave together."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Preempted(SystemExit):
    """The process leaves with 128 + the signal's number."""


class Preemption(Callback):
    """Save before the next step and leave, when a signal has come to any of the ranks.

    A handler only sets a flag: a collective inside one would hang where ranks stand at different places. Before the
    first batch of each optimizer step the ranks compare their flags. A second Ctrl+C leaves at once.

    Args:
        folder: Where ``last.ckpt`` is.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self._received = folder, 0
        self._before: dict[signal.Signals, Any] = {}
        self._group: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen from here on, in place of Lightning."""
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # on the host, so that no step waits for the device

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Where all ranks are at the same place, and no gradient is half added up."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        flag = torch.tensor(self._received)
        if self._group:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        if flag:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # what follows is not cut short by another one
            self._step_back(trainer)
            trainer.save_checkpoint(f"{self.folder}/last.ckpt")
            # Only the first one says so: Lightning kills it where another, that it has started, fails.
            raise Preempted(128 + int(flag) if trainer.is_global_zero else 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == self._received == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def _step_back(self, trainer: L.Trainer) -> None:
        """Let Lightning think that the batch which will not be trained on has not begun."""
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        loop.batch_progress.total.ready -= 1
        loop.batch_progress.current.ready -= 1
        loop.batch_progress.is_last_batch = False
        if fetcher and loop._should_check_val_fx(fetcher):
            loop._batches_that_stepped -= 1  # resumed where a validation was, Lightning counts a step that is none
