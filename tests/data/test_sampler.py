import pickle

import numpy as np
import pytest

from boltcutter.data import sampler
from boltcutter.data.sampler import Batch, BatchSampler, permute, uniform


def batches(length: int, size: int, world: int = 1, epoch: int = 0, **settings: bool | int) -> list[list[list[int]]]:
    """What each rank sees, batch by batch."""
    seen = []
    for rank in range(world):
        sampler = BatchSampler(length, size, rank=rank, world_size=world, **settings)
        sampler.set_epoch(epoch)
        seen.append([list(batch) for batch in sampler])
        assert len(seen[-1]) == len(sampler)
    return seen


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_yield_each_sample_once(world: int, shuffle: bool) -> None:
    for length in [*range(3, 40), 97, 100, 101]:
        for size in (6, 12):
            ranks = batches(length, size, world, shuffle=shuffle)
            assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(length))
            assert all(batch for rank in ranks for batch in rank)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_kth_batch_is_the_same_for_every_number_of_ranks(world: int) -> None:
    for length in (6, 11, 12, 60, 64):
        alone = batches(length, 6, shuffle=True, seed=5, epoch=2)[0]
        ranks = batches(length, 6, world, shuffle=True, seed=5, epoch=2)
        for number, whole in enumerate(alone):
            assert [i for rank in ranks if number < len(rank) for i in rank[number]] == whole


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_last_leaves_full_batches_of_equal_size(world: int) -> None:
    for length in (12, 13, 23):
        for rank in batches(length, 6, world, shuffle=True, drop_last=True):
            assert [len(batch) for batch in rank] == [6 // world] * (length // 6)


def test_start_skips_batches_once() -> None:
    sampler = BatchSampler(23, 4, shuffle=True)
    whole = list(sampler)
    for start in range(7):
        sampler.start = start
        assert list(sampler) == whole[start:]
        assert list(sampler) == whole


def test_order_depends_only_on_seed_and_epoch() -> None:
    orders = [batches(50, 50, epoch=e, shuffle=True, seed=s)[0][0] for s in (0, 1) for e in (0, 1)]
    assert len(set(map(tuple, orders))) == 4
    assert orders[1] == batches(50, 50, epoch=1, shuffle=True, seed=0)[0][0]
    assert batches(5, 5, epoch=3)[0][0] == [0, 1, 2, 3, 4]


def test_batches_hold_seed_and_epoch() -> None:
    sampler = BatchSampler(8, 4, seed=7)
    sampler.set_epoch(3)
    sent = [pickle.loads(pickle.dumps(batch)) for batch in sampler]
    assert [(list(b), b.seed, b.epoch) for b in sent] == [([0, 1, 2, 3], 7, 3), ([4, 5, 6, 7], 7, 3)]


def test_invalid_settings_are_errors_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"^data.batch_size=100 does not divide over 8 ranks; try 104$"):
        BatchSampler(1000, 100, world_size=8)
    with pytest.raises(ValueError, match=r"data.batch_size=0 must be 1 or more; try"):
        BatchSampler(1000, 0)
    with pytest.raises(ValueError, match=r"5 samples are too few for batch_size=6; give more data, or lower"):
        BatchSampler(5, 6, drop_last=True)
    with pytest.raises(ValueError, match="1 samples are too few for 2 ranks"):
        BatchSampler(1, 2, world_size=2)


def test_random_numbers_depend_on_the_sample_not_on_the_batch() -> None:
    together = uniform(Batch(range(100), seed=1, epoch=2), 3)
    for index in (0, 41, 99):
        assert np.array_equal(uniform(Batch([7, index], seed=1, epoch=2), 3)[1], together[index])
    assert not np.isin(uniform(Batch(range(100), seed=1, epoch=3), 3), together).any()
    assert not np.isin(uniform(Batch(range(100), seed=2, epoch=2), 3), together).any()


def test_random_numbers_are_uniform() -> None:
    drawn = uniform(Batch(range(50_000), seed=0, epoch=0), 2)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn[:, 0], 10, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 27.9  # chi-square with 9 degrees of freedom, 99.9 %
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.02


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 4099])
def test_a_lazy_permutation_has_each_index_once(length: int) -> None:
    places = np.arange(length)
    found = permute(places, length, 5, 1)
    assert sorted(found.tolist()) == places.tolist()
    assert np.array_equal(found[length // 2 :], permute(places[length // 2 :], length, 5, 1))
    if length >= 1000:
        assert not np.array_equal(found, permute(places, length, 5, 2))
        assert abs(np.corrcoef(found, places)[0, 1]) < 0.1
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.1


def test_a_large_data_set_is_permuted_exactly_from_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LAZY_ABOVE", 100)
    monkeypatch.setattr(sampler, "LAZY_CHUNK", 64)
    whole = list(BatchSampler(1003, 10, seed=3, shuffle=True))
    assert sorted(index for batch in whole for index in batch) == list(range(1003))
    assert [len(batch) for batch in whole] == [10] * 100 + [3]
    rest = BatchSampler(1003, 10, seed=3, shuffle=True)
    rest.start = 37
    assert list(rest) == whole[37:]
    halves = [list(BatchSampler(1003, 10, seed=3, shuffle=True, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*halves, strict=True)] == [list(batch) for batch in whole]
