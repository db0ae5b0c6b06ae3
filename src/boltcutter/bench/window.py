"""Times steps of a real training in turn with other processes, and keeps what loops by hand need to do the same."""

from __future__ import annotations

import copy
import os
import resource
import time
from itertools import islice, pairwise
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

CHECKED = 5  # first steps, whose losses are compared


class Turns:
    """This process's part in a measurement: it waits until it may go on, and tells how long its steps took.

    Args:
        address: Socket of who measures.
        warm: Steps before the first turn.
        lead: At the begin of each turn, before the clock starts.
        steps: That are timed, at each turn.
    """

    def __init__(self, address: str, *, warm: int, lead: int, steps: int) -> None:
        self.address, self.warm, self.lead, self.steps = address, warm, lead, steps
        self._first: list[tuple[float, int]] = []  # losses, and what these steps were seeded with
        self._done = 0
        self._connection: Connection | None = None
        self._cpu = 0.0
        self._laps: list[float] = []

    def end_step(self, loss: Any) -> None:
        """After each step: wait where a turn ends, and leave the process when all turns are over."""
        self._laps.append(time.perf_counter())
        self._done += 1
        if self._done <= CHECKED:
            self._first.append((float(loss), torch.initial_seed()))
        place = (self._done - self.warm) % (self.lead + self.steps)
        if self._done >= self.warm and place == 0:
            self._tell()
        if self._done >= self.warm and place == self.lead % (self.lead + self.steps):
            self._cpu, self._laps = time.process_time(), [time.perf_counter()]

    def _tell(self) -> None:
        """Say what has been measured, in seconds a step and MiB, and wait."""
        if self._connection is None:
            self._connection = Client(self.address, "AF_UNIX")
        each = [b - a for a, b in pairwise(self._laps)]
        found = {"wall": sum(each) / self.steps, "cpu": (time.process_time() - self._cpu) / self.steps, "each": each}
        losses, seeds = zip(*self._first, strict=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found |= {"losses": losses, "seeds": seeds, "mib": peak}
        self._connection.send(found)
        try:
            self._connection.recv()
        except EOFError:
            os._exit(0)  # without tidying up, as taking a group down may wait for a rank that has left


class Window(Callback):
    """Takes turns with other processes, within an epoch.

    Args:
        address: As of `Turns`.
        warm: Likewise.
        lead: Likewise.
        steps: Likewise.
        keep: Where to put weights, samples and their order; null: nowhere.
        batches: How many to keep.
    """

    def __init__(
        self, address: str, *, warm: int, lead: int, steps: int, keep: Path | None = None, batches: int = 0
    ) -> None:
        self.keep, self.batches = keep, batches
        self._turns = Turns(address, warm=warm, lead=lead, steps=steps)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what training starts from."""
        if self.keep is None or not trainer.is_global_zero:
            return
        loader: Any = trainer.train_dataloader
        batches = list(islice(copy.copy(loader.batch_sampler), self.batches))
        chosen, places = np.unique(np.concatenate(batches), return_inverse=True)
        inputs, targets = loader.dataset.__getitems__(type(batches[0])(chosen.tolist()))
        kept = {
            "inputs": inputs,
            "targets": targets,
            "order": torch.from_numpy(places.reshape(len(batches), -1)),
            "weights": pl_module.model.state_dict(),  # type: ignore[union-attr]
            "total_steps": int(trainer.estimated_stepping_batches),
        }
        torch.save(kept, self.keep)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait where a turn ends."""
        self._turns.end_step(outputs["loss"])
