import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch.utils.data import RandomSampler, Sampler

from boltcutter.data import sampler
from boltcutter.data.sampler import Batch, BatchSampler, EpochState


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


def test_a_batch_is_a_sequence_of_indices() -> None:
    batch = Batch([4, 7, 9])
    assert (len(batch), batch[1], batch[-2:], batch.seed, batch.epoch) == (3, 7, [7, 9], 0, 0)
    assert batch == [4, 7, 9]
    assert batch != [4, 7]
    assert batch != {4, 7, 9}


def test_the_indices_of_a_batch_are_known_while_it_is_read() -> None:
    state = EpochState()
    state.recent = deque([(0, 1, [7]), (1, 1, np.array([3, 4])), (2, 2, np.array([5, 6, 8, 9]))])
    found = [state.indices_of(number) for number in range(5)]
    assert [None if each is None else list(each) for each in found] == [[7], [3, 4], [5, 6], [8, 9], None]


def test_the_first_epoch_is_0_and_an_interrupted_epoch_is_completed_first() -> None:
    sampler = BatchSampler(30, 10, shuffle=True)
    assert list(sampler) == list(BatchSampler(30, 10, shuffle=True, seed=0)) == batches(30, 10, shuffle=True)[0]
    assert sampler.order(0).tolist() == [index for batch in sampler for index in batch]
    sampler.start = 2
    sampler.set_epoch(1)  # by Lightning, which counts the interrupted epoch
    assert [batch.epoch for batch in sampler] == [0]
    sampler.set_epoch(1)
    assert [batch.epoch for batch in sampler] == [1, 1, 1]
    sampler.follows_epochs = False
    sampler.set_epoch(2)
    assert sampler.epoch == 1


class Drawn(Sampler[int]):
    """Draws an order when its iteration begins."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(100)[:5].tolist())


@pytest.mark.parametrize("drawn", [Drawn(), RandomSampler(range(100), num_samples=5)])
def test_a_sampler_of_the_user_is_drawn_alike_in_an_epoch_and_on_all_ranks(drawn: Any) -> None:
    whole = BatchSampler(100, 4, index_sampler=drawn)
    orders = []
    for epoch in (0, 1, 1, 0):
        whole.set_epoch(epoch)
        orders.append([index for batch in whole for index in batch])
        assert whole.order(epoch).tolist() == orders[-1]
        assert whole.order(epoch, 1, 3).tolist() == orders[-1][1:3]
    assert len(whole) == 2
    assert orders[0] == orders[3] != orders[1] == orders[2]
    ranks = [BatchSampler(100, 4, index_sampler=drawn, rank=rank, world_size=2) for rank in (0, 1)]
    assert [index for pair in zip(*ranks, strict=False) for batch in pair for index in batch][:4] == orders[0][:4]


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_chunks_are_merged_batches(most: int) -> None:
    for rank in (0, 1):
        single = list(BatchSampler(23, 4, shuffle=True, rank=rank, world_size=2))
        found = list(BatchSampler(23, 4, shuffle=True, rank=rank, world_size=2).iter_chunks(lambda: most))
        assert [index for batch, _ in found for index in batch] == [index for batch in single for index in batch]
        assert [count for _, count in found] == [*[most] * (5 // most), *[5 % most] * (5 % most > 0), 1]
        assert all(len(batch) == 2 * count for batch, count in found[:-1])


def test_invalid_settings_are_errors_with_a_remedy() -> None:
    for size, remedy in ((100, 104), (99, 104)):
        with pytest.raises(ValueError, match=rf"^data.batch_size={size} does not divide over 8 ranks; try {remedy}$"):
            BatchSampler(1000, size, world_size=8)
    with pytest.raises(ValueError, match=r"data.batch_size=0 must be 1 or more; try"):
        BatchSampler(1000, 0)
    assert len(BatchSampler(1000, 1)) == 1000
    with pytest.raises(ValueError, match=r"5 samples are too few for batch_size=6; give more data, or lower"):
        BatchSampler(5, 6, drop_last=True)
    with pytest.raises(ValueError, match="1 samples are too few for 2 ranks; give more data, or use fewer"):
        BatchSampler(1, 2, world_size=2)


def test_a_large_data_set_is_permuted_exactly_from_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LAZY_ABOVE", 100)
    monkeypatch.setattr(sampler, "LAZY_CHUNK", 64)
    order, computed = BatchSampler.order, []

    def counted(self: BatchSampler, epoch: int, first: int, last: int) -> npt.NDArray[np.int64]:
        computed.append(last - first)
        return order(self, epoch, first, last)

    monkeypatch.setattr(BatchSampler, "order", counted)
    whole = list(BatchSampler(1003, 10, seed=3, shuffle=True))
    assert max(computed) == 60  # positions, as whole batches of at most LAZY_CHUNK samples
    computed.clear()
    assert len(list(BatchSampler(1003, 100, seed=3, shuffle=True))) == 11
    assert max(computed) == 100  # one batch is larger
    assert sorted(index for batch in whole for index in batch) == list(range(1003))
    assert [len(batch) for batch in whole] == [10] * 100 + [3]
    rest = BatchSampler(1003, 10, seed=3, shuffle=True)
    rest.start = 37
    assert list(rest) == whole[37:]
    halves = [list(BatchSampler(1003, 10, seed=3, shuffle=True, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*halves, strict=True)] == [list(batch) for batch in whole]
