"""Streams of batches: loaders that yield one batch after another, in an order that only they know."""

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

from boltcutter.seeding import seed_generators


class Stream:
    """A loader without a known order, such as that of an ``IterableDataset``.

    Its data may or may not be sharded by itself. Ranks compare their first batches: where these are the same, each
    takes every ``world_size``-th batch; where they differ, each takes all of its own. In training all ranks stop when
    the first one has no batch left, since the others would wait for it.

    Args:
        loader: Any iterable of batches.
        seed: What its randomness depends on, with epoch and batch.
        rank: Of this process.
        world_size: Number of ranks.
        training: Whether ranks need equally many batches.
        group: Gives the processes that agree.
    """

    batch_sampler = None  # torch's, for a stream, yields no indices

    def __init__(
        self, loader: Any, *, seed: int, rank: int, world_size: int, training: bool, group: Callable[[], Any]
    ) -> None:
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.training, self.group = training, group
        self.epoch = 0
        self.start = 0  # batches of the epoch to skip, once

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet there while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def sampler(self) -> Stream:
        """Where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.world_size > 1:
            raise TypeError("the length is known only to each rank")
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
        """All batches, each read with generators that are the same on all ranks and in a resumed run."""
        seed_generators(self.seed, self.epoch)  # of workers, too
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
        declared = any(getattr(o, "is_sharded", False) for o in (self.loader, getattr(self.loader, "dataset", None)))
        mine = None if declared else hash_batch(first)
        dist.all_gather_object(everyone, (self.rank, mine), group=self.group())
        found = {other for _, other in everyone}
        batches = chain(first, batches)
        if declared or len(found) > 1:
            yield from batches
            return
        share: list[Any] = []
        while group := list(islice(batches, self.world_size)):
            if len(group) == self.world_size or (not self.training and self.rank < len(group)):
                share = group[self.rank : self.rank + 1]
                yield from share
            elif not self.training and not share:  # a rank without any batch would log nothing, and others wait
                yield group[0]


def until_any_exhausted(batches: Iterator[Any], group: Any) -> Iterator[Any]:
    """Batches for as long as every process of ``group`` has one: the others would wait for it in the next step."""
    nothing = object()
    while True:
        batch = next(batches, nothing)
        flag = torch.tensor(batch is not nothing, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        if not flag:
            return
        yield batch


def hash_batch(batch: Any) -> bytes:
    """Hash of what a batch holds.

    Raises:
        ValueError: It holds what cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(batch)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"data: whether all ranks read the same batches cannot be seen ({error}); set is_sharded on the loader"
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
