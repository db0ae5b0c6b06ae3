"""ResNet-18 and the transforms of torchvision, on a folder of images.

Source: He et al., Deep Residual Learning for Image Recognition, 2015.
"""

from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.io import write_png
from torchvision.transforms import v2

from boltcutter import split_indices


class Folder(L.LightningDataModule):
    """Images in ``folder/<class>``; the digits of scikit-learn are written there if it does not exist.

    Args:
        folder: Folder of the images.
        num_classes: Number of folders in it.
        batch_size: Images of a batch.
        side: Height and width to which images are resized.
    """

    def __init__(self, folder: str, num_classes: int = 10, batch_size: int = 64, side: int = 32) -> None:
        super().__init__()
        self.folder, self.num_classes, self.batch_size, self.side = Path(folder), num_classes, batch_size, side

    def prepare_data(self) -> None:
        if not self.folder.is_dir():
            digits = load_digits()
            for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
                (self.folder / str(label)).mkdir(parents=True, exist_ok=True)
                write_png(torch.tensor(image * 15).byte()[None], str(self.folder / str(label) / f"{index}.png"))

    def setup(self, stage: str) -> None:
        ends = [v2.Resize((self.side, self.side)), v2.ToDtype(torch.float32, scale=True)]
        plain = v2.Compose([v2.ToImage(), *ends])
        varied = v2.Compose([v2.ToImage(), v2.RandomAffine(10, translate=(0.1, 0.1)), *ends])
        images = [ImageFolder(str(self.folder), transform) for transform in (varied, plain, plain)]
        parts = split_indices(len(images[0]), (0.7, 0.15, 0.15), 0, images[0].targets)
        self.splits = [Subset(data, part) for data, part in zip(images, parts, strict=True)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.splits[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.splits[1], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.splits[2], self.batch_size)
