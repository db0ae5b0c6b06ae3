"""Seeds of all generators on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(*key: int) -> None:
    """Seed Python, NumPy and torch on the host."""
    state = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(state >> 1)
    random.seed(state)
    np.random.seed(state & 0xFFFFFFFF)


@contextmanager
def seeded_generators(*key: int) -> Iterator[None]:
    """Seed them for a while."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seed_generators(*key)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
