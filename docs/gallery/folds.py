"""Cross-validation on a table.

Source: Forina et al., PARVUS, An Extendible Package for Data Exploration, Classification and Correlation, 1991.
"""

from typing import Any

import torch
from sklearn.datasets import load_wine
from torch.utils.data import TensorDataset

from boltcutter import DataModule, Splits, split_indices


class Wine(DataModule):
    """178 wines of three cultivars, with 13 measurements each.

    Args:
        shape: Of a sample.
        num_classes: Number of cultivars.
        options: Arguments of ``DataModule``: with ``num_folds``, the split for validation is the fold ``fold``.
    """

    def __init__(self, shape: tuple[int] = (13,), num_classes: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.shape, self.num_classes = shape, num_classes

    def load(self) -> Splits:
        table = load_wine()
        self.classes = [str(name) for name in table.target_names]
        fractions, folds = (0.6, 0.2, 0.2), {"num_folds": self.num_folds, "fold": self.fold}
        parts = split_indices(len(table.target), fractions, self.seed, table.target, **folds)
        known = table.data[parts[0]]  # the mean and deviation of the training samples only
        inputs = torch.tensor((table.data - known.mean(0)) / known.std(0), dtype=torch.float32)
        targets = torch.tensor(table.target)
        return Splits(*(TensorDataset(inputs[part], targets[part]) for part in parts))
