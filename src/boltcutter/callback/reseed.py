"""Random number generators seeded at each step, so that their state need not be saved."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from boltcutter.data.seeding import seed_generators


class Reseed(Callback):
    """Seed all random number generators from (seed, epoch, batch, rank) before each training step, and around epochs.

    Randomness such as dropout then does not depend on earlier steps or on validation, and a resumed run draws the same
    numbers as an uninterrupted one. Seeding the generators directly takes less than a tenth of the time of
    ``torch.manual_seed``, which visits every accelerator backend.

    Args:
        seed: Seed of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what the task draws at the start of an epoch."""
        _seed(pl_module, self.seed, trainer.current_epoch, -1, trainer.global_rank)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what the task draws at the end of an epoch."""
        _seed(pl_module, self.seed, trainer.current_epoch, -2, trainer.global_rank)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch and the current device."""
        _seed(pl_module, self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)


class EvaluationSeeds(Callback):
    """Seed all random number generators from (seed, split, batch, rank) in validation, test and prediction.

    A step that draws random numbers, as of a diffusion model, then gives the same metrics after training, in
    ``evaluate`` and in each epoch. Training continues with the numbers that it would have drawn without validation.

    Args:
        seed: Seed of the run.

    Attributes:
        split: The split that a test evaluates.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.split = "test"
        self._validation = ExitStack()  # restores the generators

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Seed what hooks and data loaders draw before the first batch."""
        if stage != "fit":
            self._seed(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what is drawn on the device before the first batch."""
        self._seed(trainer, pl_module)

    on_predict_start = on_test_start

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the states of the generators during training."""
        if trainer.state.fn == "fit":
            self._validation.enter_context(isolate_rng(include_cuda=pl_module.device.type == "cuda"))
        self._seed(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore them."""
        self._validation.close()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed Python, NumPy, torch and the current device."""
        self._seed(trainer, pl_module, batch_idx, dataloader_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _seed(self, trainer: L.Trainer, pl_module: L.LightningModule, *position: int) -> None:
        split = self.split if trainer.testing else "predict" if trainer.predicting else "val"
        _seed(pl_module, self.seed, *split.encode(), *position, trainer.global_rank)


def _seed(pl_module: L.LightningModule, *key: int) -> None:
    seed = seed_generators(*key)
    # torch.cuda, torch.mps and torch.xpu have manual_seed; torch.cpu has not.
    seed_device = getattr(getattr(torch, pl_module.device.type, None), "manual_seed", None)
    if seed_device:
        seed_device(seed)
