"""No two uses of random numbers share a stream."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from boltcutter.data.generators import seed_each
from boltcutter.data.seeding import seed_generators
from boltcutter.data.streams import STAGES, Purpose, hash64, seed32, stream

COUNT = 4096
PLACES: list[dict[str, Any]] = [
    {},
    {"epoch": 1},
    {"position": 1},
    {"loader": 1},
    {"rank": 1},
    {"worker": 1},
    {"generator": 1},
    *({"stage": stage} for stage in STAGES if stage != "train"),
]


def drawn_by_each(key: int) -> Iterator[np.ndarray]:
    """What Python, NumPy and torch, their global generators and those of an object, draw in a stream."""
    seed_generators(key)
    yield np.array([random.random() for _ in range(COUNT)])
    yield np.random.random(COUNT)
    yield torch.rand(COUNT, dtype=torch.float64).numpy()
    own: list[Any] = [random.Random(), np.random.default_rng(), np.random.RandomState(), torch.Generator()]
    seed_each(own, key)
    yield np.array([own[0].random() for _ in range(COUNT)])
    yield own[1].random(COUNT)
    yield own[2].random_sample(COUNT)
    yield torch.rand(COUNT, dtype=torch.float64, generator=own[3]).numpy()


def assert_independent(streams: list[np.ndarray]) -> None:
    table = np.stack(streams)
    assert len(np.unique(table)) == table.size  # none equal
    centred = table - 0.5
    correlations = np.corrcoef(centred)[np.triu_indices(len(table), 1)] * COUNT**0.5
    assert np.abs(correlations).max() < 6.5  # standard deviations, of thousands of pairs
    shifted = np.corrcoef(centred[:, 1:], centred[:, :-1])[: len(table), len(table) :] * COUNT**0.5
    assert np.abs(shifted).max() < 6.5


def test_no_two_purposes_draw_the_same_numbers() -> None:
    keys = [stream(purpose, 3) for purpose in Purpose]
    assert_independent([numbers for key in keys for numbers in drawn_by_each(key)])


@pytest.mark.parametrize("purpose", [Purpose.SAMPLES, Purpose.STEP, Purpose.EVALUATION])
def test_no_two_epochs_batches_loaders_ranks_workers_and_stages_draw_the_same_numbers(purpose: Purpose) -> None:
    keys = [stream(purpose, seed, **place) for seed in (0, 1) for place in PLACES]
    assert_independent([numbers for key in keys for numbers in drawn_by_each(key)])


def test_integers_of_numpy_and_torch_differ_too() -> None:
    """Both have the same algorithm, of 32 bits."""
    seed_generators(stream(Purpose.STEP, 0))
    assert (torch.randint(256, (COUNT,)).numpy() == np.random.randint(0, 256, COUNT)).mean() < 0.02


def test_all_streams_differ_in_the_bits_that_generators_use() -> None:
    places = [{"epoch": e, "position": p, "rank": r} for e in range(4) for p in range(40) for r in range(4)]
    keys = [stream(purpose, seed, **place) for seed in (0, 1, 2**32 - 1) for purpose in Purpose for place in places]
    hashed = [key for key in keys if key > 2**32]
    assert len(set(hashed)) == len(hashed) == len(keys) * (len(Purpose) - 1) // len(Purpose)
    for bits in ([key >> 1 & 0xFFFFFFFF for key in hashed], list(map(seed32, hashed))):  # torch's, NumPy's
        assert len(hashed) - len(set(bits)) < 8  # of 46,080 in 2**32, less than one is expected


def test_initial_weights_are_those_of_plain_lightning() -> None:
    assert stream(Purpose.INITIALIZATION, 7) == 7


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**80])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= hash64(seed, 1, 2) < 2**64


def test_hashes_of_neighbours_are_uniform_in_all_bits() -> None:
    keys = np.array([[stream(Purpose.STEP, 0, epoch=e, position=b)] for e in range(50) for b in range(50)], ">u8")
    assert len(np.unique(keys)) == 2500
    ones = np.unpackbits(keys.view(np.uint8), axis=1).mean(axis=0)
    assert ones.min() > 0.45
    assert ones.max() < 0.55
