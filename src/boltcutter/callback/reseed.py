"""Random number generators seeded at each step, so that their state need not be saved."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.seed import isolate_rng

from boltcutter.data.seeding import seed_generators
from boltcutter.data.streams import Purpose, evaluated_split, stream

TRANSFER_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
_BEFORE, _AFTER = (getattr(DataHooks, name) for name in TRANSFER_HOOKS)


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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what is drawn before the first epoch, or the rest of one."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:  # resumed between two epochs, where Lightning may call no on_train_epoch_start
            self._seed(pl_module, Purpose.EPOCH_START, trainer)
        else:
            done = progress.current.ready
            self._seed(pl_module, Purpose.TRANSFER if done else Purpose.FIT, trainer, done)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what the task draws at the start of an epoch."""
        self._seed(pl_module, Purpose.EPOCH_START, trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what the task draws at the end of an epoch."""
        self._seed(pl_module, Purpose.EPOCH_END, trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch and the current device."""
        self._seed(pl_module, Purpose.STEP, trainer, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Seed what is drawn where the next batch is moved to the device, for which there is no hook of callbacks."""
        if _may_draw_at_transfer(pl_module) or _may_draw_at_transfer(getattr(trainer, "datamodule", None)):
            self._seed(pl_module, Purpose.TRANSFER, trainer, batch_idx + 1)

    def _seed(self, pl_module: L.LightningModule, purpose: Purpose, trainer: L.Trainer, position: int = 0) -> None:
        epoch, rank = trainer.current_epoch, trainer.global_rank
        seed_all(pl_module, stream(purpose, self.seed, epoch=epoch, position=position, rank=rank))


def _may_draw_at_transfer(owner: Any) -> bool:
    """Whether a task or data module has its own hook around the transfer of a batch, which may be set at any time."""
    if owner is None:
        return False
    before, after = TRANSFER_HOOKS
    kind = type(owner)
    is_inherited = getattr(kind, before) is _BEFORE and getattr(kind, after) is _AFTER
    return not is_inherited or before in vars(owner) or after in vars(owner)


class EvaluationSeeds(Callback):
    """Seed all random number generators from (seed, split, batch, rank) in validation, test and prediction.

    A step that draws random numbers, as of a diffusion model, then gives the same metrics after training, in
    ``evaluate`` and in each epoch. Training continues with the numbers that it would have drawn without validation.

    Args:
        seed: Seed of the run.

    Attributes:
        tested_split: The split that a test evaluates, also for the loaders of other data modules.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.tested_split = "test"
        self._validation = ExitStack()  # restores the generators

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Seed what hooks and data loaders draw before the first batch."""
        if stage != "fit":
            self._seed(trainer, pl_module, Purpose.EVALUATION_START)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what is drawn on the device before the first batch."""
        self._seed(trainer, pl_module, Purpose.EVALUATION_START)

    on_predict_start = on_test_start

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the states of the generators during training."""
        if trainer.state.fn == "fit":
            self._validation.enter_context(isolate_rng(include_cuda=pl_module.device.type == "cuda"))
        self._seed(trainer, pl_module, Purpose.EVALUATION_START)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore them."""
        self._validation.close()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed Python, NumPy, torch and the current device."""
        self._seed(trainer, pl_module, Purpose.EVALUATION, batch_idx, dataloader_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _seed(
        self, trainer: L.Trainer, pl_module: L.LightningModule, purpose: Purpose, position: int = 0, loader: int = 0
    ) -> None:
        place: Any = {"position": position, "loader": loader, "rank": trainer.global_rank}
        seed_all(pl_module, stream(purpose, self.seed, stage=evaluated_split(trainer, self.tested_split), **place))


def seed_all(pl_module: L.LightningModule, key: int) -> None:
    """Seed the generators of Python, NumPy and torch, on the host and on the device of a module."""
    seed = seed_generators(key)
    # torch.cuda, torch.mps and torch.xpu have manual_seed; torch.cpu has not.
    seed_device = getattr(getattr(torch, pl_module.device.type, None), "manual_seed", None)
    if seed_device:
        seed_device(seed)
