"""How fast training goes, and what it waits for."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from boltcutter.batches import count_samples, first_tensor
from boltcutter.callback.flops import count_flops, peak_flops

SECONDS = 10.0  # of training over which waiting for data is judged


class ThroughputMonitor(Callback):
    """Log speed over all devices at each logging step, samples a second also for the whole epoch.

    Names begin with ``throughput/``: ``samples_per_second``, or ``batches_per_second`` where a batch does not say how
    many samples it has; ``tokens_per_second`` of a task whose ``kind`` is tokens;
    ``mfu``, the share of what the devices could do at best, where that is known; ``data_wait``, the share of time that
    training waits for a loader which counts it (``waited``, seconds); ``memory_gib``, the most that this process has
    had at once, of a CUDA device's memory or else of the machine's.

    The clock is read on the host without waiting for the device: the device's queue is short, so the mean over a
    logging interval is right, and no step is held up. Time spent in validation does not count.

    Args:
        peak_tflops: Operations a second that a device can do at best, in 10¹²; none takes it from a table of GPUs.
        max_data_wait: Largest share of time that training may wait for data before it is told, once.

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022 (model FLOPs utilization).
    """

    def __init__(self, *, peak_tflops: float | None = None, max_data_wait: float = 0.2) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(
                f"callback.throughput.peak_tflops={peak_tflops} is no speed; give null to take it from the table"
            )
        if not 0 < max_data_wait <= 1:
            raise ValueError(f"callback.throughput.max_data_wait={max_data_wait} is not a share in (0, 1]; try 0.2")
        self.peak_tflops, self.max_data_wait = peak_tflops, max_data_wait
        self.rates: dict[str, float] = {}  # of the newest interval
        self.tokens = 0  # of a sample
        self.unit = "samples"  # what is counted
        self._samples = 0
        self._began = self._waited = 0.0
        self._step = 0  # optimizer steps done when the last batch ended
        self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._known = False  # what a sample is
        self.least_seconds: float | None = None  # that all devices take for a sample at best, where that is known
        self._judged: tuple[float, float] | None = None  # seconds, and of these waited; none before the first interval
        self._told = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks: an epoch that goes on in its middle is not told to start."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks."""
        self._step = trainer.global_step
        self._samples = self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._start(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at a logging step tell."""
        if not self._known:
            self._look(trainer, pl_module, batch)
        count = count_samples(batch)
        if count is None:
            self.unit = "batches"
        self._samples += count or 1
        before, self._step = self._step, trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._step != before and every and self._step % every == 0:
            self._close(trainer)
            self.rates["memory_gib"] = memory(pl_module.device) / 2**30
            for name, value in self.rates.items():
                pl_module.log(f"throughput/{name}", value, batch_size=1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._close(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock again."""
        self._start(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the epoch's mean."""
        self._close(trainer)
        if self._epoch_seconds:
            rate = self._epoch_samples * data_parallel_size(trainer) / self._epoch_seconds
            pl_module.log(f"throughput/{self.unit}_per_second_epoch", rate, batch_size=1)

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        """See once what a sample is, and what it asks of the device."""
        self._known = True
        kind, inputs = getattr(pl_module, "kind", None), first_tensor(batch)
        if kind is None or inputs is None:
            return  # another's module may want more than the first tensor
        if kind == "language_modeling":
            self.tokens = inputs.numel() // len(inputs)
        best = self.peak_tflops * 1e12 if self.peak_tflops else best_of(pl_module.device, str(trainer.precision))
        few = inputs[:2]  # dp keeps so few on one device; what its threads do is not counted
        model = getattr(pl_module, "model", None)  # which may be anything in a foreign module
        flops = count_flops(model if isinstance(model, nn.Module) else pl_module, few) if best else None
        devices = trainer.num_devices * trainer.num_nodes  # of which one process may have several
        self.least_seconds = flops / len(few) / (best * devices) if flops and best else None

    def _start(self, trainer: L.Trainer) -> None:
        self._began, self._waited = time.perf_counter(), waited(trainer) or 0.0

    def _close(self, trainer: L.Trainer) -> None:
        """End the interval, unless nothing was trained in it."""
        now = time.perf_counter()
        if self._samples:
            seconds = now - self._began
            rate = self._samples * data_parallel_size(trainer) / seconds
            self.rates[f"{self.unit}_per_second"] = rate
            if self.tokens:
                self.rates["tokens_per_second"] = rate * self.tokens
            if self.least_seconds:
                self.rates["mfu"] = rate * self.least_seconds
            total = waited(trainer)
            if total is not None:
                self.rates["data_wait"] = (total - self._waited) / seconds
                self._waited = total
                self._judge(trainer, seconds)
            self._epoch_samples += self._samples
            self._epoch_seconds += seconds
        self._samples, self._began = 0, now

    def _judge(self, trainer: L.Trainer, seconds: float) -> None:
        """Tell once if training waits too long; the first interval, when workers start and caches fill, is not it."""
        if self._judged is None or self._told:
            self._judged = (0.0, 0.0)
            return
        whole = self._judged[0] + seconds
        waiting = self._judged[1] + seconds * self.rates["data_wait"]
        self._judged = (whole, waiting)
        if whole < SECONDS:
            return
        self._judged = (0.0, 0.0)
        if waiting / whole > self.max_data_wait:
            self._told = True
            workers = getattr(trainer.datamodule, "num_workers", 0)  # type: ignore[attr-defined]
            rank_zero_warn(
                f"data.num_workers={workers}: training waits for data {waiting / whole:.0%} of its time; "
                f"set data.num_workers={2 * workers or 2}, or make samples cheaper (data.augment, smaller files)"
            )


def data_parallel_size(trainer: L.Trainer) -> int:
    """Ranks that share the data; those that share a model's layers see the same samples."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


def waited(trainer: L.Trainer) -> float | None:
    """Seconds that training has waited for its loader, if that counts them."""
    found = getattr(trainer.train_dataloader, "waited", None)
    return float(found) if isinstance(found, float) else None


def best_of(device: torch.device, precision: str) -> float | None:
    """Operations a second that a device can do, where they are known."""
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def memory(device: torch.device) -> int:
    """Bytes that this process has had at most: of the device, where that is a CUDA one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
