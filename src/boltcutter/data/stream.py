"""Streams of batches: loaders without random access, such as those of an ``IterableDataset``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, default_convert, get_worker_info

from boltcutter.data.loader import identity
from boltcutter.data.mapped import hash_batch
from boltcutter.data.sampler import EpochState
from boltcutter.data.seeding import SampleSeeds, seed_generators
from boltcutter.data.streams import Purpose, stream
from boltcutter.protocols import gather_objects, is_sharded

NOTHING = object()


class Stream(EpochState):
    """Shards and seeds a loader without random access, such as that of an ``IterableDataset``.

    Its data may already be sharded. Workers compare their first batches: if these are equal, each reads everything and
    skips the batches of the others. Ranks do the same: if their first batches are equal, each rank takes every
    ``world_size``-th batch; if they differ, each rank takes all of its batches. In training, all ranks stop as soon as
    one of them has no batch left, because the others would wait for it in the next collective operation.
    """

    batch_sampler = None  # torch's batch sampler of a stream yields no indices
    state_dict = None  # a position that the loader restores would be skipped once more

    def __init__(
        self,
        loader: Any,
        *,
        seed: int,
        rank: int,
        world_size: int,
        training: bool,
        stage: str = "train",
        loader_number: int = 0,
    ) -> None:
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.training = self.follows_epochs = training
        self.stage, self.loader_number = stage, loader_number
        self._digests: list[bytes] | None = None  # of the first batches of the workers of all ranks
        self._says_left_out = False
        self._draws_order = True  # whether the dataset draws something when its iteration begins, as far as is known

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self.world_size > 1:
            raise TypeError("the length differs between ranks")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        start, self.start, self.used = self.start, 0, True
        inner = getattr(self.loader, "sampler", None)
        epoch = self.epoch if self.sampler_epoch is None else self.sampler_epoch
        for owner in (self.loader, getattr(self.loader, "dataset", None), inner):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        batches = self._shard() if self.world_size > 1 else self.read(self._seeded_loader(differ=False))
        batches = islice(batches, start, None)
        return until_any_exhausted(batches, self._say_left_out) if self.training and self.world_size > 1 else batches

    def workers_repeat(self) -> bool:
        """Whether all workers of a rank read the same samples, as those of a stream do that nobody has sharded."""
        if not self.has_workers or self.loader.num_workers < 2 or is_sharded(self.loader.dataset):
            return False
        return len(set(self._compare_workers()[self._own])) == 1

    def repeats_message(self, name: str) -> str:
        """Say that all workers read the same samples, and what to do."""
        kind, workers = type(self.loader.dataset).__name__, self.loader.num_workers
        return (
            f"{name}: all {workers} workers read the same samples of {kind}; divide them by "
            "torch.utils.data.get_worker_info() in its __iter__, set num_workers=1, or, if they only begin alike, "
            "is_sharded = True on the dataset"
        )

    def read(self, loader: Any, first: int = 0) -> Iterator[Any]:
        """Yield all batches, seeding all generators before each of them equally on all ranks and in resumed runs.

        Args:
            loader: The loader, or one that reads the same.
            first: Number of the first batch.
        """
        return (batch for batch, _ in self._read(loader, first))

    def _read(self, loader: Any, first: int = 0) -> Iterator[tuple[Any, list[int]]]:
        """Yield batches, each with the rank in whose streams the next one is read, which may be set: none, or one."""
        in_process = not self.has_workers
        seed: Callable[[int], Any] = SampleSeeds(loader) if in_process else seed_generators
        seed(self.stream(Purpose.STREAM, position=first))  # DataLoader draws the seeds of its workers from them
        batches, ranks = iter(loader), list[int]()
        for number in count(first):
            if in_process:
                seed(self.stream(Purpose.SAMPLES, position=number, rank=sum(ranks)))
            if (batch := next(batches, NOTHING)) is NOTHING:
                return
            yield batch, ranks

    @property
    def has_workers(self) -> bool:
        """Whether worker processes read the samples, and this one draws nothing."""
        loader = self.loader
        is_plain = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        return is_plain and loader.num_workers > 0 and not isinstance(loader.dataset, IterDataPipe)

    @property
    def _own(self) -> slice:
        """This rank's entries of what the workers of all ranks have found."""
        return slice(self.rank * self.loader.num_workers, (self.rank + 1) * self.loader.num_workers)

    def _compare_workers(self) -> list[bytes]:
        """Digests of the first batch of each worker, in the order of ranks, all with the same random numbers."""
        if self._digests is None:
            loader = self.loader
            probe = _FirstBatch(
                loader.dataset,
                1 if loader.batch_size is None else loader.batch_size,
                loader.collate_fn if loader.batch_size else _convert_each,
                self.stream(Purpose.PROBE),
            )
            own = list(_replace_dataset(loader, probe, batch_size=None, batch_sampler=None, collate_fn=identity))
            found = list(chain.from_iterable(gather_objects(own) if self.world_size > 1 else [own]))
            self._digests = [digest for digest, _ in found]
            self._draws_order = any(draws_order for _, draws_order in found)
        return self._digests

    def _seeded_loader(self, *, differ: bool) -> Any:
        """The loader; its workers are seeded before each batch, and skip the batches of others if all read the same.

        Args:
            differ: Whether ranks read different samples.
        """
        if not self.has_workers:
            return self.loader
        loader = self.loader
        skips = self.workers_repeat()
        own = {"rank": self.rank} if differ else {}
        samples = _WorkerSamples(loader.dataset, loader.batch_size or 1, loader.collate_fn, self.seed, skips)
        samples.draws_order = self._draws_order
        samples.place, samples.own = self.place, own
        return _replace_dataset(loader, samples)

    def _shard(self) -> Iterator[Any]:
        declared = any(map(is_sharded, (self.loader, getattr(self.loader, "dataset", None))))
        if self.has_workers:
            found = self._compare_workers()
            starts = range(0, len(found), max(1, self.loader.num_workers))
            differ = declared or len({tuple(found[i : i + self.loader.num_workers]) for i in starts}) > 1
            yield from self._of_rank(self.read(self._seeded_loader(differ=differ)), differ=differ)
            return
        numbered = self._read(self.loader)
        first = list(islice(numbered, 1))
        hashes = gather_objects(None if declared else hash_batch([batch for batch, _ in first]))
        differ = declared or len(set(hashes)) > 1
        if differ and first:
            first[0][1].append(self.rank)  # from the second batch on, ranks that read different samples draw others
        batches = (batch for batch, _ in chain(first, numbered))
        yield from self._of_rank(batches, differ=differ)

    def _of_rank(self, batches: Iterator[Any], *, differ: bool) -> Iterator[Any]:
        if differ:
            yield from batches
            return
        last, number = list[Any](), 0
        while group := list(islice(batches, self.world_size)):
            if len(group) == self.world_size or (not self.training and self.rank < len(group)):
                last = group[self.rank : self.rank + 1]
                yield from last
                number += len(group)
            elif self.training and self.rank == 0:
                self._say_left_out(f"the last {len(group)} of {number + len(group)} batches of the stream are")
            elif not last:  # a rank without batches logs no metrics, and others wait
                yield group[0]

    def _say_left_out(self, what: str = "") -> None:
        """Say once what is not trained on; by default what this rank has more than another."""
        what = what or f"rank {self.rank} has more batches of the stream than another, which are"
        if not self._says_left_out:
            print(
                f"train_dataloader: {what} left out in each epoch, as all {self.world_size} ranks train on equally many"
            )
        self._says_left_out = True


class _Delegating(IterableDataset[Any]):
    """A dataset in place of another one, whose attributes it has."""

    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)


@dataclass(eq=False)
class _FirstBatch(_Delegating):
    """The digest of a worker's first batch, and whether the dataset draws more for the first sample than for the next.

    Then it draws something when its iteration begins, such as an order.
    """

    dataset: Any
    size: int
    collate: Callable[[Any], Any]
    key: int

    def __iter__(self) -> Iterator[tuple[bytes, bool]]:
        seed = SampleSeeds(self.dataset, self.collate)
        samples, found, states = iter(self.dataset), list[Any](), list[bytes]()
        for _ in range(2):
            seed(self.key)
            found += islice(samples, 1)
            states.append(seed.state())
        draws_order = len(found) == 2 and states[0] != states[1]
        found = [*found, *islice(samples, max(0, self.size - 2))][: self.size]
        yield hash_batch(self.collate(found) if found else None), draws_order


@dataclass(eq=False)
class _WorkerSamples(_Delegating):
    """The samples of a dataset in a worker, with all generators seeded before those of each batch.

    What the dataset draws when its iteration begins, such as an order that it divides over workers itself, is equal in
    all workers, and with it what it draws for the first sample; for all others it is not, if workers read different
    ones.
    """

    dataset: Any
    batch_size: int
    collate: Any
    seed: int
    skips: bool
    draws_order: bool = True
    place: dict[str, Any] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        seed = SampleSeeds(self.dataset, self.collate)
        own = self.own if self.skips else self.own | {"worker": worker.id}
        at_start = stream(Purpose.STREAM, self.seed, **self.place)
        seed(at_start)
        samples = iter(self.dataset)
        is_divided = not self.skips and (worker.num_workers > 1 or bool(self.own))
        for number in count():
            key = stream(Purpose.SAMPLES, self.seed, position=number, **own, **self.place)
            # An order that several divide is drawn with the first sample.
            with_order = is_divided and self.draws_order and not number
            seed(at_start if with_order else key)
            is_own = not self.skips or number % worker.num_workers == worker.id
            for index in range(self.batch_size):
                if with_order and index == 1:
                    seed(key)
                if (sample := next(samples, NOTHING)) is NOTHING:
                    return
                if is_own:
                    yield sample


class _InitializeWorker:
    """``worker_init_fn`` of a loader, for which the dataset of the worker is the one of the user."""

    def __init__(self, initialize: Callable[[int], None] | None, dataset: Any) -> None:
        self.initialize, self.dataset = initialize, dataset

    def __call__(self, worker: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # it allows no assignment
        if self.initialize is not None:
            self.initialize(worker)


def _replace_dataset(loader: DataLoader[Any], dataset: _Delegating, **options: Any) -> DataLoader[Any]:
    """Copy a loader so that its workers read another dataset."""
    copied = copy.copy(loader)
    initialize = _InitializeWorker(loader.worker_init_fn, dataset.dataset)
    # DataLoader does not allow setting some of these attributes.
    replaced = {"_iterator": None, "dataset": dataset, "worker_init_fn": initialize, "persistent_workers": False}
    vars(copied).update(replaced | options)
    return copied


def _convert_each(samples: list[Any]) -> list[Any]:
    return [default_convert(sample) for sample in samples]  # type: ignore[no-untyped-call]


def until_any_exhausted(batches: Iterator[Any], say: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Yield batches until any process has none left, for which the others would wait in the next step.

    Args:
        batches: Those of this process.
        say: Called if this process has another one.
    """
    if not dist.is_initialized():  # a strategy that communicates by something else, or a loader read before training
        yield from batches
        return
    group = _host_group(dist.group.WORLD)
    while True:
        batch = next(batches, NOTHING)
        flag = torch.tensor(batch is not NOTHING, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        if not flag:
            if batch is not NOTHING:
                say()
            return
        yield batch


@lru_cache(maxsize=1)
def _host_group(world: Any) -> Any:
    """Process group for communication on the host; on the device, each batch would wait for the last."""
    return dist.new_group(backend="gloo")
