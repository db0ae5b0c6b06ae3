"""Segmentation by torchvision: a fully convolutional network, and transforms of pictures and masks together.

Source: Long, Shelhamer and Darrell, Fully Convolutional Networks for Semantic Segmentation, 2015.
"""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision import tv_tensors
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.transforms import v2

from boltcutter import DataModule, Splits

SCALE = [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True), v2.ToPureTensor()]
VARIED = v2.Compose([v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1)), *SCALE])
PLAIN = v2.Compose(SCALE)


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of 64 x 64 pixels with four digits on noise, and the class of each pixel; 0 is the background."""

    def __init__(self, part: Tensor, rng: torch.Generator, transform: Any) -> None:
        self.transform, digits = transform, load_digits()
        self.pictures = torch.randint(80, (len(part) // 2, 3, 64, 64), generator=rng, dtype=torch.uint8)
        self.masks = torch.zeros(len(part) // 2, 64, 64).long()
        for index in range(4 * len(self.masks)):
            digit = int(part[torch.randint(len(part), (1,), generator=rng)])
            y, x = (torch.randint(8, (2,), generator=rng) + torch.tensor([index // 2 % 2, index % 2]) * 32).tolist()
            pixels = torch.tensor(digits.images[digit]).kron(torch.ones(3, 3)).byte() * 10  # 24 x 24
            self.pictures[index // 4, :, y : y + 24, x : x + 24] += pixels
            self.masks[index // 4, y : y + 24, x : x + 24][pixels > 50] = int(digits.target[digit]) + 1

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(tv_tensors.Image(self.pictures[index]), tv_tensors.Mask(self.masks[index]))


class Data(DataModule):
    """Each digit is in one split only; only pictures of training vary."""

    def load(self) -> Splits:
        rng = torch.Generator().manual_seed(self.seed)
        parts = torch.randperm(1797, generator=rng).split([1197, 300, 300])
        return Splits(*(Scenes(part, rng, each) for part, each in zip(parts, (VARIED, PLAIN, PLAIN), strict=True)))


class Segmenter(L.LightningModule):
    """The first half of a ResNet-18, and the head of an FCN."""

    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = FCN(create_feature_extractor(resnet18(), {"layer2": "out"}), FCNHead(128, 11))
        self.iou = torch.nn.ModuleDict({stage: MulticlassJaccardIndex(11) for stage in ("val", "test")})

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.net(batch[0])["out"], batch[1])

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        logits = self.net(batch[0])["out"]  # (B, 11, 64, 64)
        self.iou[stage](logits, batch[1])
        self.log_dict({f"{stage}/loss": cross_entropy(logits, batch[1]), f"{stage}/iou": self.iou[stage]})
        return logits.argmax(1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        found = self.evaluate(batch, "val")
        if batch_idx == 0:
            rows = zip(batch[0][:8].mean(1), batch[1][:8] / 10, found[:8] / 10, strict=True)
            self.logger.log_image("val/picture_truth_found", [torch.cat(row, dim=1)[None] for row in rows])

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)
