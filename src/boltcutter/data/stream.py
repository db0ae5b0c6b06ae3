"""Streams of batches: loaders without random access, such as those of an ``IterableDataset``."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boltcutter.data.seeding import seed_generators
from boltcutter.protocols import is_sharded


class Stream:
    """Shards and seeds a loader without random access, such as that of an ``IterableDataset``.

    Its data may already be sharded. Ranks compare their first batches: if these are equal, each rank takes every
    ``world_size``-th batch; if they differ, each rank takes all of its batches. In training, all ranks stop as soon as
    one of them has no batch left, because the others would wait for it in the next collective operation.

    Args:
        loader: Any iterable of batches.
        seed: Seed of its randomness, together with epoch and batch.
        rank: Rank of this process.
        world_size: Number of ranks.
        training: Whether all ranks need the same number of batches.
        group: Returns the process group for communication between ranks.
    """

    batch_sampler = None  # torch's batch sampler of a stream yields no indices

    def __init__(
        self, loader: Any, *, seed: int, rank: int, world_size: int, training: bool, group: Callable[[], Any]
    ) -> None:
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.training, self.group = training, group
        self.epoch = 0
        self.start = 0  # number of batches to skip at the start of the next epoch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def sampler(self) -> Stream:
        """The object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of training depends."""
        self.epoch = epoch if self.training else 0

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
        return until_any_exhausted(batches, self.group()) if self.training and self.world_size > 1 else batches

    def _read(self) -> Iterator[Any]:
        """Yield all batches, seeding all generators before each of them equally on all ranks and in resumed runs."""
        seed_generators(self.seed, self.epoch)  # DataLoader draws its workers' seeds from them
        batches, number = iter(self.loader), 0
        while True:
            seed_generators(self.seed, self.epoch, number)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            number += 1

    def _shard(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(islice(batches, 1))
        everyone: list[Any] = [None] * dist.get_world_size(self.group())
        declared = any(map(is_sharded, (self.loader, getattr(self.loader, "dataset", None))))
        own_hash = None if declared else hash_batch(first)
        dist.all_gather_object(everyone, (self.rank, own_hash), group=self.group())
        found = {other for _, other in everyone}
        batches = chain(first, batches)
        if declared or len(found) > 1:
            yield from batches
            return
        last: list[Any] = []
        while group := list(islice(batches, self.world_size)):
            if len(group) == self.world_size or (not self.training and self.rank < len(group)):
                last = group[self.rank : self.rank + 1]
                yield from last
            elif not self.training and not last:  # a rank without batches logs no metrics, and others wait
                yield group[0]


def until_any_exhausted(batches: Iterator[Any], group: Any) -> Iterator[Any]:
    """Yield batches until any process of ``group`` has none left, for which the others would wait in the next step."""
    nothing = object()
    while True:
        batch = next(batches, nothing)
        flag = torch.tensor(batch is not nothing, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        if not flag:
            return
        yield batch


def hash_batch(batch: Any) -> bytes:
    """Hash the contents of a batch.

    Raises:
        ValueError: The batch cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(batch)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"data: cannot tell whether all ranks read the same batches ({error}); set is_sharded on the loader"
        ) from error
    return hashlib.sha256(file.getvalue()).digest()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            values = value.detach().cpu().contiguous()
            return bytes, (
                str((values.dtype, *values.shape)).encode() + values.view(-1).view(torch.uint8).numpy().tobytes(),
            )
        return NotImplemented
