"""Data loader for ``IterableDataset``, whose length may be unknown."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as worker_state

from boltcutter.data.loader import CountingLoader, identity
from boltcutter.data.sampler import MAX_READ_AHEAD, EpochState
from boltcutter.data.seeding import SampleSeeds
from boltcutter.data.stream import until_any_exhausted
from boltcutter.data.streams import Purpose, stream

MAX_STATES = (
    8 + MAX_READ_AHEAD
)  # states of a dataset that are retained, for batches that were yielded and not yet trained on


class IterableLoader(EpochState, CountingLoader):
    """Yields one rank's batches of an ``IterableDataset``, and counts them.

    Optional methods of the dataset:

    ``shard(num_shards, index)``: returns a dataset with one of ``num_shards`` equal shards. Each worker of each rank
    then reads its own shard, and in training all ranks stop when the first one has no batch left. Without it, every
    worker reads all samples and discards those of the others, so batches do not depend on ranks and workers.

    ``set_epoch(epoch)``: called before each epoch.

    ``state_dict()`` and ``load_state_dict(state)``, with plain types: training resumes within an epoch from this
    state. Without them, and with shards, the samples of the finished batches are read again and discarded.

    All generators, also those that the dataset holds, are seeded by (seed, epoch, batch) before a batch is read.
    ``batch_size`` is that over all ranks. What training leaves out at the end of an epoch is said once.
    """

    batch_sampler = None  # Lightning reads this attribute

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        stage: str = "train",
    ) -> None:
        self.batches = _RankBatches(dataset, batch_size, seed, rank, world_size, drop_last, collate or default_collate)
        self.stage = stage
        self.batch_size, self.seed, self.world_size, self.num_workers = batch_size, seed, world_size, num_workers
        self.num_samples: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self.drop_last, self.pin_memory, self._says_left_out = drop_last, pin_memory, False
        self.state: Any = None  # the dataset's state after the batches to skip, if known
        self._states: deque[tuple[int, Any]] = deque(maxlen=MAX_STATES)

    @property
    def epoch_sampler(self) -> IterableLoader:
        """The epoch and the position."""
        return self

    def __len__(self) -> int:
        if self.num_samples is None or self.batches.reads_shards(self.num_workers):
            raise TypeError("the number of batches is unknown")
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def state_after(self, done: int) -> Any:
        """State of the dataset after ``done`` batches of the epoch; None if unknown."""
        return next((state for number, state in self._states if number == done), None)

    def _fetch(self) -> Iterator[Iterable[Any]]:
        start, self.start = self.start, 0
        state, self.state = self.state, None
        self._states.clear()
        if state is not None:
            self._states.append((start, state))
        batches = replace(self.batches, place=self.place, start=start, state=state)
        options: Any = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        found = self._say_rest(iter(DataLoader(batches, batch_size=None, collate_fn=identity, **options)))
        if self.drop_last and self.world_size > 1 and batches.reads_shards(self.num_workers):
            found = until_any_exhausted(found, self._say_more)
        for number, (batch, state) in enumerate(found, start + 1):
            if state is not None:
                self._states.append((number, state))
            yield (batch,)

    def _say_rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and say how many samples at the end fill none."""
        rest = 0
        for batch, state in batches:
            if not isinstance(batch, _Rest):
                yield batch, state
            elif self.batches.reads_shards(self.num_workers):  # each of which has its own
                rest += batch.count
            else:
                rest = batch.count
        if rest and not self.batches.rank:
            is_shard = self.batches.reads_shards(self.num_workers)
            place = "the shards of rank 0" if is_shard else type(self.batches.dataset).__name__
            count = "1 sample is" if rest == 1 else f"{rest} samples are"
            size = self.batches.size_of(is_shard)
            self._say(f"{count} left out at the end of {place} in each epoch, as they fill no batch of {size}")

    def _say_more(self) -> None:
        kind = type(self.batches.dataset).__name__
        self._say(
            f"the shard of rank {self.batches.rank} of {kind} has more batches than another, which are left out in "
            f"each epoch, as all {self.world_size} ranks train on equally many"
        )

    def _say(self, what: str) -> None:
        if not self._says_left_out:
            print(f"data: {what}")
        self._says_left_out = True


@dataclass
class _Rest:
    """Samples at the end of a stream, or of a shard, that fill no batch."""

    count: int


@dataclass(eq=False)
class _RankBatches(IterableDataset[Any]):
    """Batches of one rank as a worker reads them, each with the dataset's state after it; see ``IterableLoader``."""

    dataset: Any
    batch_size: int
    seed: int
    rank: int
    world_size: int
    drop_last: bool
    collate: Callable[[list[Any]], Any]
    place: dict[str, Any] = field(default_factory=lambda: {"epoch": 0})
    start: int = 0
    state: Any = None

    def reads_shards(self, num_workers: int) -> bool:
        """Whether each worker of each rank reads its own shard."""
        return hasattr(self.dataset, "shard") and self.world_size * max(1, num_workers) > 1

    def size_of(self, is_shard: bool) -> int:
        """Number of samples that are read for a batch."""
        return self.batch_size // self.world_size if is_shard else self.batch_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        dataset, own, first = self.dataset, dict[str, Any](), 0
        reads_shards = self.reads_shards(num_workers)
        size = self.size_of(reads_shards)
        if reads_shards:
            worker_id = (worker_id + self.start) % num_workers  # the first worker yields the next batch
            dataset = dataset.shard(self.world_size * num_workers, self.rank * num_workers + worker_id)
            own = {"rank": self.rank, "worker": worker_id}
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.place["epoch"])
        worker_state._worker_info = None  # else a sharded dataset that reads it would skip samples a second time
        is_stateful = not reads_shards and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if is_stateful and self.state is not None:
            dataset.load_state_dict(copy.deepcopy(self.state))
            first = self.start
        seed = SampleSeeds(dataset, self.collate)
        seed(stream(Purpose.STREAM, self.seed, position=first, **own, **self.place))
        samples = iter(dataset)
        for index in count(first):
            seed(stream(Purpose.SAMPLES, self.seed, position=index, **own, **self.place))
            batch = list(islice(samples, size))
            if not batch:
                return
            if self.drop_last and len(batch) < size:
                yield _Rest(len(batch)), None
                return
            if reads_shards:  # all batches of this worker's shard
                is_wanted = index >= len(range(worker_id, self.start, num_workers))
            else:  # this rank's samples of every num_workers-th batch
                is_wanted = index >= self.start and (index - self.start) % num_workers == worker_id
                begin, end = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
                batch = batch[begin:end]
            if is_wanted and batch:
                yield self.collate(batch), copy.deepcopy(dataset.state_dict()) if is_stateful else None
