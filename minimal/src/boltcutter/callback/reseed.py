"""Randomness that needs no saving: seeded anew for each step."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


class Reseed(Callback):
    """Seeds torch from (seed, epoch, batch, rank), so that a resumed run draws what an untouched one draws."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed all devices."""
        key = np.random.SeedSequence([self.seed, trainer.current_epoch, batch_idx, trainer.global_rank])
        torch.manual_seed(int(key.generate_state(1)[0]))
