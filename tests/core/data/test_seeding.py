import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from boltcutter.data.seeding import draw_indices, seed_generators, seeded_generators


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


def test_a_sampler_is_told_the_epoch_and_keeps_the_state_of_its_generator() -> None:
    distributed = DistributedSampler(range(20), num_replicas=1, rank=0)  # type: ignore[arg-type, var-annotated]
    generator = torch.Generator().manual_seed(5)
    own = RandomSampler(range(20), generator=generator)
    before = generator.get_state()
    for sampler in (distributed, BatchSampler(distributed, 4, drop_last=False), own, BatchSampler(own, 4, False)):
        first, second, again = (draw_indices(sampler, 0, epoch) for epoch in (0, 1, 0))
        assert first == again != second
    assert torch.equal(generator.get_state(), before)
    assert draw_indices(own, 0, 1) == draw_indices(own, 1, 1)  # only its initial seed and the epoch count
