"""Handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset, TensorDataset

from boltcutter.data.module import DataModule


class Digits(DataModule):
    """1,797 handwritten digits of 8 by 8 pixels, offline.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """

    def __init__(
        self, *, shape: list[int], outputs: int, split: list[float], batch_size: int, seed: int, workers: int = 0
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, workers=workers)
        if len(split) != 3 or abs(sum(split) - 1) > 1e-6 or min(split) <= 0:
            raise ValueError(f"data.split={split}: three shares that add up to 1 are needed; try [0.7,0.15,0.15]")
        if shape != [1, 8, 8] or outputs != 10:
            raise ValueError(f"data.shape={shape}, data.outputs={outputs}: digits have [1, 8, 8] and 10; leave both")
        self.split = split

    def load(self) -> dict[str, Dataset[Any]]:
        """Sixteen grey levels spread over a byte (N, 1, 8, 8), and classes (N,)."""
        pixels, labels = load_digits(return_X_y=True)
        inputs = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        targets, (train, val, test) = torch.from_numpy(labels.astype(np.int64)), self.split
        options = {"stratify": labels, "random_state": self.seed}
        rest, tested = train_test_split(np.arange(len(labels)), test_size=test, **options)
        options["stratify"] = labels[rest]
        trained, validated = train_test_split(rest, test_size=val / (train + val), **options)
        shares = {"train": trained, "val": validated, "test": tested}
        return {name: TensorDataset(inputs[share], targets[share]) for name, share in shares.items()}
