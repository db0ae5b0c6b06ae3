"""How fast training goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
        self._step = 0  # optimizer steps done when the last batch ended
        self._epoch_samples = 0
        self._epoch_seconds = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks."""
        self._step = trainer.global_step
        self._samples = self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at a logging step tell."""
        self._samples += samples(batch)
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if stepped and every and trainer.global_step % every == 0:
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
            rate = self._epoch_samples * ranks(trainer) / self._epoch_seconds
            pl_module.log("throughput/samples_per_second_epoch", rate)

    def _close(self, trainer: L.Trainer) -> None:
        """End the interval, unless nothing was trained in it."""
        now = time.perf_counter()
        if self._samples:
            seconds = now - self._began
            self.samples_per_second = self._samples * ranks(trainer) / seconds
            self._epoch_samples += self._samples
            self._epoch_seconds += seconds
        self._samples, self._began = 0, now


def samples(batch: Any) -> int:
    """Samples of one rank's batch: the length of its first tensor."""
    while isinstance(batch, list | tuple | Mapping):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def ranks(trainer: L.Trainer) -> int:
    """Ranks that share the data; those that share a model's layers see the same samples."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))
