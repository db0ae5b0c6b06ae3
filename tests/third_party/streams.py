"""A data module of the library whose splits are iterable datasets of unknown length."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from boltcutter.data.module import DataModule, Splits


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples of their index and random numbers."""

    def __init__(self, begin: int, end: int, step: int = 1) -> None:
        self.begin, self.end, self.step = begin, end, step

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.begin, self.end, self.step):
            yield torch.cat([torch.tensor([float(number)]), torch.rand(3)]), torch.tensor(number % 3)


class Divided(Numbers):
    """Its shards have different lengths."""

    def shard(self, num_shards: int, index: int) -> "Divided":
        return Divided(self.begin + index, self.end - 20 * index, num_shards)


class Streams(DataModule):
    """A data module; if ``divided``, each rank reads a shard."""

    def __init__(
        self,
        *,
        divided: bool = False,
        shape: tuple[int] = (4,),
        num_classes: int = 3,
        batch_size: int = 8,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        self.divided, self.shape, self.num_classes, self.classes = divided, shape, num_classes, ["a", "b", "c"]

    def load(self) -> Splits:
        train: Any = Divided if self.divided else Numbers
        return Splits(train(0, 90), Numbers(0, 21))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        raise NotImplementedError
