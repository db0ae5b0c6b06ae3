"""A callback that times a training beside a hand-written loop in the same process, in alternating turns."""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F

from boltcutter.callback.throughput import ThroughputMonitor, data_wait_seconds
from boltcutter.data.prefetch import Prefetcher
from boltcutter.internals import active_fetcher
from boltcutter.structure import count_samples
from boltcutter.task.compiler import CUDA_GRAPH

WARM = 5  # steps of each that are not timed: memory is allocated, kernels are chosen, models are compiled
BATCHES = 4  # different ones, that stay on the device for the hand-written loop
TURN = 0.5  # seconds, and at least a step


class Turns(Callback):
    """Times some steps of the training, then as many of a hand-written loop, and so on; then ends the training.

    The loop has its batches on the device, a fused optimizer, the same model, precision, clipping and compilation, and
    no synchronization within a turn. Slow phases of the machine affect both alike.

    Args:
        file: Where the result is written, as JSON.
        seconds: After how many of them from the start of training it ends.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.seconds = Path(file), seconds
        self.ours: list[float] = []  # seconds per step, in each turn
        self.theirs: list[float] = []
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = self.steps = self.first = 0
        self.waited = self.read = self.timed = 0.0
        self.end = self.began = self.waited_before = self.read_before = 0.0  # when a turn began, and up to then
        self.model: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Copy the model before it is compiled."""
        self.model = copy.deepcopy(pl_module.model)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the loop."""
        self.end = time.monotonic() + self.seconds
        self.model.to(pl_module.device).train()
        if getattr(pl_module, "compile_model", False) not in (False, CUDA_GRAPH):
            self.model.compile()
        elif getattr(pl_module, "channels_last", False):
            self.model.to(memory_format=torch.channels_last)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step; at the end of a turn, run the loop."""
        self.done += 1
        if len(self.batches) < BATCHES:
            inputs, targets = batch
            self.batches.append((inputs.clone(), targets.clone()))
        if self.done < WARM + BATCHES:
            return
        if not self.steps:  # now both are warm
            self.run(trainer, WARM)
            began = self.now(pl_module)
            self.run(trainer, 1)
            self.steps = max(1, int(TURN / (self.now(pl_module) - began)))
            self.done = WARM + BATCHES
        elif self.done - self.first < self.steps:
            return
        else:
            seconds = self.now(pl_module) - self.began
            self.ours.append(seconds / self.steps)
            self.timed += seconds
            self.waited += (data_wait_seconds(trainer) or 0.0) - self.waited_before
            read = self.seconds_read(trainer)  # which begins anew in each epoch
            self.read += read - (self.read_before if read >= self.read_before else 0.0)
            began = self.now(pl_module)
            self.run(trainer, self.steps)
            self.theirs.append((self.now(pl_module) - began) / self.steps)
            if time.monotonic() > self.end:
                trainer.should_stop = True
        self.first, self.began = self.done, self.now(pl_module)
        self.waited_before, self.read_before = data_wait_seconds(trainer) or 0.0, self.seconds_read(trainer)

    def run(self, trainer: L.Trainer, steps: int) -> None:
        """Make steps of the hand-written loop."""
        for step in range(steps):
            inputs, targets = self.batches[step % BATCHES]
            self.optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad(), trainer.precision_plugin.forward_context():
                outputs = self.model(inputs)
                loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()

    @staticmethod
    def now(module: L.LightningModule) -> float:
        """The time when the device has done all that is queued."""
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()

    @staticmethod
    def seconds_read(trainer: L.Trainer) -> float:
        """Seconds that a thread has read and copied beside the steps."""
        iterator = getattr(active_fetcher(trainer), "iterator", None)
        return iterator.read_seconds if isinstance(iterator, Prefetcher) else 0.0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the result."""
        monitor = next(c for c in trainer.callbacks if isinstance(c, ThroughputMonitor))  # type: ignore[attr-defined]
        size = count_samples(self.batches[0]) or 0
        least = monitor.min_seconds * size if monitor.min_seconds else None
        ours = statistics.median(self.ours)
        found = {
            "ms_per_step": 1e3 * ours,
            "by_hand_ms_per_step": 1e3 * statistics.median(self.theirs),
            "ratio": statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True)),
            "turns": len(self.ours),
            "mfu": least / ours if least else None,
            "input_wait": self.waited / self.timed,
            "overlap": max(0.0, 1 - self.waited / self.read) if self.read else None,
        }
        self.file.write_text(json.dumps(found))
