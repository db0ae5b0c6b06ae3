"""Streams of batches: loaders without random access, such as those of an ``IterableDataset``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, count, islice
from typing import Any

import torch
import torch.distributed as dist

from boltcutter.data.mapped import hash_batch
from boltcutter.data.sampler import EpochState
from boltcutter.data.seeding import seed_generators
from boltcutter.protocols import gather_objects, is_sharded

NOTHING = object()


class Stream(EpochState):
    """Shards and seeds a loader without random access, such as that of an ``IterableDataset``.

    Its data may already be sharded. Ranks compare their first batches: if these are equal, each rank takes every
    ``world_size``-th batch; if they differ, each rank takes all of its batches. In training, all ranks stop as soon as
    one of them has no batch left, because the others would wait for it in the next collective operation.
    """

    batch_sampler = None  # torch's batch sampler of a stream yields no indices
    state_dict = None  # a position that the loader restores would be skipped once more

    def __init__(self, loader: Any, *, seed: int, rank: int, world_size: int, training: bool) -> None:
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.training = self.follows_epochs = training

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self.world_size > 1:
            raise TypeError("the length differs between ranks")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        inner = getattr(self.loader, "sampler", None)
        for owner in (self.loader, getattr(self.loader, "dataset", None), inner):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)
        batches = self._read()
        if self.world_size > 1:
            batches = self._shard(batches)
        batches = islice(batches, start, None)
        return until_any_exhausted(batches) if self.training and self.world_size > 1 else batches

    def _read(self) -> Iterator[Any]:
        """Yield all batches, seeding all generators before each of them equally on all ranks and in resumed runs."""
        seed_generators(self.seed, self.epoch)  # DataLoader draws its workers' seeds from them
        batches = iter(self.loader)
        for number in count():
            seed_generators(self.seed, self.epoch, number)
            if (batch := next(batches, NOTHING)) is NOTHING:
                return
            yield batch

    def _shard(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(islice(batches, 1))
        declared = any(map(is_sharded, (self.loader, getattr(self.loader, "dataset", None))))
        hashes = gather_objects(None if declared else hash_batch(first))
        batches = chain(first, batches)
        if declared or len(set(hashes)) > 1:
            yield from batches
            return
        last: list[Any] = []
        while group := list(islice(batches, self.world_size)):
            if len(group) == self.world_size or (not self.training and self.rank < len(group)):
                last = group[self.rank : self.rank + 1]
                yield from last
            elif not self.training and not last:  # a rank without batches logs no metrics, and others wait
                yield group[0]


def until_any_exhausted(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until any process has none left, for which the others would wait in the next step."""
    group = _host_group(dist.group.WORLD)
    while True:
        batch = next(batches, NOTHING)
        flag = torch.tensor(batch is not NOTHING, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        if not flag:
            return
        yield batch


@lru_cache(maxsize=1)
def _host_group(world: Any) -> Any:
    """Process group for communication on the host; on the device, each batch would wait for the last."""
    return dist.new_group(backend="gloo")
