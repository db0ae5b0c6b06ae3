import pytest

from boltcutter.data.sampler import BatchSampler


def share(length: int, size: int, ranks: int, **options: bool) -> list[list[list[int]]]:
    return [list(BatchSampler(length, size, rank=rank, ranks=ranks, **options)) for rank in range(ranks)]


@pytest.mark.parametrize("length", [4, 11, 12, 97])
def test_each_sample_is_seen_once_on_any_number_of_ranks(length: int) -> None:
    for ranks in (1, 2, 4):
        seen = [sample for rank in share(length, 8, ranks) for batch in rank for sample in batch]
        assert sorted(seen) == list(range(length))


def test_a_step_is_made_of_the_same_samples_on_any_number_of_ranks() -> None:
    (alone,) = share(97, 8, 1, shuffle=True)
    assert len(alone) == 12
    for ranks in (2, 4):
        steps = zip(*share(97, 8, ranks, shuffle=True), strict=True)
        assert [[sample for piece in pieces for sample in piece] for pieces in steps] == alone


def test_the_rest_of_an_epoch() -> None:
    sampler = BatchSampler(64, 8, shuffle=True)
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.start = 5
    sampler.set_epoch(4)  # as Lightning does where max_steps has cut an epoch short
    assert list(sampler) == whole[5:]
    sampler.set_epoch(4)
    assert list(sampler) != whole


@pytest.mark.parametrize("length", [5, 8, 9])
def test_its_length_is_that_of_its_batches(length: int) -> None:
    for rank in range(4):
        sampler = BatchSampler(length, 8, rank=rank, ranks=4)
        assert len(sampler) == len(list(sampler))
