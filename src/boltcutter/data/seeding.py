"""Seeding of all random number generators on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

MASK = (1 << 64) - 1


def hash64(*numbers: int) -> int:
    """Hash integers to 64 bits.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64's finaliser).
    """
    key = 0x9E3779B97F4A7C15
    for number in numbers:
        key = ((key ^ number) * 0xBF58476D1CE4E5B9) & MASK
        key ^= key >> 27
        key = (key * 0x94D049BB133111EB) & MASK
        key ^= key >> 31
    return key


def seed_generators(*key: int) -> int:
    """Seed the generators of Python, NumPy and torch on the host with a hash of ``key``; return the seed of torch's."""
    seed = hash64(*key)
    torch.default_generator.manual_seed(seed >> 1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    return seed >> 1


@contextmanager
def seeded_generators(*key: int) -> Iterator[None]:
    """Seed the generators in this context, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seed_generators(*key)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def draw_indices(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Draw all indices of a sampler for an epoch, as a pure function of (seed, epoch).

    A generator that belongs to the sampler is seeded with its initial seed and the epoch, and its state is restored
    afterwards. Otherwise the state would advance from epoch to epoch, and be lost when a run is resumed.
    """
    owners = [owner for owner in (sampler, getattr(sampler, "sampler", None)) if owner is not None]
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
    own = next((g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)), None)
    with seeded_generators(seed, epoch):
        if own is None:
            return list(sampler)
        state = own.get_state()
        own.manual_seed(hash64(own.initial_seed(), epoch) >> 1)
        try:
            return list(sampler)
        finally:
            own.set_state(state)
