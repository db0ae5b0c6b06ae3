"""scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from boltcutter.data.image_io import read_images
from boltcutter.data.module import BatchedTensorDataset, DataModule, Splits
from boltcutter.data.splits import check_split, split_indices


class Digits(DataModule):
    """1,797 greyscale images of handwritten digits, 8 x 8 pixels, shipped with scikit-learn.

    Args:
        shape: Shape of one sample: channels, height, width.
        num_classes: Number of classes.
        split: Fractions of train, val and test, stratified by class.
        options: Arguments of ``DataModule``, such as ``batch_size``.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int, int] = (1, 8, 8),
        num_classes: int = 10,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if shape != (1, 8, 8) or num_classes != 10:
            raise ValueError(
                f"data.shape={shape}, data.num_classes={num_classes}: digits have (1, 8, 8) and 10; keep the defaults"
            )
        check_split(split)
        self.shape, self.num_classes, self.split = shape, num_classes, split
        self.classes = [str(digit) for digit in range(10)]

    def load(self) -> Splits:
        """Load all digits, with their 17 grey levels scaled to 0 … 255."""
        pixels, labels = load_digits(return_X_y=True)
        inputs = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, *self.shape)  # (N, 1, 8, 8)
        targets = torch.from_numpy(labels.astype(np.int64))  # (N,)
        splits = split_indices(len(labels), self.split, self.seed, labels, num_folds=self.num_folds, fold=self.fold)
        return Splits(*(BatchedTensorDataset(inputs[indices], targets[indices]) for indices in splits))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read images of one digit each, light on dark."""
        return read_images(paths, self.shape)
