"""Batches that are read and copied to the device while the step before is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from boltcutter.data.draws import draws_at_once
from boltcutter.data.foreign_loader import RankBatches
from boltcutter.data.iterable import IterableLoader
from boltcutter.data.loader import Loader, is_device_busy
from boltcutter.data.stream import Stream
from boltcutter.structure import children, map_tensors, tensors

NOTHING = object()


class DeviceCopies:
    """Copies batches to a CUDA device in a stream of their own, beside the step that is computed.

    Args:
        device: The device of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy a batch; return it, and an event: when it is there. Other batches are returned as they are."""
        if not _can_be_handed_over(batch):
            return batch, None
        torch.cuda.set_device(self.device)  # a thread begins with the first one, and would use memory there
        pinned = map_tensors(batch, _pin)  # else the host would wait for the copy
        with torch.cuda.stream(self.stream):
            moved, copied = move_data_to_device(pinned, self.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return moved, copied

    def hand_over(self, batch: Any, copied: Any) -> Any:
        """Let the stream of the training wait for a batch, and keep its memory until that has used it."""
        if copied is not None:
            current: Any = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for part in (*tensors(batch), *_objects(batch)):
                part.record_stream(current)
        return batch


def _pin(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def _objects(batch: Any) -> list[Any]:
    """The parts of a batch that are neither tensors nor containers, and can be moved to a device."""
    if isinstance(batch, Tensor):
        return [batch] if batch.is_nested else []
    if (parts := children(batch)) is not None and not isinstance(batch, PackedSequence):  # which moves its indices, too
        return [found for part in parts for found in _objects(part)]
    return [batch] if hasattr(batch, "to") else []


def _can_be_handed_over(batch: Any) -> bool:
    """Whether the memory of all parts can be kept until another stream has used it."""
    is_plain = all(tensor.layout is torch.strided for tensor in tensors(batch))
    others = _objects(batch)
    return is_plain and all(hasattr(part, "record_stream") and not isinstance(part, Tensor) for part in others)


class Prefetcher:
    """Reads the next batches of an iterator in a thread, and begins to copy them to the device.

    A batch is read when one before it is taken, so that the thread never reads more than ``depth`` ahead, and after
    ``settle`` nothing changes until the next batch is taken.

    Args:
        batches: Yields batches, each with two numbers, as Lightning's ``CombinedLoader``.
        depth: Number of batches to read ahead; 0: none, so that only their copies are beside the step.
        left: Number of batches that may still be read; None: all that there are.
        copies: Copies them; None: they stay as they are.
        waited: Called with the seconds that a batch was waited for while no device had work queued.

    Attributes:
        read_seconds: Seconds in which batches were read and their copies begun.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        depth: int = 2,
        left: int | None = None,
        copies: DeviceCopies | None = None,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.batches, self.depth, self.left, self.copies, self.waited = batches, depth, left, copies, waited
        self.read_seconds = 0.0
        self._pending: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "prefetch") if depth else None
        self._fill()

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:  # a trainer may be pickled while it trains
        return iter, (self.batches,)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._thread is None:
            found = self._read()
        else:
            began = perf_counter()
            self._fill()
            # An error of the loader is raised with the traceback of the thread, when the batches before it are done.
            found = self._pending.popleft().result() if self._pending else NOTHING
            if not is_device_busy():
                self.waited(perf_counter() - began)
            self._fill()
        if found is NOTHING:
            raise StopIteration
        (batch, *numbers), copied = found
        return self.copies.hand_over(batch, copied) if self.copies else batch, *numbers

    def settle(self) -> int:
        """Wait until nothing is being read; return the number of batches that are read and not taken."""
        wait(self._pending)
        return sum(future.exception() is None and future.result() is not NOTHING for future in self._pending)

    def close(self) -> int:
        """End the thread; return the number of batches that were read and never taken."""
        if self._thread is None:
            return 0
        for future in self._pending:
            future.cancel()
        self._pending = deque(future for future in self._pending if not future.cancelled())
        self._thread.shutdown()
        count, self._thread = self.settle(), None
        self._pending.clear()
        return count

    def _fill(self) -> None:
        """Ask the thread for batches up to the bound."""
        while self._thread is not None and len(self._pending) < self.depth and (self.left is None or self.left > 0):
            self.left = None if self.left is None else self.left - 1
            self._pending.append(self._thread.submit(self._read))

    def _read(self) -> Any:
        began = perf_counter()
        found: Any = next(self.batches, NOTHING)
        if found is NOTHING:
            return NOTHING
        batch, *numbers = found
        moved, copied = self.copies.begin(batch) if self.copies else (batch, None)
        self.read_seconds += perf_counter() - began
        return (moved, *numbers), copied


def can_read_ahead(loaders: Sequence[Any], mode: str, world_size: int) -> bool:
    """Whether the batches of loaders are the same if a thread reads them ahead of training.

    A thread would draw from the global generators of Python, NumPy and torch while the step does. So it only reads what
    worker processes prepare, or a dataset that draws nothing and says so by its attribute ``is_pure``. A sampler that
    follows training is asked when training needs the next batch.

    Args:
        loaders: All loaders that are read together.
        mode: How Lightning combines them; a loader must not begin, or begin anew, in the thread, as it draws an order.
        world_size: Number of ranks; those that read a stream agree on its end for each batch.
    """
    if len(loaders) > 1:
        lengths = {sized_len(loader) for loader in loaders}
        if mode == "sequential" or len(lengths) > 1 or None in lengths:
            return False
    return all(_reads_elsewhere(loader, world_size) for loader in loaders)


def _reads_elsewhere(loader: Any, world_size: int) -> bool:
    if isinstance(loader, Loader):
        sampler: Any = loader.epoch_sampler.index_sampler
        at_once = sampler is None or draws_at_once(sampler)
        return at_once and (loader.num_workers > 0 or bool(getattr(loader.dataset, "is_pure", False)))
    if isinstance(loader, Stream):
        return loader.has_workers and world_size == 1
    if isinstance(loader, IterableLoader):
        return loader.num_workers > 0 and world_size == 1
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.num_workers:
        return False
    drawn: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return draws_at_once(drawn.source if isinstance(drawn, RankBatches) else drawn)
