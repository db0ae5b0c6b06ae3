"""Samples that come one after another, as of an ``IterableDataset``, whose number nobody may know."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from boltcutter.seeding import seed_generators
from boltcutter.stream import until_any_exhausted

KEPT = 8  # states of a data set that are kept, for batches that were given out and not yet trained on


class IterableLoader:
    """One rank's batches of an ``IterableDataset``; counts what it gave out.

    The data set may have, besides ``__iter__``:

    ``shard(num_shards, index)``: gives a data set with one of equal parts. Each worker of each rank then reads its own
    part; in training all ranks stop when the first one has no batch left. Without it, each of them reads all samples,
    of which it takes its own: batches are those of one process, for any number of ranks and workers.

    ``set_epoch(epoch)``: is called before each epoch.

    ``state_dict()`` and ``load_state_dict(state)``, of plain types: a resume in mid-epoch goes on from there. Without
    them, or of parts, the samples of the finished batches are read again and dropped.

    All generators are seeded by (seed, epoch, batch) before a batch is read.

    Args:
        dataset: Of samples.
        batch_size: Samples in a batch over all ranks.
        seed: What its randomness depends on, with the epoch.
        rank: Of this process.
        world_size: Number of ranks.
        num_workers: Processes that read; 0 reads in this one.
        drop_last: Leave out a last, smaller batch.
        collate: Makes a batch of a list of samples; none means torch's own way.
    """

    is_sharded = True  # so that nobody shards it once more
    batch_sampler = None  # Lightning asks for it

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
    ) -> None:
        self.batches = Batches(dataset, batch_size, seed, rank, world_size, drop_last, collate or default_collate)
        self.batch_size, self.seed, self.world_size, self.num_workers = batch_size, seed, world_size, num_workers
        self.length: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self.drop_last, self.pin_memory = drop_last, pin_memory
        self.epoch = 0
        self.start = 0  # batches of this epoch to skip, once
        self.state: Any = None  # of the data set after these batches, if known
        self.done = 0
        self.waited = 0.0
        self.begun = False
        self._states: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._group: Any = None

    @property
    def sampler(self) -> IterableLoader:
        """Where Lightning looks for ``set_epoch``."""
        return self

    order = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, unless there is the rest of one to go through."""
        if not self.start:
            self.epoch = epoch

    def __len__(self) -> int:
        if self.length is None or self.batches.is_divided(self.num_workers):
            raise TypeError("the number of batches is not known")
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def state_after(self, done: int) -> Any:
        """The data set's state after that many batches of the epoch; None where it is not known."""
        return next((state for number, state in self._states if number == done), None)

    def __iter__(self) -> Iterator[Any]:
        # A generator, because Lightning asks for the iterator before it sets the epoch.
        start, self.start = self.start, 0
        self.done, self.begun = start, True
        self._states.clear()
        if self.state is not None:
            self._states.append((start, self.state))
        batches = copy.copy(self.batches)
        batches.epoch, batches.start, batches.state, self.state = self.epoch, start, self.state, None
        options: Any = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        found: Iterator[Any] = iter(DataLoader(batches, batch_size=None, collate_fn=_as_it_is, **options))
        if self.drop_last and self.world_size > 1 and batches.is_divided(self.num_workers):
            self._group = self._group or dist.new_group(backend="gloo")
            found = until_any_exhausted(found, self._group)
        while True:
            began = perf_counter()
            batch, state = next(found, (None, None))
            self.waited += perf_counter() - began
            if batch is None:
                return
            self.done += 1
            if state is not None:
                self._states.append((self.done, state))
            yield batch


class Batches(IterableDataset[Any]):
    """What a worker reads: batches of one rank, each with the data set's state after it.

    Args:
        dataset: Of samples.
        batch_size: Samples in a batch over all ranks.
        seed: What its randomness depends on, with the epoch.
        rank: Of this process.
        world_size: Number of ranks.
        drop_last: Leave out a last, smaller batch.
        collate: Makes a batch of a list of samples.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world_size, self.drop_last, self.collate = rank, world_size, drop_last, collate
        self.epoch = self.start = 0
        self.state: Any = None

    def is_divided(self, num_workers: int) -> bool:
        """Whether each process reads a part of its own."""
        return hasattr(self.dataset, "shard") and self.world_size * max(1, num_workers) > 1

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        dataset = self.dataset
        if self.is_divided(num_workers):
            dataset = dataset.shard(self.world_size * num_workers, self.rank * num_workers + number)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.epoch)
        torch_worker._worker_info = None  # a data set that looks at it would leave out samples once more
        if self.is_divided(num_workers):
            yield from self._of_part(dataset, number, num_workers)
        else:
            yield from self._of_all(dataset, number, num_workers)

    def _of_all(self, dataset: Any, number: int, num_workers: int) -> Iterator[Any]:
        """This rank's samples of every batch, or of every ``num_workers``-th one."""
        stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        first = 0
        if stateful and self.state is not None:
            dataset.load_state_dict(copy.deepcopy(self.state))
            first = self.start
        seed_generators(self.seed, self.epoch, first)
        samples = iter(dataset)
        for place in count(first):
            batch = self._read(samples, self.batch_size, place)
            if not batch:
                return
            if place < self.start or (place - self.start) % num_workers != number:
                continue
            begin, end = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
            if begin < end:
                yield self.collate(batch[begin:end]), copy.deepcopy(dataset.state_dict()) if stateful else None

    def _of_part(self, dataset: Any, number: int, num_workers: int) -> Iterator[Any]:
        """All batches of a part."""
        done = len(range(number, self.start, num_workers))
        seed_generators(self.seed, self.epoch, 0, self.rank, number)
        samples = iter(dataset)
        for place in count():
            batch = self._read(samples, self.batch_size // self.world_size, place, self.rank, number)
            if not batch:
                return
            if place >= done:
                yield self.collate(batch), None

    def _read(self, samples: Iterator[Any], size: int, *key: int) -> list[Any]:
        seed_generators(self.seed, self.epoch, *key)
        batch = list(islice(samples, size))
        return [] if self.drop_last and len(batch) < size else batch


def _as_it_is(batch: Any) -> Any:
    return batch
