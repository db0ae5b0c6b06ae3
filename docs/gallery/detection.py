"""Object detection: where are the digits of a picture, and which are they?

Source: Ren et al., Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks, 2015.
"""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou

from boltcutter import DataModule, Splits

Images, Objects = list[Tensor], list[dict[str, Tensor]]


class Boxes(DataModule):
    """Pictures of 48 x 48 pixels with four digits, and their boxes. Each digit is in one split only."""

    def load(self) -> Splits:
        rng = torch.Generator().manual_seed(self.seed)
        parts = torch.randperm(1797, generator=rng).split([1197, 300, 300])
        self.digits = load_digits()
        return Splits(*([self.draw(part, rng) for _ in range(len(part) // 2)] for part in parts))

    def draw(self, part: Tensor, rng: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        digits, picture, boxes, labels = self.digits, torch.rand(3, 48, 48, generator=rng) * 0.3, [], []
        for place in range(4):
            digit = int(part[torch.randint(len(part), (1,), generator=rng)])
            y, x = (torch.randint(8, (2,), generator=rng) + torch.tensor([place // 2, place % 2]) * 24).tolist()
            pixels = torch.tensor(digits.images[digit], dtype=torch.float32).kron(torch.ones(2, 2)) / 16
            picture[:, y : y + 16, x : x + 16] += pixels * 0.7
            boxes.append([x, y, x + 16, y + 16])
            labels.append(digits.target[digit] + 1)  # 0 is the background
        return picture, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}

    def collate_fn(self, samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Images, Objects]:
        return [picture for picture, _ in samples], [objects for _, objects in samples]


class Detector(L.LightningModule):
    """A Faster R-CNN with a small backbone."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        sizes = [(3, 32), (32, 64), (64, 64)]
        layers = [(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)) for i, o in sizes]
        backbone = nn.Sequential(*[layer for stage in layers for layer in stage][:-1])
        backbone.out_channels = 64
        parts = {"rpn_anchor_generator": AnchorGenerator(((16,),), ((1.0,),)), "box_detections_per_img": 8}
        few = {"rpn_pre_nms_top_n_train": 100, "rpn_post_nms_top_n_train": 50, "box_batch_size_per_image": 32}
        pool = MultiScaleRoIAlign(["0"], output_size=5, sampling_ratio=1)
        scaled: dict[str, Any] = {"min_size": 48, "max_size": 48, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        self.net = FasterRCNN(backbone, 11, box_roi_pool=pool, **parts, **few, **scaled)

    def training_step(self, batch: tuple[Images, Objects]) -> Tensor:
        losses = self.net(*batch)  # of proposals, boxes and classes
        self.log_dict({f"train/{name}": loss for name, loss in losses.items()}, batch_size=len(batch[0]))
        return sum(losses.values())

    def validation_step(self, batch: tuple[Images, Objects], batch_idx: int, stage: str = "val") -> None:
        for truth, found in zip(batch[1], self.net(batch[0]), strict=True):
            right = box_iou(truth["boxes"], found["boxes"]) > 0.5
            right &= truth["labels"][:, None] == found["labels"]
            self.log(f"{stage}/found", right.any(1).float().mean(), batch_size=len(truth["boxes"]))

    def test_step(self, batch: tuple[Images, Objects], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)
