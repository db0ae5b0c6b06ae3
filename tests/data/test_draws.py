from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from boltcutter.data.draws import draw_groups, draw_indices


class Following(Sampler[int]):
    """Draws what training wants next."""

    wanted = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield self.wanted


class Endless(Sampler[int]):
    def __init__(self, generator: Any = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        while True:
            if isinstance(self.generator, np.random.Generator):
                yield from self.generator.permutation(7).tolist()
            else:
                yield from torch.randperm(7, generator=self.generator).tolist()


def test_a_sampler_is_told_the_epoch_and_keeps_the_state_of_its_generator() -> None:
    distributed = DistributedSampler(range(20), num_replicas=1, rank=0)  # type: ignore[arg-type, var-annotated]
    generator = torch.Generator().manual_seed(5)
    own = RandomSampler(range(20), generator=generator)
    before = generator.get_state()
    for sampler in (distributed, BatchSampler(distributed, 4, drop_last=False), own, BatchSampler(own, 4, False)):
        first, second, again = (draw_indices(sampler, seed=0, epoch=epoch) for epoch in (0, 1, 0))
        assert first == again != second
    assert torch.equal(generator.get_state(), before)
    assert draw_indices(own, seed=0, epoch=1) == draw_indices(own, seed=1, epoch=1)  # its initial seed counts
    assert draw_indices(own, seed=0, shared=1) != draw_indices(own, seed=0)


def test_the_epoch_that_a_sampler_is_told_may_be_another_one() -> None:
    distributed = DistributedSampler(range(20), num_replicas=1, rank=0)  # type: ignore[arg-type, var-annotated]
    draw_indices(distributed, seed=0, epoch=0, sampler_epoch=3)
    assert distributed.epoch == 3


def test_a_sampler_that_follows_training_is_asked_when_the_next_entries_are_needed() -> None:
    sampler, found = Following(), []
    for group in draw_groups(sampler, 2, seed=0):
        found.append(group)
        sampler.wanted += 1
    assert found == [[0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3), np.random.default_rng(3)])
def test_an_endless_sampler_is_never_listed_and_repeatable(generator: Any) -> None:
    def draw(epoch: int) -> list[int]:
        groups = draw_groups(Endless(generator), 3, seed=0, epoch=epoch)
        found = []
        for group in islice(groups, 9):
            torch.rand(5), np.random.rand()  # what samples and steps draw in between
            found.append(group)
        return list(chain(*found))

    first = draw(0)
    assert draw(0) == first != draw(1)
    assert sorted(first[:7]) == list(range(7))
    assert len(draw_indices(Endless(generator), seed=0)) == 10


def test_equal_seeds_of_two_samplers_keep_them_aligned() -> None:
    for make in (lambda: np.random.default_rng(3), lambda: torch.Generator().manual_seed(3)):
        first, second = (draw_indices(Endless(make()), seed=0, loader=loader) for loader in (0, 1))
        assert first == second
    unseeded = [draw_indices(Endless(np.random.default_rng()), seed=0, loader=loader) for loader in (0, 0, 1)]
    assert unseeded[0] == unseeded[1] != unseeded[2]


def test_two_loaders_draw_different_permutations() -> None:
    sampler = RandomSampler(range(50))
    orders = [draw_indices(sampler, seed=0, loader=loader) for loader in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_weights_that_change_count_in_the_next_epoch() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0], 5)
    assert draw_indices(sampler, seed=0) == [0] * 5
    sampler.weights = torch.tensor([0.0, 1.0])
    assert draw_indices(sampler, seed=0, epoch=1) == [1] * 5
