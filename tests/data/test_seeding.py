import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boltcutter.data import seeding
from boltcutter.data.sampler import EpochState
from boltcutter.data.seeding import SampleSeeds, Seeded, SeedWorker, seed_generators, seeded_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_are_seeded_and_restored() -> None:
    seed_generators(12)
    before = drawn()
    after = drawn()
    seed_generators(12)
    assert drawn() == before
    with seeded_generators(3):
        drawn()
    assert drawn() == after
    seed_generators(21)
    assert drawn() != before


def test_generators_that_objects_hold_are_seeded_too() -> None:
    holder = SimpleNamespace(generator=np.random.default_rng())
    seed = SampleSeeds(holder)
    seed(5)
    first = (holder.generator.random(), *drawn())
    assert holder.generator.random() != first[0]
    seed(5)
    assert (holder.generator.random(), *drawn()) == first
    copied: Any = pickle.loads(pickle.dumps(seed))
    copied(5)
    assert copied.owners[0].generator.random() == first[0]


@pytest.mark.parametrize("create", [lambda: np.random.default_rng(5), lambda: random.Random(5), torch.Generator])
def test_a_generator_that_is_created_while_samples_are_read_is_named(create: Any) -> None:
    holder = SimpleNamespace(generator=None)
    seed = SampleSeeds(holder)
    seed(1)
    holder.generator = create()
    with pytest.warns(UserWarning, match="is created when the first sample is read, .* create it in __init__"):
        seed(2)
    first = seeding.generator_state(holder.generator)
    seed(3)
    assert seeding.generator_state(holder.generator) != first
    seed(2)
    assert pickle.dumps(seeding.generator_state(holder.generator)) == pickle.dumps(first)


def test_a_worker_is_seeded_when_it_starts_and_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    position, called = EpochState(), list[Any]()
    position.rank = 1  # type: ignore[attr-defined]
    holder = SimpleNamespace(generator=random.Random())
    start: Any = SeedWorker(called.append, position, holder)
    position.epoch = 4
    started = {}
    for number, starter in enumerate((start, pickle.loads(pickle.dumps(SeedWorker(None, position))))):
        for worker in (0, 1):
            starter(worker)
            started[number, worker] = drawn()
    assert called == [0, 1]
    assert started[0, 0] == started[1, 0] != started[0, 1]
    monkeypatch.setattr(seeding, "get_worker_info", lambda: object())
    start(0)
    asked = []
    for stream in (7, 8, 7):
        assert pickle.loads(pickle.dumps(Seeded([3, 4], stream))) == [3, 4]
        asked.append((holder.generator.random(), *drawn()))
    assert asked[0] == asked[2] != asked[1]
    assert (len(Seeded([3, 4], 7)), list(Seeded([3, 4], 7))) == (2, [3, 4])
