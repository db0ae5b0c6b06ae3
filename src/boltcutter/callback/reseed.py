"""Randomness that needs no saving: seeded anew for each step."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

MASK = (1 << 64) - 1


class Reseed(Callback):
    """Seed every generator from (seed, epoch, batch, rank) before each training step.

    Dropout then neither depends on how training came to this step, nor on whether validation ran in between; a
    resumed run draws what an untouched one draws. Seeding the generators themselves takes less than a tenth of the time
    of ``torch.manual_seed``, which visits every kind of accelerator.

    Args:
        seed: Of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch and the device in use."""
        key = mix(self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)
        torch.default_generator.manual_seed(key >> 1)
        # torch.cuda, torch.mps and torch.xpu have one; torch.cpu has none.
        seed_device = getattr(getattr(torch, pl_module.device.type, None), "manual_seed", None)
        if seed_device:
            seed_device(key >> 1)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)


def mix(*numbers: int) -> int:
    """Hash integers to 64 bits.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64's finaliser).
    """
    key = 0x9E3779B97F4A7C15
    for number in numbers:
        key = ((key ^ number) * 0xBF58476D1CE4E5B9) & MASK
        key ^= key >> 27
        key = (key * 0x94D049BB133111EB) & MASK
        key ^= key >> 31
    return key
