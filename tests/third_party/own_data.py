"""A ``DataModule`` whose raw samples have another shape than the model's inputs, with loaders of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import boltcutter

NUM_TRAIN, NUM_TEST, NUM_PREDICT = 40, 12, 7


def make_raw() -> tuple[Any, Any]:
    """Raw samples (N, 2, 3) in double precision, and their classes."""
    raw = np.random.default_rng(0).normal(3, 2, (60, 2, 3))
    return raw, (raw[:, 0, 0] > 3).astype(np.int64)


class Pairs(Dataset[Any]):
    """Samples with two inputs of one shape."""

    def __len__(self) -> int:
        return NUM_TRAIN

    def __getitem__(self, index: int) -> Any:
        return (torch.full((4,), float(index)), torch.full((4,), float(index % 2))), index % 2


class PairsData(boltcutter.DataModule):
    """Whose inputs are a tuple."""

    num_classes = 2

    def load(self) -> boltcutter.Splits:
        return boltcutter.Splits(Pairs(), Pairs())


class Second(nn.Module):
    """Classifies by the second of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Tensor:
        first, second = inputs
        logits: Tensor = self.layer(second + 0 * first)
        return logits


class Own(boltcutter.DataModule):
    """Without a test split of the base class."""

    def __init__(self, *, shape: Any = (6,), num_classes: int = 2, **settings: Any) -> None:
        super().__init__(**{"batch_size": 8, **settings})

    def load(self) -> boltcutter.Splits:
        raw, targets = make_raw()
        if not self.statistics:
            self.statistics = {"mean": raw[:NUM_TRAIN].mean((0, 1)).tolist()}
        inputs, classes = self.preprocess(raw), torch.from_numpy(targets)
        return boltcutter.Splits(
            TensorDataset(inputs[:NUM_TRAIN], classes[:NUM_TRAIN]),
            TensorDataset(inputs[NUM_TRAIN:], classes[NUM_TRAIN:]),
        )

    def preprocess(self, raw: Any) -> Tensor:
        if raw.shape[1:] != (2, 3):
            raise ValueError("two rows of three values")
        return torch.from_numpy((raw - np.array(self.statistics["mean"])).reshape(len(raw), 6)).float()

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        return self.preprocess(np.stack([np.load(path) for path in paths])), [path.name for path in paths]

    def test_dataloader(self) -> Any:
        raw, targets = make_raw()
        return DataLoader(TensorDataset(self.preprocess(raw[-NUM_TEST:]), torch.from_numpy(targets[-NUM_TEST:])), 5)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.preprocess(make_raw()[0][:NUM_PREDICT]), 3)  # type: ignore[arg-type]
