"""A variational autoencoder and its data, written for ``pytorch_lightning`` as most published modules are."""

from argparse import Namespace

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, random_split


class Images(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        images = torch.tensor(load_digits().data[:192], dtype=torch.float32) / 16
        self.train, self.val, self.test = random_split(TensorDataset(images), [128, 32, 32])

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.test, batch_size=self.hparams.batch_size)


class VAE(pl.LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 1e-3, flags: Namespace | None = None):
        super().__init__()
        self.save_hyperparameters()
        seed_everything(1)
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mu, self.log_var = nn.Linear(32, latent_dim), nn.Linear(32, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, 64))
        self.classifier = nn.Linear(latent_dim, 10)  # for a later task: the loss does not use it

    def forward(self, x):
        hidden = self.encoder(x)
        mu, log_var = self.mu(hidden), self.log_var(hidden)
        z = mu + torch.randn_like(mu) * (log_var / 2).exp()
        return self.decoder(z), mu, log_var

    def step(self, batch, stage):
        (x,) = batch
        x_hat, mu, log_var = self(x)
        loss = F.mse_loss(x_hat, x) - 5e-4 * (1 + log_var - mu**2 - log_var.exp()).mean()
        self.log(f"{stage}_loss", loss, sync_dist=stage != "train")
        return loss

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx) -> STEP_OUTPUT:
        return self.step(batch, "val")

    def test_step(self, batch, batch_idx) -> STEP_OUTPUT:
        self.step(batch, "test")

    @rank_zero_only
    def on_train_end(self):
        assert isinstance(self.trainer, pl.Trainer)

    def configure_callbacks(self):
        return [EarlyStopping("val_loss", patience=20)]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class CountSteps(Callback):
    steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args):
        self.steps += 1


def make_module():
    return VAE()


def make_callback():
    return LearningRateMonitor()


class Branches(pl.LightningModule):
    """A model of which steps use different heads.

    Args:
        kind: ``rank``: rank 1 leaves out a head; ``later``: odd steps do; ``checkpoint``: none does, but the autograd
            graph hides the trunk; ``frozen``: none does, but the trunk is frozen in the first epoch.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.first, self.trunk = nn.Linear(64, 16), nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.trunk.requires_grad_(kind != "frozen")

    def on_train_epoch_start(self):
        self.trunk.requires_grad_(self.kind != "frozen" or self.current_epoch > 0)

    def training_step(self, batch, batch_idx):
        hidden = self.first(batch[0])
        hidden = checkpoint(self.trunk, hidden, use_reentrant=True) if self.kind == "checkpoint" else self.trunk(hidden)
        skips = {"rank": self.global_rank == 1, "later": self.global_step % 2 == 1}
        heads = self.heads[:1] if skips.get(self.kind) else self.heads
        return F.mse_loss(sum(head(hidden) for head in heads), batch[0])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
