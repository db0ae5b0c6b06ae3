"""Times some steps of a real training, and keeps what a hand-written loop needs to do the same."""

from __future__ import annotations

import copy
import json
import os
import resource
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

CHECKED = 5  # first steps, whose losses are compared


class Window(Callback):
    """Ends the process when some steps after the first few are done, and writes how long they took.

    Args:
        file: What is written: seconds a step, the first losses, the peak of memory.
        warm: Steps before the clock starts.
        steps: That are timed.
        keep: Where to put weights, samples, their order and the seeds of the first steps; null: nowhere.
    """

    def __init__(self, file: Path, *, warm: int, steps: int, keep: Path | None = None) -> None:
        self.file, self.warm, self.steps, self.keep = Path(file), warm, steps, keep
        self.losses: list[float] = []
        self.seeds: list[int] = []
        self._kept: dict[str, Any] = {}
        self._stopwatch = Stopwatch()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what training starts from."""
        if self.keep is None or not trainer.is_global_zero:
            return
        loader: Any = trainer.train_dataloader
        batches = list(islice(copy.copy(loader.batch_sampler), self.warm + self.steps))
        chosen, places = np.unique(np.concatenate(batches), return_inverse=True)
        inputs, targets = loader.dataset.__getitems__(type(batches[0])(chosen.tolist()))
        self._kept = {
            "inputs": inputs,
            "targets": targets,
            "order": torch.from_numpy(places.reshape(len(batches), -1)),
            "weights": {name: value.clone() for name, value in pl_module.model.state_dict().items()},  # type: ignore[union-attr]
            "total_steps": int(trainer.estimated_stepping_batches),
        }

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what the first steps were seeded with."""
        if batch_idx < CHECKED:
            self.seeds.append(torch.initial_seed())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, or stop it and leave without tidying up."""
        done = batch_idx + 1
        self._stopwatch.lap()
        if done <= CHECKED:
            self.losses.append(float(outputs["loss"]))
        if done == self.warm:
            self._stopwatch = Stopwatch()
        elif done == self.warm + self.steps:
            if trainer.is_global_zero:
                self._stopwatch.write(self.file, self.steps, self.losses)
                if self.keep is not None:
                    torch.save({**self._kept, "seeds": self.seeds}, self.keep)
            os._exit(0)


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.cpu = time.process_time()
        self.laps = [time.perf_counter()]

    def lap(self) -> None:
        """A step is over."""
        self.laps.append(time.perf_counter())

    def write(self, file: Path, steps: int, losses: list[float]) -> None:
        """Write seconds a step, by the clock and of processors; each step; the first losses; the peak in MiB."""
        cpu, wall = time.process_time() - self.cpu, self.laps[-1] - self.laps[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        each = [b - a for a, b in pairwise(self.laps)]
        found = {"wall": wall / steps, "cpu": cpu / steps, "each": each, "losses": losses, "mib": peak}
        file.write_text(json.dumps(found))
