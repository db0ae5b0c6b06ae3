"""Who sees which sample when: a pure function of (seed, epoch), cut by rank, never padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class BatchSampler(Sampler[list[int]]):
    """One rank's batches.

    The order of all samples is cut into global batches, and each of those into a piece for each rank. So the k-th step
    is made of the same samples on any number of ranks. A last, smaller batch is shared out as it is.

    Args:
        length: Number of samples.
        batch_size: Samples in a batch over all ranks.
        seed: With the epoch, all that the order depends on.
        rank: Of this process.
        ranks: How many there are.
        shuffle: To train: a new order in each epoch, without a last, smaller batch.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, rank: int = 0, ranks: int = 1, shuffle: bool = False
    ) -> None:
        if batch_size < 1 or batch_size % ranks:
            better = max(1, -(-batch_size // ranks)) * ranks
            raise ValueError(f"data.batch_size={batch_size} does not divide over {ranks} ranks; try {better}")
        if length < (batch_size if shuffle else ranks):
            raise ValueError(f"data.batch_size={batch_size}: {length} samples make no batch; give more, or lower it")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.ranks, self.shuffle = rank, ranks, shuffle
        self.epoch, self.start = 0, 0  # batches of it to pass over
        self.sampler = self  # Lightning looks for set_epoch here

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, unless there is the rest of one to go through."""
        if not self.start:
            self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(self.length, self.batch_size)
        return full + (not self.shuffle and len(self._piece(list(range(rest)))) > 0)

    def __iter__(self) -> Iterator[list[int]]:
        first, self.start = self.start, 0
        order: Any = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        for begin in range(first * self.batch_size, len(self) * self.batch_size, self.batch_size):
            yield self._piece(order[begin : begin + self.batch_size].tolist())

    def _piece(self, batch: list[int]) -> list[int]:
        return batch[self.rank * len(batch) // self.ranks : (self.rank + 1) * len(batch) // self.ranks]
