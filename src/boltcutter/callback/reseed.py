"""Random number generators seeded at each step, so that their state need not be saved."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

MASK = (1 << 64) - 1


class Reseed(Callback):
    """Seed all random number generators from (seed, epoch, batch, rank) before each training step.

    Randomness such as dropout then does not depend on earlier steps or on validation, and a resumed run draws the same
    numbers as an uninterrupted one. Seeding the generators directly takes less than a tenth of the time of
    ``torch.manual_seed``, which visits every accelerator backend.

    Args:
        seed: Seed of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch and the current device."""
        key = mix(self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)
        torch.default_generator.manual_seed(key >> 1)
        # torch.cuda, torch.mps and torch.xpu have manual_seed; torch.cpu has not.
        seed_device = getattr(getattr(torch, pl_module.device.type, None), "manual_seed", None)
        if seed_device:
            seed_device(key >> 1)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)


def mix(*numbers: int) -> int:
    """Hash integers to 64 bits.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (finalizer of SplitMix64).
    """
    key = 0x9E3779B97F4A7C15
    for number in numbers:
        key = ((key ^ number) * 0xBF58476D1CE4E5B9) & MASK
        key ^= key >> 27
        key = (key * 0x94D049BB133111EB) & MASK
        key ^= key >> 31
    return key
