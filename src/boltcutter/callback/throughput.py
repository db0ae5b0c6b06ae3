"""Throughput of training, and time spent waiting for data."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from boltcutter.callback import flops
from boltcutter.protocols import data_parallel, find_model
from boltcutter.structure import count_samples, first_tensor
from boltcutter.topology import Topology

WINDOW = 10.0  # seconds of training over which the time spent waiting for data is averaged
MAX_DATA_WAIT = 0.2  # fraction of time spent waiting for data above which a warning is issued


class ThroughputMonitor(Callback):
    """Log throughput over all devices at each logging step, and samples per second also per epoch.

    Metrics are prefixed with ``throughput/``: ``samples_per_second``, or ``batches_per_second`` if a batch's number
    of samples is unknown; ``tokens_per_second`` for language modeling; ``mfu``, model FLOPs utilization, where the
    peak is known; ``data_wait``, the fraction of time spent waiting for data, if the loader has an
    attribute ``wait_seconds``; ``memory_gib``, peak memory of this process, on a CUDA device or else on the host.

    The clock is read on the host without synchronizing with the device. The device queue is short, so the mean over a
    logging interval is accurate. Validation time is excluded.

    Args:
        peak_tflops: Peak TFLOPS of one device; None looks it up in a table of GPUs.

    Raises:
        ValueError: ``peak_tflops`` is not positive.

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022 (model FLOPs utilization).
    """

    def __init__(self, *, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"callback.throughput.peak_tflops={peak_tflops} must be positive; try null to look it up")
        self.peak_tflops = peak_tflops
        self.rates: dict[str, float] = {}  # of the latest interval
        self.tokens = 0  # per sample
        self.unit = "samples"
        self._samples = 0
        self._began = self._waited = 0.0
        self._step = 0  # optimizer steps done when the last batch ended
        self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._initialized = False
        self._model: nn.Module | None = None  # on the meta device, until its FLOPs are counted
        self.min_seconds: float | None = None  # per sample on all devices at peak FLOPS, if known
        self._window: tuple[float, float] | None = None  # seconds, and seconds waited; None before the first interval
        self._warned = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Copy the model, on the meta device, before the strategy shards, splits or compiles it."""
        if stage == "fit" and not self._initialized and hasattr(pl_module, "kind"):
            model = find_model(pl_module)
            self._model = flops.meta_copy(model if isinstance(model, nn.Module) else pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._samples = self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._start(trainer)

    on_train_start = on_train_epoch_start  # which is not called if training resumes within an epoch

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count samples, and log at each logging step."""
        if not self._initialized:
            self._initialize(trainer, pl_module, batch)
        count = count_samples(batch)
        if count is None:
            self.unit = "batches"
        self._samples += count or 1
        before, self._step = self._step, trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._step != before and every and self._step % every == 0:
            self._close(trainer)
            self.rates["memory_gib"] = peak_memory(pl_module.device) / 2**30
            for name, value in self.rates.items():
                pl_module.log(f"throughput/{name}", value, batch_size=1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._close(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restart the clock."""
        self._start(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the mean of the epoch."""
        self._close(trainer)
        if self._epoch_seconds:
            rate = self._epoch_samples * data_parallel(trainer.strategy).size / self._epoch_seconds
            # Each rank has measured its own time; that of rank 0 is logged, as for each step.
            pl_module.log(f"throughput/{self.unit}_per_second_epoch", rate, batch_size=1, rank_zero_only=True)

    def _initialize(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        """Count the tokens and FLOPs of a sample, once."""
        self._initialized = True
        inputs = first_tensor(batch)
        if not hasattr(pl_module, "kind") or inputs is None:
            return  # a third-party module may need more than the first tensor
        if pl_module.kind == "language_modeling":
            self.tokens = inputs.numel() // len(inputs)
        model, self._model = self._model, None
        if model is None:
            return
        peak = self.peak_tflops * 1e12 if self.peak_tflops else None
        if peak is None and pl_module.device.type == "cuda":
            peak = flops.peak_flops(torch.cuda.get_device_name(pl_module.device), str(trainer.precision))
        few = inputs[:2]
        count = flops.count_flops(model, few) if peak else None
        devices = Topology.of(trainer).total_devices  # one process may have several
        self.min_seconds = count / len(few) / (peak * devices) if count and peak else None

    def _start(self, trainer: L.Trainer) -> None:
        self._began, self._waited = time.perf_counter(), data_wait_seconds(trainer) or 0.0

    def _close(self, trainer: L.Trainer) -> None:
        """End the interval, unless it has no samples."""
        now = time.perf_counter()
        if self._samples:
            seconds = now - self._began
            rate = self._samples * data_parallel(trainer.strategy).size / seconds
            self.rates[f"{self.unit}_per_second"] = rate
            if self.tokens:
                self.rates["tokens_per_second"] = rate * self.tokens
            if self.min_seconds:
                self.rates["mfu"] = rate * self.min_seconds
            total = data_wait_seconds(trainer)
            if total is not None:
                self.rates["data_wait"] = (total - self._waited) / seconds
                self._waited = total
                self._watch_data_wait(trainer, seconds)
            self._epoch_samples += self._samples
            self._epoch_seconds += seconds
        self._samples, self._began = 0, now

    def _watch_data_wait(self, trainer: L.Trainer, seconds: float) -> None:
        """Warn once if training waits too long; the first interval, in which workers start, is excluded."""
        if self._window is None or self._warned:
            self._window = (0.0, 0.0)
            return
        total = self._window[0] + seconds
        waiting = self._window[1] + seconds * self.rates["data_wait"]
        self._window = (total, waiting)
        if total < WINDOW:
            return
        self._window = (0.0, 0.0)
        if waiting / total > MAX_DATA_WAIT:
            self._warned = True
            workers = getattr(trainer.train_dataloader, "num_workers", 0)  # as in torch's DataLoader
            rank_zero_warn(
                f"data.num_workers={workers}: training waits for data {waiting / total:.0%} of the time; "
                f"set data.num_workers={2 * workers or 2}, or reduce the cost of a sample (data.augment, smaller files)"
            )


def data_wait_seconds(trainer: L.Trainer) -> float | None:
    """Seconds that training has waited for its loader, if the loader measures them."""
    return getattr(trainer.train_dataloader, "wait_seconds", None)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: on the device if it is a CUDA device, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not available on every platform

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
