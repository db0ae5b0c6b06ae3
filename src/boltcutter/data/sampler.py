"""Deterministic order of samples: a pure function of (seed, epoch), sharded over ranks without padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from boltcutter.data.draws import SamplerChanges, draw_groups, draw_indices, draws_at_once
from boltcutter.data.permutation import permute
from boltcutter.data.seeding import Seeded
from boltcutter.data.streams import Purpose, stream
from boltcutter.internals import tree_leaves
from boltcutter.topology import check_batch_size

if TYPE_CHECKING:
    from typing_extensions import Self

LAZY_ABOVE = 1 << 22  # samples, above which the permutation is computed chunk by chunk and never stored
LAZY_CHUNK = 1 << 16  # samples whose positions are then computed together
MAX_READ_AHEAD = 16  # batches that callback.prefetch may read ahead of training
MAX_RECORDED = 4096  # batches that a sampler has drawn and that are not trained on yet


class Batch(Sequence[int]):
    """Sample indices of one batch, with what random transforms may depend on.

    Args:
        indices: Shape (N,).
        seed: Seed of the data module.
        epoch: The current epoch.
        positions: Positions of the samples in the order of the epoch, shape (N,), which differ where a sampler draws a
            sample repeatedly; the indices if not given.
        stage: ``train``, ``val``, ``test`` or ``predict``.
        loader: Number of the loader, among several of a stage.
    """

    def __init__(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64],
        *,
        seed: int = 0,
        epoch: int = 0,
        positions: npt.NDArray[np.int64] | None = None,
        stage: str = "train",
        loader: int = 0,
    ) -> None:
        self.indices = np.asarray(indices, np.int64)
        self.positions = self.indices if positions is None else positions
        self.seed, self.epoch = seed, epoch
        self.stage, self.loader = stage, loader

    def stream(self, position: int = 0) -> int:
        """Seed, of 64 bits, of what is drawn for the sample at a position in the order of the epoch."""
        place: Any = {"stage": self.stage, "epoch": self.epoch, "loader": self.loader}
        return stream(Purpose.SAMPLES, self.seed, position=position, **place)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        return self.indices[position].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class EpochState:
    """Epoch and position of a loader or sampler, on which its order depends, and which loader it is."""

    follows_epochs = True  # False for evaluation, which is the same in each epoch
    stage = "train"
    loader_number = 0  # among several loaders of a stage
    seed = 0
    epoch = 0
    sampler_epoch: int | None = None  # what a sampler is told, if it is not the same, as in evaluation
    start = 0  # batches of this epoch to skip, once
    used = False  # whether an epoch has begun
    rank = 0
    worker_seeds: torch.Generator | None = None  # of a loader with workers
    recent: deque[tuple[int, int, Any]] | None = None  # first batch, their number, indices of samples

    def indices_of(self, number: int) -> Any:
        """Indices of the samples of this rank in a batch of the epoch, which were drawn last; None if unknown."""
        while self.recent:
            first, count, indices = self.recent[0]
            if first <= number < first + count:
                size, at = len(indices) // count, number - first
                return indices if count == 1 else indices[at * size : (at + 1) * size]
            self.recent.popleft()
        return None

    @property
    def sampler(self) -> Self:
        """The object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next, unless the rest of an interrupted epoch comes first."""
        # Lightning counts an epoch that max_steps interrupted as done.
        if not self.start:
            self.sampler_epoch = epoch
            if self.follows_epochs:
                self.epoch = epoch
        self.seed_workers()

    def seed_workers(self) -> None:
        """Seed what the seeds of workers are drawn from, else the generator of the task, as if it had no workers."""
        if self.worker_seeds is not None:
            self.worker_seeds.manual_seed(self.stream(Purpose.WORKER, rank=self.rank) >> 1)

    @property
    def place(self) -> dict[str, Any]:
        """Where the streams of this epoch are, among those of the seed."""
        return {"stage": self.stage, "epoch": self.epoch, "loader": self.loader_number}

    def stream(self, purpose: Purpose, **more: Any) -> int:
        """Return the stream of a purpose in this epoch; see ``streams.stream``."""
        return stream(purpose, self.seed, **self.place, **more)


def find_sampler(loaders: Any) -> EpochState | None:
    """The sampler that knows which samples are in a batch; None for streams, and for several loaders."""
    leaves = tree_leaves(loaders)
    loader = leaves[0] if len(leaves) == 1 else None
    owners = (getattr(loader, name, None) for name in ("epoch_sampler", "batch_sampler", "sampler"))
    return next((owner for owner in owners if isinstance(owner, EpochState) and owner.recent is not None), None)


class BatchSampler(EpochState, Sampler[Batch]):
    """Yields one rank's batches.

    The global order is divided into global batches, and each of those into one shard per rank. So the samples of the
    k-th step are the same for every number of ranks, and an incomplete last batch is sharded without padding.

    Args:
        num_samples: Number of samples.
        batch_size: Global batch size: samples in a batch over all ranks.
        seed: Together with the epoch, determines the order.
        rank: Rank of this process.
        world_size: Number of ranks.
        shuffle: Whether to draw a new permutation in each epoch, instead of 0, 1, 2, …
        drop_last: Whether to drop an incomplete last batch.
        index_sampler: Sampler whose indices are used instead of a permutation; as many as its length says.
        stage: ``train``, ``val`` or ``test``.

    Attributes:
        in_process: Whether this process reads the samples, not a worker.

    Raises:
        ValueError: The batch size is not divisible by the number of ranks, or there are too few samples.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        index_sampler: Sampler[int] | None = None,
        stage: str = "train",
    ) -> None:
        num_samples = num_samples if index_sampler is None else len(cast(Sized, index_sampler))
        check_batch_size(batch_size, world_size)
        if num_samples < (batch_size if drop_last else world_size):
            needed, remedy = f"batch_size={batch_size}", "lower data.batch_size"
            if not drop_last:
                needed, remedy = f"{world_size} ranks", "use fewer ranks"
            raise ValueError(f"{num_samples} samples are too few for {needed}; give more data, or {remedy}")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self.index_sampler, self.stage, self.in_process = index_sampler, stage, True
        self.changes = SamplerChanges(index_sampler)
        self._drawn: tuple[int, npt.NDArray[np.int64]] | None = None  # epoch, and the indices of index_sampler
        self._recorded: deque[tuple[int, list[int]]] = deque(maxlen=MAX_RECORDED)
        self.recent: deque[tuple[int, int, Any]] = deque(maxlen=MAX_RECORDED)
        self.recorded: dict[int, list[int]] = {}  # batches that were drawn before training was interrupted, once

    def order(self, epoch: int, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Global order of sample indices, from position ``first`` up to ``last``, shape (last - first,)."""
        last = self.num_samples if last is None else min(last, self.num_samples)
        if self.index_sampler is not None:
            if self._drawn is None or self._drawn[0] != epoch:
                place = self.place | {"epoch": epoch}
                self.changes.begin()
                drawn = draw_indices(self.index_sampler, self.batch_size, seed=self.seed, **place)
                self.changes.end()
                self._drawn = epoch, np.asarray(drawn, np.int64)
            return self._drawn[1][first:last]
        if not self.shuffle:
            return np.arange(first, last)
        key = stream(Purpose.ORDER, self.seed, **self.place | {"epoch": epoch})
        if self.num_samples > LAZY_ABOVE:
            return permute(np.arange(first, last), self.num_samples, key)
        return np.random.default_rng(key).permutation(self.num_samples)[first:last]

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        first, last = self._shard(rest)
        return full + (last > first and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        for batch, _ in self.iter_chunks():
            yield batch if self.in_process else Seeded(batch, batch.stream(int(batch.positions[0])))

    def iter_chunks(self, max_batches: Callable[[], int] = lambda: 1) -> Iterator[tuple[Batch, int]]:
        """Yield consecutive batches of equal size merged into one, and their number.

        Args:
            max_batches: Returns the largest number of batches to merge; called before each chunk.
        """
        start, self.start = self.start, 0
        size, batches = self.batch_size, len(self)
        if self.index_sampler is not None and not draws_at_once(self.index_sampler):
            yield from self._when_asked(start)
            return
        at_once = max(1, LAZY_CHUNK // size) if self.num_samples > LAZY_ABOVE else batches
        for begin in range(start, batches, at_once):
            order = self.order(self.epoch, begin * size, min(begin + at_once, batches) * size)
            full, position = len(order) // size, 0
            first, last = self._shard(size)
            shard = order[: full * size].reshape(full, size)[:, first:last]
            places = np.arange(begin * size, (begin + full) * size).reshape(full, size)[:, first:last]
            while position < full:
                chosen = slice(position, position + max_batches())
                merged = shard[chosen]
                position += len(merged)
                yield self._batch(merged.reshape(-1), places[chosen].reshape(-1)), len(merged)
            if rest := len(order) % size:  # an incomplete last batch
                first, last = self._shard(rest)
                at = begin * size + len(order) - rest
                yield self._batch(order[-rest:][first:last], np.arange(at + first, at + last)), 1

    def _when_asked(self, start: int) -> Iterator[tuple[Batch, int]]:
        """Yield batches of a sampler that follows training, or never ends, each drawn when it is asked for."""
        recorded, self.recorded = self.recorded, {}
        self._recorded.clear()
        groups = draw_groups(self.index_sampler, self.batch_size, seed=self.seed, **self.place)
        for number, group in zip(range(len(self)), groups, strict=False):
            if number < start:
                continue
            chosen = recorded.get(number, [int(index) for index in group])
            self._recorded.append((number, chosen))
            first, last = self._shard(len(chosen))
            at = number * self.batch_size
            if last > first:
                yield self._batch(chosen[first:last], np.arange(at + first, at + last)), 1

    def batch_at(self, number: int) -> Batch:
        """A batch of the epoch: the positions of its samples, on which random transforms depend, not their indices."""
        size = min(self.batch_size, self.num_samples - number * self.batch_size)
        first, last = self._shard(size)
        positions = number * self.batch_size + np.arange(first, last)
        return Batch(positions, seed=self.seed, positions=positions, **self.place)

    def drawn_after(self, done: int) -> Mapping[int, list[int]]:
        """Global batches that the sampler has drawn after the ``done`` batches that were trained on."""
        return {number: chosen for number, chosen in self._recorded if number >= done}

    def _batch(self, indices: Any, positions: npt.NDArray[np.int64]) -> Batch:
        first, last = int(positions[0]) // self.batch_size, int(positions[-1]) // self.batch_size
        self.recent.append((first, last - first + 1, indices))
        return Batch(indices, seed=self.seed, positions=positions, **self.place)

    def _shard(self, size: int) -> tuple[int, int]:
        """This rank's range of a global batch of ``size`` samples."""
        return self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size
