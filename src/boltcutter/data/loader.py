"""Loaders of map-style data sets, whose batches are fetched whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from boltcutter.data.mapped import MapSamples
from boltcutter.data.sampler import Batch, BatchSampler

Pair = tuple[Tensor, Tensor]
FETCH = 1 << 20  # bytes of small batches fetched at once; what is read stays in the processor's cache


@runtime_checkable
class Samples(Protocol):
    """A data set that is fetched a whole batch at a time.

    Where it has ``read_bytes``, that is what the disk reads for one sample at least; ``blocks`` are lengths of
    stretches of samples that are best read one after another.
    """

    def __len__(self) -> int: ...

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs (N, …) and targets of the samples in ``batch``."""
        ...

    def fingerprint(self) -> bytes:
        """What changes whenever the contents do."""
        ...


class Loader(DataLoader[Any]):
    """Batches fetched whole, from where ``sampler.start`` says; counts what it gave out."""

    is_sharded = True  # so that nobody shards it once more

    def __init__(
        self, samples: Samples | MapSamples, sampler: BatchSampler, *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        super().__init__(
            samples,  # type: ignore[arg-type]  # it has __getitems__ in place of __getitem__
            batch_sampler=sampler,  # type: ignore[arg-type]  # batches are sequences, if no lists
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )
        # torch refuses plain assignment. Else it is torch's SequentialSampler, which overfit_batches asks for.
        if sampler.shuffle or sampler.source is not None:
            vars(self)["sampler"] = sampler
        self.order = sampler
        self.done = 0
        self.begun = False
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, because Lightning asks for the iterator before it sets the epoch.
        counted = vars(self)  # torch looks closely at each plain assignment
        counted["done"], counted["begun"] = self.order.start, True
        try:
            fetches: Iterator[Iterable[Any]]
            fetches = ((batch,) for batch in super().__iter__()) if self.num_workers else self._here()
            while True:
                began = perf_counter()
                batches = next(fetches, None)
                if not busy():
                    counted["waited"] += perf_counter() - began
                if batches is None:
                    return
                for batch in batches:
                    counted["done"] += 1
                    yield batch
        except ValueError as error:
            if "in DataLoader worker" not in str(error):
                raise
            # A worker hands its whole traceback over as text; the last line is what went wrong.
            raise ValueError(str(error).rstrip().rsplit("ValueError: ", 1)[-1]) from error

    def _here(self) -> Iterator[Iterable[Any]]:
        """Batches prepared in this process, small ones several at once: one fetch for all costs less than one each."""
        if isinstance(self.dataset, MapSamples):
            for batch in self.order:
                found = self.dataset.__getitems__(batch)
                yield [pin_memory(found) if self.pin_memory else found]  # type: ignore[no-untyped-call]
            return
        samples = cast(Samples, self.dataset)
        most = [1]
        for chosen, count in self.order.several(lambda: most[0]):
            parts = samples.__getitems__(chosen)
            if self.pin_memory:
                parts = (parts[0].pin_memory(), parts[1].pin_memory())
            # A disk reads pages: of short samples that are far apart, it reads much more than is kept.
            read = max(1, parts[0].nbytes + parts[1].nbytes, getattr(samples, "read_bytes", 0) * len(chosen))
            most[0] = max(1, FETCH * count // read)
            # Not as views, each of which would know of all others.
            size = len(parts[0]) // count
            yield [parts] if count == 1 else zip(parts[0].unsafe_split(size), parts[1].unsafe_split(size), strict=True)


def busy() -> bool:
    """Whether a CUDA device still has work in its queue."""
    # Without work on it there is no context, and asking for a stream would make one.
    return bool(torch.cuda.is_initialized() and not torch.cuda.current_stream().query())  # type: ignore[no-untyped-call]


def _as_it_is(batch: Any) -> Any:
    return batch
