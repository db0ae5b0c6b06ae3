"""No two uses of random numbers share a stream."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch

from boltcutter.callback.reseed import seed_all
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


def philox(seed: int, count: int) -> np.ndarray:
    """Integers of 32 bits that the generator of a CUDA device draws, four of each of ``count`` threads.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox4x32-10).
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    first_key, second_key = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    zeros = np.zeros(count, np.uint64)
    words = [zeros, zeros, np.arange(count, dtype=np.uint64), zeros]
    for _ in range(10):
        one, other = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(other >> half) ^ words[1] ^ first_key, other & low, (one >> half) ^ words[3] ^ second_key, one & low]
        first_key, second_key = first_key + np.uint64(0x9E3779B9) & low, second_key + np.uint64(0xBB67AE85) & low
    return np.stack(words)


def test_philox_is_that_of_its_source() -> None:
    """The known answers of Random123 for the key and counter 0."""
    assert philox(0, 1)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def seed_each_global(purpose: Purpose, key: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Seed the global generators as a training does; return the seed of the device's."""
    device = SimpleNamespace(device=torch.device("cuda", 0))
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    if purpose is Purpose.INITIALIZATION:
        L.seed_everything(key, verbose=False)
    else:
        seed_all(cast(L.LightningModule, device), key)
    return seeds[-1]


def drawn_by_each(key: int, purpose: Purpose, monkeypatch: pytest.MonkeyPatch) -> Iterator[np.ndarray]:
    """What Python, NumPy and torch, their global generators, those of a device and of objects, draw in a stream."""
    words = philox(seed_each_global(purpose, key, monkeypatch), COUNT // 2).reshape(2, -1)
    yield (words[0] * 2.0**32 + words[1]) / 2.0**64
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


def test_no_two_purposes_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [(stream(purpose, 3), purpose) for purpose in Purpose]
    assert_independent([numbers for key, purpose in keys for numbers in drawn_by_each(key, purpose, monkeypatch)])


@pytest.mark.parametrize("purpose", [Purpose.SAMPLES, Purpose.STEP, Purpose.EVALUATION])
def test_no_two_epochs_batches_loaders_ranks_workers_and_stages_draw_the_same_numbers(
    purpose: Purpose, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [stream(purpose, seed, **place) for seed in (0, 1) for place in PLACES]
    assert_independent([numbers for key in keys for numbers in drawn_by_each(key, purpose, monkeypatch)])


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
