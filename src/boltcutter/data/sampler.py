"""Who sees which sample when: a pure function of (seed, epoch), cut by rank, never padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from boltcutter.seeding import draw_indices

MANY = 1 << 22  # samples, above which their order is computed as it is needed, and not kept
TOGETHER = 16  # blocks of samples that are mixed
AT_ONCE = 1 << 16  # samples whose places are then computed together
IN_CACHE = 1 << 12  # of these, as many as stay in the processor's nearest cache
ROUNDS = 6  # of moves; after fewer, small squares are not mixed well


class Batch(Sequence[int]):
    """Indices of one batch as an ``array``, with what a random augmentation may depend on."""

    def __init__(self, indices: Sequence[int] | npt.NDArray[np.int64], *, seed: int = 0, epoch: int = 0) -> None:
        self.array = np.asarray(indices, np.int64)
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        return self.array[place].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


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
        source: Another sampler, whose samples are taken in its order in place of all.
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
        source: Sampler[int] | None = None,
        blocks: Sequence[int] | None = None,
    ) -> None:
        length = length if source is None else len(cast(Sized, source))
        check_batch_size(batch_size, world_size)
        if length < (batch_size if drop_last else world_size):
            needed = f"batch_size={batch_size}" if drop_last else f"{world_size} ranks"
            raise ValueError(f"{length} samples are too few for {needed}; give more data or lower data.batch_size")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self.blocks = None if blocks is None else np.asarray(blocks, np.int64)
        self.source = source
        self._drawn: tuple[int, npt.NDArray[np.int64]] | None = None  # epoch, and what the source yielded
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
        if self.source is not None:
            if self._drawn is None or self._drawn[0] != epoch:
                self._drawn = epoch, np.asarray(draw_indices(self.source, self.seed, epoch), np.int64)
            return self._drawn[1][first:last]
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
        return (batch for batch, _ in self.several())

    def several(self, count: Callable[[], int] = lambda: 1) -> Iterator[tuple[Batch, int]]:
        """Batches of one size as one, one after another, with their number: at most ``count()``, asked each time."""
        start, self.start = self.start, 0
        size, batches = self.batch_size, len(self)
        at_once = max(1, AT_ONCE // size) if self.length > MANY else batches
        # No more than are mixed, so that not too many blocks are needed at a time.
        most = batches if self.blocks is None else max(1, TOGETHER * int(self.blocks.min(initial=size)) // size)
        for begin in range(start, batches, at_once):
            order = self.order(self.epoch, begin * size, min(begin + at_once, batches) * size)
            full, place = len(order) // size, 0
            first, last = self._cut(size)
            mine = order[: full * size].reshape(full, size)[:, first:last]
            while place < full:
                parts = mine[place : place + min(count(), most)]
                place += len(parts)
                yield Batch(parts.reshape(-1), seed=self.seed, epoch=self.epoch), len(parts)
            if rest := len(order) % size:  # a last, smaller batch comes alone
                first, last = self._cut(rest)
                yield Batch(order[-rest:][first:last], seed=self.seed, epoch=self.epoch), 1

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

    Numbers stand in a square, row by row. In turn each is moved within its column by a hash of the column, and within
    its row by a hash of the row: that can be undone, so no two become the same. The square has a few places too many;
    what comes out there goes through again.

    Args:
        places: Any of 0, 1, …, ``length`` - 1.
        length: Of the whole.
        key: All that the order depends on.

    Source: Luby & Rackoff, How to Construct Pseudorandom Permutations from Pseudorandom Functions, 1988; Black &
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (generalised Feistel, walking until inside).
    """
    wide = math.isqrt(max(0, length - 1)) + 1
    sizes = np.array([-(-length // wide), wide], np.uint64)
    salts = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    found: npt.NDArray[np.uint64] = np.array(places, np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        for some in np.array_split(outside, -(-len(outside) // IN_CACHE)):
            found[some] = _moved(found[some], sizes, salts)
        outside = outside[found[outside] >= length]
    return found.view(np.int64)


def _moved(
    numbers: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], salts: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Other numbers of a square of ``sizes`` (rows, columns)."""
    rows = numbers // sizes[1]
    halves = [rows, numbers - rows * sizes[1]]
    with np.errstate(over="ignore"):
        for number, salt in enumerate(salts):
            mine, size = number % 2, sizes[number % 2]
            hashed = _hash((halves[1 - mine] + salt).astype(np.uint32)).astype(np.uint64)
            moved = halves[mine] + (hashed * size >> np.uint64(32))
            halves[mine] = np.minimum(moved, moved - size)  # below zero is a large number
    found: npt.NDArray[np.uint64] = halves[0] * sizes[1] + halves[1]
    return found


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


def _hash(z: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's finaliser."""
    z = (z ^ (z >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    z = (z ^ (z >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return z ^ (z >> np.uint32(16))


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
