"""Callback that times a training in turns with other processes, and saves its initial state for reference loops."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.turns import StepTimer


class TimingWindow(Callback):
    """Times steps within an epoch, in turns with other processes.

    Args:
        address: Socket of the coordinator.
        warm: Number of steps before the first turn.
        lead: Number of steps at the start of each turn that are not timed.
        steps: Number of timed steps of each turn.
        keep: File to which weights, samples and their order are saved; null disables saving.
        batches: Number of batches to save.
        counts: Whether to count bytecode instructions too.
    """

    def __init__(
        self,
        address: str,
        *,
        warm: int,
        lead: int,
        steps: int,
        keep: Path | None = None,
        batches: int = 0,
        counts: bool = False,
    ) -> None:
        self.keep, self.batches = keep, batches
        self._meter: Any = None  # computes the minimum time of a sample
        self._turns = StepTimer(address, warm=warm, lead=lead, steps=steps, counts=counts)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save weights, samples and their order."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._meter = next((found for found in callbacks if hasattr(found, "min_seconds")), None)
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
        """Record the step."""
        each = self._meter.min_seconds if self._meter else None
        self._turns.end_step(outputs["loss"], each and each * len(batch[0]))
