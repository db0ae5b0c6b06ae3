"""Seeding of all random number generators on the host."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import get_worker_info

from boltcutter.data.generators import find_generators, generator_state, seed_each
from boltcutter.data.streams import Purpose, seed32, stream


def seed_generators(stream: int) -> int:
    """Seed the generators of Python, NumPy and torch on the host, each differently; return the seed of torch's.

    Torch's generator of the CPU uses the lower 32 bits of its seed, as NumPy's global one does; with equal ones, both
    would draw the same integers.
    """
    torch.default_generator.manual_seed(stream >> 1)
    random.seed(stream)
    np.random.seed(seed32(stream))
    return stream >> 1


@contextmanager
def seeded_generators(stream: int) -> Iterator[None]:
    """Seed the generators in this context, and restore their states afterwards."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seed_generators(stream)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


class SampleSeeds:
    """Seeds all that draws random numbers for samples: the global generators, and those that some objects hold.

    Args:
        owners: Such as the dataset and its collate function.
        reports: Whether it warns of generators that are created while samples are read.
    """

    def __init__(self, *owners: Any, reports: bool = True) -> None:
        self.owners, self.reports = owners, reports
        self._own: list[Any] | None = None
        self._calls = 0

    @property
    def own(self) -> list[Any]:
        """Generators that the objects hold in this process, as found when it first asks for them."""
        if self._own is None:
            self._own = find_generators(*self.owners)
        return self._own

    def __call__(self, stream: int) -> None:
        """Seed all of them."""
        self._calls += 1
        if self._calls == 2:
            self._find_late_ones()
        seed_generators(stream)
        if self.own:
            seed_each(self.own, stream)

    def _find_late_ones(self) -> None:
        """Find generators that were created when the first sample was read, which was before they could be seeded."""
        before = {id(generator) for generator in self.own}
        self._own = find_generators(*self.owners)
        late = [generator for generator in self._own if id(generator) not in before]
        if late and self.reports:
            rank_zero_warn(
                f"data: a {type(late[0]).__name__} is created when the first sample is read, "
                "which gets the numbers of its own seed, in each worker the same; create it in __init__"
            )

    def state(self) -> bytes:
        """State of all of them, which is another one after any of them has drawn something."""
        of_torch = torch.default_generator.get_state().numpy().tobytes()
        own = [generator_state(generator) for generator in self.own]
        return pickle.dumps((random.getstate(), np.random.get_state(), of_torch, own))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_own": None, "_calls": 0}


class SeedWorker:
    """Seeds a worker process when it starts, before the ``worker_init_fn`` of the loader.

    Args:
        initialize: ``worker_init_fn`` of the loader.
        position: The epoch of the loader, and which one it is; has ``seed``, ``place`` and ``rank``.
        owners: What draws random numbers for samples, as for ``SampleSeeds``.
    """

    seeds: ClassVar[SampleSeeds] = SampleSeeds()  # of the worker that this process is, if it is one

    def __init__(self, initialize: Callable[[int], None] | None, position: Any, *owners: Any) -> None:
        self.initialize, self.position, self.owners = initialize, position, owners

    def __call__(self, worker: int) -> None:
        """Seed all generators of the worker."""
        # The same objects as those of the worker: one process is pickled as a whole, or forked.
        SeedWorker.seeds = SampleSeeds(*self.owners, reports=not worker and not self.position.place.get("epoch"))
        seed_generators(self.position.stream(Purpose.WORKER, rank=self.position.rank, worker=1 + worker))
        if self.initialize is not None:
            self.initialize(worker)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"position": _Position(self.position)}  # without a sampler that cannot be pickled


class _Position:
    """The position of a loader, without what it reads."""

    def __init__(self, position: Any) -> None:
        self.seed, self.place, self.rank = position.seed, position.place, position.rank

    def stream(self, purpose: Purpose, **more: Any) -> int:
        return stream(purpose, self.seed, **self.place, **more)


class Seeded:
    """What a worker is asked for; all its generators are seeded when it receives that, right before it reads.

    Args:
        wanted: An index, or those of a batch.
        stream: Stream of what is drawn for it.
    """

    def __init__(self, wanted: Any, stream: int) -> None:
        self.wanted, self.stream = wanted, stream

    def __len__(self) -> int:
        return len(self.wanted)

    def __iter__(self) -> Iterator[Any]:  # whoever reads the sampler of a loader gets indices, also with workers
        return iter(self.wanted)

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.wanted, self.stream)


def receive(wanted: Any, stream: int) -> Any:
    """Seed the generators of a worker, and return what it is asked for."""
    if get_worker_info() is not None:
        SeedWorker.seeds(stream)
    return wanted
