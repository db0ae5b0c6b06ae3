import random

import numpy as np
import torch

from boltcutter.data.seeding import seed_generators, seeded_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_are_seeded_and_restored() -> None:
    seed_generators(1, 2)
    before = drawn()
    after = drawn()
    seed_generators(1, 2)
    assert drawn() == before
    with seeded_generators(3):
        drawn()
    assert drawn() == after
    seed_generators(2, 1)
    assert drawn() != before
