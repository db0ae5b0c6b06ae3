"""Who sees which sample when: a pure function of (seed, epoch), cut by rank, never padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

MANY = 1 << 22  # samples, above which their order is computed as it is needed, and not kept
TOGETHER = 16  # blocks of samples that are mixed
AT_ONCE = 1 << 16  # samples whose places are then computed together


class Batch(list[int]):
    """Indices of one batch, also as an ``array``, with what a random augmentation may depend on."""

    def __init__(self, indices: Sequence[int] | npt.NDArray[np.int64], *, seed: int = 0, epoch: int = 0) -> None:
        self.array = np.asarray(indices, np.int64)
        super().__init__(self.array.tolist())
        self.seed = seed
        self.epoch = epoch


class BatchSampler(Sampler[Batch]):
    """One rank's batches.

    The global order is cut into global batches, and each of those into one piece for each rank. So the samples of
    the k-th step are the same for every number of ranks, and a last, smaller batch is shared out, not filled up.

    Args:
        length: Number of samples.
        batch_size: Samples in a batch over all ranks.
        seed: With the epoch, all that the order depends on.
        rank: Of this process.
        world_size: Number of ranks.
        shuffle: A new order in each epoch, else 0, 1, 2, …
        drop_last: Leave out the last, smaller batch.
        blocks: Lengths of stretches of samples that are dear to come back to: then ``TOGETHER`` of them, at random, are
            mixed and gone through before the next are.

    Raises:
        ValueError: The batch does not divide over the ranks, or there are too few samples.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> None:
        check_batch_size(batch_size, world_size)
        if length < (batch_size if drop_last else world_size):
            needed = f"batch_size={batch_size}" if drop_last else f"{world_size} ranks"
            raise ValueError(f"{length} samples are too few for {needed}; give more data or lower data.batch_size")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self.blocks = None if blocks is None else np.asarray(blocks, np.int64)
        self.epoch = 0
        self.start = 0  # batches of this epoch to pass over, once
        self.sampler = self  # Lightning looks for set_epoch here

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, unless there is the rest of one to go through."""
        # Lightning counts an epoch as done that max_steps cut short.
        if not self.start:
            self.epoch = epoch

    def order(self, epoch: int, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """The order of all samples over all ranks from place ``first`` to before ``last``, shape (last - first,)."""
        last = self.length if last is None else min(last, self.length)
        if not self.shuffle:
            return np.arange(first, last)
        if self.blocks is not None:
            return _by_blocks(self.blocks, first, last, self.seed, epoch)
        if self.length > MANY:
            return scattered(np.arange(first, last), self.length, self.seed, epoch)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)[first:last]

    def __len__(self) -> int:
        full, rest = divmod(self.length, self.batch_size)
        first, last = self._cut(rest)
        return full + (last > first and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        start, self.start = self.start, 0
        size, batches = self.batch_size, len(self)
        at_once = max(1, AT_ONCE // size) if self.length > MANY else batches
        for begin in range(start, batches, at_once):
            order = self.order(self.epoch, begin * size, (begin + at_once) * size)
            for place in range(0, min(at_once, batches - begin) * size, size):
                part = order[place : place + size]
                first, last = self._cut(len(part))
                yield Batch(part[first:last], seed=self.seed, epoch=self.epoch)

    def _cut(self, size: int) -> tuple[int, int]:
        """This rank's part of a global batch of ``size`` samples."""
        return self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size


def check_batch_size(batch_size: int, world_size: int) -> None:
    """Refuse a batch that ranks cannot share evenly.

    Raises:
        ValueError: The batch is empty or does not divide.
    """
    if batch_size < 1:
        raise ValueError(f"data.batch_size={batch_size} is not a number of samples; try 64")
    if batch_size % world_size:
        fitting = batch_size + -batch_size % world_size
        raise ValueError(f"data.batch_size={batch_size} does not divide over {world_size} ranks; try {fitting}")


def scattered(places: npt.NDArray[np.int64], length: int, *key: int) -> npt.NDArray[np.int64]:
    """What stands at some places of a random order of 0, 1, …, ``length`` - 1, which is nowhere written down.

    Numbers are cut in halves, and each half in turn is changed by a hash of the other: that can be undone, so no two
    become the same. What comes out beyond the length goes through again.

    Args:
        places: Any of 0, 1, …, ``length`` - 1.
        length: Of the whole.
        key: All that the order depends on.

    Source: Luby & Rackoff, How to Construct Pseudorandom Permutations from Pseudorandom Functions, 1988; Black &
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (walking until inside).
    """
    half = np.uint64(max(1, (int(length - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = np.random.SeedSequence(key).generate_state(6, np.uint64)
    found = np.array(places, np.uint64)
    outside: npt.NDArray[np.bool_] = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        with np.errstate(over="ignore"):
            for salt in rounds:
                left, right = right, left ^ (_mixed(right + salt) & mask)
        found[outside] = left << half | right
        outside = found >= length
    return found.astype(np.int64)


def _by_blocks(blocks: npt.NDArray[np.int64], first: int, last: int, *key: int) -> npt.NDArray[np.int64]:
    """Places ``first`` to before ``last`` of an order that mixes a few blocks at a time."""
    chosen = np.random.default_rng(key).permutation(len(blocks))
    starts = np.cumsum(blocks) - blocks
    ends = np.cumsum(blocks[chosen])[TOGETHER - 1 :: TOGETHER]
    ends = ends if len(blocks) % TOGETHER == 0 else np.append(ends, blocks.sum())
    found: list[npt.NDArray[np.int64]] = [np.arange(0)]
    begin, until = np.searchsorted(ends, [first, max(first, last - 1)], side="right").tolist()
    for pool in range(begin, min(until + 1, len(ends))):
        mine = chosen[pool * TOGETHER : (pool + 1) * TOGETHER]
        rows = np.concatenate([np.arange(starts[block], starts[block] + blocks[block]) for block in mine])
        before = int(ends[pool]) - len(rows)
        mixed = np.random.default_rng([*key, pool]).permutation(rows)
        found.append(mixed[max(0, first - before) : max(0, last - before)])
    return np.concatenate(found)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(batch: Batch, count: int) -> npt.NDArray[np.float32]:
    """Random numbers that depend on seed, epoch and sample alone, so not on workers, ranks or batches.

    Args:
        batch: Whose samples.
        count: Numbers for each sample.

    Returns:
        Shape (samples, count), in [0, 1).

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64).
    """
    key = np.random.SeedSequence([batch.seed, batch.epoch]).generate_state(1, np.uint64)
    counter = batch.array.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = _mixed(key + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    numbers: npt.NDArray[np.float32] = ((z >> np.uint64(40)) * np.float64(2**-24)).astype(np.float32)
    return numbers
