"""How fast training goes."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class Throughput(Callback):
    """Log samples a second over all devices, at each logging step and for the whole epoch.

    The clock is read on the host without waiting for the device: the device's queue is short, so the mean over a
    logging interval is right, and no step is held up. Time spent in validation does not count.
    """

    def __init__(self) -> None:
        self.samples_per_second = 0.0  # newest interval
        self._samples = 0
        self._began = 0.0
        self._epoch_samples = 0
        self._epoch_seconds = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks."""
        self._samples = self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at a logging step tell."""
        self._samples += len(batch[0])
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._close(trainer)
            pl_module.log("throughput/samples_per_second", self.samples_per_second)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._close(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock again."""
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the epoch's mean."""
        self._close(trainer)
        if self._epoch_seconds:
            rate = self._epoch_samples * _ranks(trainer) / self._epoch_seconds
            pl_module.log("throughput/samples_per_second_epoch", rate)

    def _close(self, trainer: L.Trainer) -> None:
        """End the interval, unless nothing was trained in it."""
        now = time.perf_counter()
        if self._samples:
            seconds = now - self._began
            self.samples_per_second = self._samples * _ranks(trainer) / seconds
            self._epoch_samples += self._samples
            self._epoch_seconds += seconds
        self._samples, self._began = 0, now


def _ranks(trainer: L.Trainer) -> int:
    sharing = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sharing.get("num_replicas", 1))
