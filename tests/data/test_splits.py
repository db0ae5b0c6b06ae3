import numpy as np
import pytest

from boltcutter.data.splits import split_indices, split_off


def test_the_test_split_may_be_empty() -> None:
    train, val, test = split_indices(10, (0.9, 0.1, 0), 0)
    assert [len(train), len(val), len(test)] == [9, 1, 0]


def test_splits_are_disjoint_complete_and_stratified() -> None:
    labels = np.repeat(np.arange(4), [400, 200, 100, 100])
    parts = split_indices(800, (0.7, 0.1, 0.2), 3, labels)
    assert sorted(np.concatenate(parts)) == list(range(800))
    assert [len(part) for part in parts] == [560, 80, 160]
    for part in parts:
        assert np.array_equal(np.bincount(labels[part]) * 8 / len(part), [4, 2, 1, 1])
        assert np.array_equal(part, np.sort(part))
    again = split_indices(800, (0.7, 0.1, 0.2), 3, labels.tolist())
    assert all(map(np.array_equal, parts, again))
    assert not np.array_equal(parts[2], split_indices(800, (0.7, 0.1, 0.2), 4, labels)[2])


def test_split_off_uses_the_given_samples_only() -> None:
    kept, taken = split_off(np.arange(0, 100, 2), 0.1, 0)
    assert len(taken) == 5
    assert sorted([*kept, *taken]) == list(range(0, 100, 2))


def test_invalid_splits_are_one_line_errors() -> None:
    with pytest.raises(
        ValueError, match=r"^data.split=\[0.5, 0.5, 0.5\] must be three positive fractions that add up to 1"
    ):
        split_indices(10, (0.5, 0.5, 0.5), 0)
    with pytest.raises(
        ValueError,
        match=r"^data: a fraction of 0.15 of 2 samples cannot be split off: .+; add samples, or",
    ):
        split_indices(2, (0.7, 0.15, 0.15), 0, np.array([0, 1]))
