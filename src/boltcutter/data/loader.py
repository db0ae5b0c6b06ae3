"""Data loader for map-style datasets, which fetches whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from boltcutter.data.mapped import BatchedMapDataset
from boltcutter.data.sampler import Batch, BatchSampler
from boltcutter.data.seeding import SampleSeeds, SeedWorker
from boltcutter.internals import pin_memory
from boltcutter.structure import inputs_of, outline

Pair = tuple[Tensor, Tensor]
FETCH_BYTES = 1 << 20  # small batches are fetched together up to this size, which fits into the CPU's cache


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that is fetched a whole batch at a time.

    Optional attributes: ``read_bytes``, the number of bytes that the disk reads at least for one sample; ``is_pure``,
    whether reading draws from no global random generator, so that it may be done in a thread beside the step.
    """

    def __len__(self) -> int: ...

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs (N, …) and targets of the samples in ``batch``."""
        ...

    def fingerprint(self) -> bytes:
        """Hash that changes when the contents change."""
        ...


class CountingLoader:
    """Counts the batches it yielded, and measures how long the caller waited for them.

    Attributes:
        epoch_sampler: Holds the epoch and the position.
        num_yielded: Number of batches of the epoch that were yielded or skipped.
        started: Whether iteration has begun.
        first: Number of the batch with which the latest iteration began.
        iterations: Number of iterations that have begun.
        outline: Structure of the inputs of the first batch, see ``boltcutter.structure.outline``; None before.
        wait_seconds: Seconds that the caller has waited for batches while no device had work queued.
        is_read_ahead: Whether a thread reads it, which has time to wait; what the step waits is then added by others.
    """

    is_sharded = True  # batches are already those of one rank
    epoch_sampler: Any
    num_yielded = 0
    started = False
    first = iterations = 0
    outline: Any = None
    wait_seconds = 0.0
    is_read_ahead = False

    def _fetch(self) -> Iterator[Iterable[Any]]:
        """Yield the batches of the epoch after ``epoch_sampler.start``, one or several at once."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        # A generator, because Lightning calls iter() before it sets the epoch.
        state = vars(self)  # DataLoader.__setattr__ is slow
        state["num_yielded"] = state["first"] = self.epoch_sampler.start
        state["started"], state["iterations"] = True, self.iterations + 1
        try:
            fetches = self._fetch()
            while True:
                began = perf_counter()
                batches = next(fetches, None)
                if not self.is_read_ahead and not is_device_busy():
                    state["wait_seconds"] = self.wait_seconds + perf_counter() - began
                if batches is None:
                    return
                for batch in batches:
                    state["num_yielded"] += 1
                    if self.outline is None:
                        is_pair = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], Tensor)
                        state["outline"] = "tensor" if is_pair else outline(inputs_of(batch))
                    yield batch
        except ValueError as error:
            if "in DataLoader worker" not in str(error):
                raise
            # A worker's error carries its whole traceback as text; the last line is the message.
            raise ValueError(str(error).rstrip().rsplit("ValueError: ", 1)[-1]) from error


class Loader(CountingLoader, DataLoader[Any]):  # type: ignore[misc]  # an iterator of any type
    """A ``DataLoader`` that fetches whole batches, and starts at ``sampler.start``.

    Args:
        samples: The dataset.
        sampler: Yields the indices of this rank's batches.
        num_workers: Worker processes; 0 loads in the calling process.
        pin_memory: Whether to copy batches into pinned memory.
    """

    epoch_sampler: BatchSampler

    def __init__(
        self,
        samples: BatchedDataset | BatchedMapDataset,
        sampler: BatchSampler,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            samples,  # type: ignore[arg-type]  # it has __getitems__ instead of __getitem__
            batch_sampler=sampler,
            collate_fn=identity,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=SeedWorker(None, sampler, samples) if num_workers else None,
            generator=torch.Generator() if num_workers else None,
        )
        sampler.worker_seeds = self.generator
        sampler.seed_workers()
        sampler.in_process = not num_workers
        # DataLoader refuses assignment. Unshuffled, its SequentialSampler stays, which overfit_batches checks for.
        if sampler.shuffle or sampler.index_sampler is not None:
            vars(self)["sampler"] = sampler
        self.epoch_sampler = sampler

    def _fetch(self) -> Iterator[Iterable[Any]]:
        return ((batch,) for batch in DataLoader.__iter__(self)) if self.num_workers else self._in_process()

    def _in_process(self) -> Iterator[Iterable[Any]]:
        """Fetch batches in this process, several small ones at once, because each fetch has a fixed cost."""
        if isinstance(self.dataset, BatchedMapDataset):
            for batch in self.epoch_sampler:
                found = self.dataset.__getitems__(batch)
                yield [pin_memory(found) if self.pin_memory else found]
            return
        samples, seed = cast(BatchedDataset, self.dataset), SampleSeeds(self.dataset)
        is_pure = bool(getattr(samples, "is_pure", False))
        limit, is_random = [1], not is_pure and bool(seed.own)
        for number, (chunk, count) in enumerate(self.epoch_sampler.iter_chunks(lambda: limit[0])):
            if not is_pure:  # a thread that reads ahead must not seed what the step draws from
                seed(chunk.stream(int(chunk.positions[0])))
            before = None if number or is_random or is_pure else seed.state()
            pair = samples.__getitems__(chunk)
            is_random = is_random or (before is not None and before != seed.state())
            if self.pin_memory:
                pair = (pair[0].pin_memory(), pair[1].pin_memory())
            # A disk reads whole pages: for short samples far apart, that is much more than their own bytes.
            read = max(1, pair[0].nbytes + pair[1].nbytes, getattr(samples, "read_bytes", 0) * len(chunk))
            limit[0] = 1 if is_random else max(1, FETCH_BYTES * count // read)  # what is drawn depends on the batch
            # unsafe_split: views from split would share a version counter.
            size = len(pair[0]) // count
            yield [pair] if count == 1 else zip(pair[0].unsafe_split(size), pair[1].unsafe_split(size), strict=True)


def is_device_busy() -> bool:
    """Whether the current CUDA stream still has work queued."""
    # Without initialization there is no context, and current_stream() would create one.
    return bool(torch.cuda.is_initialized() and not torch.cuda.current_stream().query())  # type: ignore[no-untyped-call]


def identity(batch: Any) -> Any:
    """Return a batch, which is collated already."""
    return batch
