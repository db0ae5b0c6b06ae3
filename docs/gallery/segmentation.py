"""Semantic segmentation: which digit does each pixel of a noisy picture belong to?

Source: Ronneberger, Fischer and Brox, U-Net: Convolutional Networks for Biomedical Image Segmentation, 2015.
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassJaccardIndex

from boltcutter import DataModule, Splits


class Scenes(DataModule):
    """Pictures of 32 x 32 pixels with four digits and noise. Each digit is in one split only."""

    def load(self) -> Splits:
        rng = torch.Generator().manual_seed(self.seed)
        parts = torch.randperm(1797, generator=rng).split([1197, 300, 300])
        return Splits(*(self.draw(part, len(part), rng) for part in parts))

    def draw(self, part: Tensor, count: int, rng: torch.Generator) -> TensorDataset:
        digits = load_digits()
        pictures, targets = torch.rand(count, 1, 32, 32, generator=rng) * 0.7, torch.zeros(count, 32, 32).long()
        for index in range(4 * count):
            digit = int(part[torch.randint(len(part), (1,), generator=rng)])
            y, x = (torch.randint(9, (2,), generator=rng) + torch.tensor([index // 2 % 2, index % 2]) * 16).tolist()
            place = index // 4, slice(y, y + 8), slice(x, x + 8)
            pixels = torch.tensor(digits.images[digit], dtype=torch.float32) / 16
            pictures[:, 0][place] += pixels
            targets[place] = torch.where(pixels > 0.3, int(digits.target[digit]) + 1, 0)  # 0 is the background
        return TensorDataset(pictures, targets)


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers = [
        (nn.Conv2d(size, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()) for size in (inputs, outputs)
    ]
    return nn.Sequential(*layers[0], *layers[1])


class UNet(L.LightningModule):
    """Three resolutions; ``hidden_size`` is the number of channels at the highest."""

    def __init__(self, hidden_size: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        one, two, four = hidden_size, 2 * hidden_size, 4 * hidden_size
        self.down = nn.ModuleList([block(1, one), block(one, two), block(two, four)])
        self.up = nn.ModuleList([block(four + two, two), block(two + one, one)])
        self.pool, self.grow, self.last = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(one, 11, 1)
        self.iou = nn.ModuleDict({stage: MulticlassJaccardIndex(11) for stage in ("val", "test")})

    def forward(self, pictures: Tensor) -> Tensor:
        one = self.down[0](pictures)
        two = self.down[1](self.pool(one))
        hidden = self.up[0](torch.cat([self.grow(self.down[2](self.pool(two))), two], dim=1))
        return self.last(self.up[1](torch.cat([self.grow(hidden), one], dim=1)))  # (B, 11, 32, 32)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        logits = self(batch[0])
        self.iou[stage](logits, batch[1])
        self.log_dict({f"{stage}/loss": cross_entropy(logits, batch[1]), f"{stage}/iou": self.iou[stage]})
        return logits.argmax(1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        found = self.evaluate(batch, "val")
        if batch_idx == 0:
            rows = zip(batch[0][:8, 0].clamp(max=1), batch[1][:8] / 10, found[:8] / 10, strict=True)
            self.logger.log_image("val/picture_truth_found", [torch.cat(row, dim=1)[None] for row in rows])

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
