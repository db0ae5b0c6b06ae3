"""Breast cancer diagnoses, a dataset that comes with scikit-learn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from boltcutter import BatchedTensorDataset, DataModule, Splits, split_indices
from sklearn.datasets import load_breast_cancer
from torch import Tensor


class BreastCancer(DataModule):
    """569 tumors, each described by 30 measurements, malignant or benign.

    ``DataModule`` builds the data loaders from these splits, with an order of samples that is the same on any number of
    devices and when a run is resumed. A ``LightningDataModule`` can be used instead.

    Args:
        shape: Shape of one sample.
        num_classes: Number of classes.
        split: Fractions of the train, val and test splits, stratified by class.
        options: Arguments of ``DataModule``: ``batch_size``, ``seed``, ``num_workers``, ``num_folds`` and ``fold``.

    Source: Street, Wolberg and Mangasarian, Nuclear Feature Extraction for Breast Tumor Diagnosis, 1993.
    """

    def __init__(
        self,
        *,
        shape: tuple[int] = (30,),
        num_classes: int = 2,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.shape, self.num_classes, self.split = shape, num_classes, split
        self.classes = ["malignant", "benign"]

    def load(self) -> Splits:
        """Return the train, val and test splits, standardized by the mean and deviation of the train split."""
        table = load_breast_cancer()
        indices = split_indices(
            len(table.target), self.split, self.seed, table.target, num_folds=self.num_folds, fold=self.fold
        )
        if not self.statistics:  # otherwise they come from the checkpoint
            train = table.data[indices[0]]
            self.statistics = {"mean": train.mean(axis=0).tolist(), "std": train.std(axis=0).tolist()}
        inputs, targets = self.preprocess(table.data), torch.from_numpy(table.target)
        return Splits(*(BatchedTensorDataset(inputs[split], targets[split]) for split in indices))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Return the rows of CSV files without a header as inputs for prediction, and a name for each row."""
        rows = [(f"{path}:{number}", row) for path in paths for number, row in enumerate(_read_rows(path), 1)]
        return self.preprocess(np.stack([row for _, row in rows])), [name for name, _ in rows]

    def preprocess(self, features: np.ndarray) -> Tensor:
        """Standardize measurements, here and of requests to ``serve.py``."""
        scaled = (features - np.array(self.statistics["mean"])) / np.array(self.statistics["std"])
        return torch.from_numpy(scaled).float()


def _read_rows(path: Path) -> np.ndarray:
    try:
        rows = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ValueError(f"{path}: {reason}; give a CSV file of numbers, without a header") from None
    if rows.shape[1] != 30:
        raise ValueError(f"{path}: {rows.shape[1]} columns; give the 30 measurements of each tumor")
    return rows
