"""Bits and their parity, read from a text file."""

from pathlib import Path
from typing import Any

import torch

from boltcutter import BatchedTensorDataset, DataModule, Splits, split_indices


class Parity(DataModule):
    """Lines of bits, such as ``0110``, whose class is whether the number of ones is odd.

    Args:
        file: Text file with a sample per line.
        shape: Shape of a sample: the number of bits.
        num_classes: Number of classes.
        options: Arguments of ``DataModule``, such as ``batch_size``.
    """

    def __init__(self, file: str, *, shape: tuple[int] = (8,), num_classes: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.file, self.shape, self.num_classes = file, shape, num_classes

    def load(self) -> Splits:
        """Read the file."""
        bits = torch.tensor([[int(bit) for bit in line] for line in Path(self.file).read_text().split()])  # (N, bits)
        targets = bits.sum(1) % 2
        splits = split_indices(len(bits), (0.6, 0.2, 0.2), self.seed, targets.numpy())
        return Splits(*(BatchedTensorDataset(bits[indices].float(), targets[indices]) for indices in splits))
