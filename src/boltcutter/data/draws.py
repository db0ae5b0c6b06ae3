"""What samplers draw in an epoch, as a function of seed and epoch, or of what training tells them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from boltcutter.data.generators import find_generators, seed_generator
from boltcutter.data.seeding import seed_generators, seeded_generators
from boltcutter.data.streams import STAGES, Purpose, hash64, stream

# These draw all that is random when an epoch begins, so it does not matter when the rest is asked for.
ALL_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
MAX_SEED = 1 << 64  # one that nobody has given has 128 bits
_given: WeakKeyDictionary[torch.Generator, tuple[int | None, int]] = WeakKeyDictionary()  # seeds: a user's, ours


CHANGEABLE = {WeightedRandomSampler: "weights", SubsetRandomSampler: "indices"}  # by training, between epochs


class SamplerChanges:
    """What training changes of a sampler of torch, such as its weights, so that a resumed run draws the same.

    An epoch that is resumed draws with what the sampler had when it began, later ones with what was changed meanwhile.

    Args:
        sampler: The sampler; those of other kinds have no changes.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.name = sampler, CHANGEABLE.get(type(sampler))
        self.initial = self.drawn = self._current()
        self._later: Any = None

    def _current(self) -> Any:
        value = getattr(self.sampler, self.name) if self.name else None
        return value.clone() if isinstance(value, Tensor) else None if value is None else list(value)

    def begin(self) -> None:
        """Store with what an epoch is drawn, right before that."""
        self.drawn = self._current()

    def end(self) -> None:
        """The epoch is drawn."""
        if self._later is not None:
            setattr(self.sampler, str(self.name), self._later)
            self._later = None

    def state(self) -> list[Any] | None:
        """What this epoch is drawn with, and the next one; None if it is as in the beginning."""
        values = [self.drawn, self._current() if self._later is None else self._later]
        return values if any(not _is_same(value, self.initial) for value in values) else None

    def restore(self, state: list[Any] | None, *, within_epoch: bool) -> None:
        """Set what another process has saved."""
        if state and self.name:
            drawn, later = state
            setattr(self.sampler, self.name, drawn if within_epoch else later)
            self._later = later if within_epoch else None


def _is_same(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, Tensor) and isinstance(other, Tensor) else value == other


def draws_at_once(sampler: Any) -> bool:
    """Whether a sampler is one of torch, whose order is known when the epoch begins."""
    return type(sampler) in ALL_AT_ONCE or (type(sampler) is BatchSampler and draws_at_once(sampler.sampler))


def draw_groups(
    sampler: Any,
    size: int,
    *,
    seed: int,
    stage: str = "train",
    epoch: int = 0,
    loader: int = 0,
    shared: int = 0,
    sampler_epoch: int | None = None,
    is_told: bool = False,
) -> Iterator[list[Any]]:
    """Yield what a sampler draws in an epoch, ``size`` entries at a time; the last may be fewer.

    A sampler of torch is drawn at once. Any other is drawn when the next entries are asked for, as by a
    ``DataLoader``: it may follow what training tells it, and need not end. All generators are seeded before, so what it
    draws depends on nothing else.

    A generator that belongs to the sampler is seeded, with its initial seed if it has one: two samplers with equal
    seeds draw the same order, as without this function.

    Args:
        sampler: A sampler, or batch sampler.
        size: Number of entries.
        seed: Seed of the run.
        stage: ``train``, ``val``, ``test`` or ``predict``.
        epoch: Number of the epoch.
        loader: Number of the loader, among several of a stage.
        shared: Number of loaders before this one that use the same generator.
        sampler_epoch: What ``set_epoch`` of the sampler is called with, if it is not ``epoch``.
        is_told: Whether the sampler has been called so already.
    """
    owners = [owner for owner in (sampler, getattr(sampler, "sampler", None)) if owner is not None]
    for owner in owners:
        if hasattr(owner, "set_epoch") and not is_told:
            owner.set_epoch(epoch if sampler_epoch is None else sampler_epoch)
    own: list[Any] = find_generators(*map(_without_data, owners))
    place: dict[str, Any] = {"stage": stage, "epoch": epoch, "loader": loader}
    given = {id(generator): initial_seed(generator) for generator in own}
    states = [(generator, generator.get_state()) for generator in own if isinstance(generator, torch.Generator)]
    key = stream(Purpose.SAMPLER, seed, **place)
    for number, generator in enumerate(own, 1):
        initial = given[id(generator)]
        whole = (key, number) if initial is None else (initial, epoch, STAGES[stage], shared)
        seed_generator(generator, hash64(*whole))
    if draws_at_once(sampler):
        with seeded_generators(key):
            drawn = list(islice(sampler, sized_len(sampler)))
        for generator, state in states:
            generator.set_state(state)
        yield from (drawn[begin : begin + size] for begin in range(0, len(drawn), size))
        return
    for generator, _ in states:  # in use until the next epoch
        _given[generator] = given[id(generator)], generator.initial_seed()
    seed_generators(stream(Purpose.SAMPLER, seed, **place))
    entries = iter(sampler)
    for number in count():
        seed_generators(stream(Purpose.SAMPLER, seed, position=number, **place))
        if not (group := list(islice(entries, size))):
            return
        yield group


def draw_indices(sampler: Any, size: int = 1, **place: Any) -> list[Any]:
    """Draw all entries of an epoch, but not more than the length of the sampler; see ``draw_groups``."""
    found = chain.from_iterable(draw_groups(sampler, size, **place))
    return list(islice(found, sized_len(sampler)))


def initial_seed(generator: Any) -> int | None:
    """The seed that somebody has given to a generator; None if it is not known."""
    if isinstance(generator, torch.Generator):
        given, ours = _given.get(generator, (None, None))
        current = generator.initial_seed()
        return given if current == ours else current  # the user may have seeded it anew
    if isinstance(generator, np.random.Generator):
        entropy = getattr(cast(Any, generator.bit_generator).seed_seq, "entropy", None)
        return entropy if isinstance(entropy, int) and entropy < MAX_SEED else None
    return None


def _without_data(sampler: Any) -> Any:
    """What a sampler has, except the samples; those have generators of their own."""
    return {k: v for k, v in getattr(sampler, "__dict__", {}).items() if k not in ("data_source", "dataset", "sampler")}
