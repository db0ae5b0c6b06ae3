"""Plain Lightning modules and data whose evaluation draws random numbers."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random augmentation, also of the test."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + float(np.random.rand())
        return noise + index / 10, torch.tensor([index / 10])


class Data(L.LightningDataModule):
    """One augmented dataset for all splits."""

    def __init__(self, num_workers: int = 0, shape: Any = (4,), num_classes: int = 1) -> None:
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Jittered(32), 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Jittered(20), 8, num_workers=self.num_workers)

    test_dataloader = predict_dataloader = val_dataloader


class Diffusion(L.LightningModule):
    """Draws noise in each step, with dropout that stays on, and before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.net(inputs + 0.5 * torch.randn_like(inputs))
        return F.dropout(hidden + torch.randn(1) * 0.1, 0.3, training=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def on_test_start(self) -> None:
        self.offset = torch.randn(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        losses = F.mse_loss(self(batch[0]), batch[1], reduction="none")[:, 0]
        self.log("test/loss", losses.mean())
        self.log("test/offset", self.offset)
        return {"losses": losses} if batch_idx != 1 else {}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)
