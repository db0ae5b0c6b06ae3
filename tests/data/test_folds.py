import numpy as np
import pytest

from boltcutter.data.folds import check_folds, fold_indices, split_off_groups
from boltcutter.data.splits import split_indices
from boltcutter.data.tabular import Tabular

SPLIT = (0.7, 0.15, 0.15)


def imbalanced(count: int = 600, num_groups: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Classes with 3/4 and 1/4 of the samples, and groups of different sizes that have samples of one class only."""
    random = np.random.default_rng(0)
    groups = np.sort(random.integers(0, num_groups, count))
    return (groups % 4 == 0).astype(np.int64), np.array([f"patient {group}" for group in groups])


def folds(num_folds: int, seed: int = 0, **settings: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return [fold_indices(np.arange(600), num_folds, fold, seed, **settings) for fold in range(num_folds)]


@pytest.mark.parametrize("names", [(), ("labels",), ("groups",), ("labels", "groups")])
def test_each_sample_is_in_one_fold(names: tuple[str, ...]) -> None:
    labels, groups = imbalanced()
    given = {"labels": labels, "groups": groups}
    found = folds(5, **{name: given[name] for name in names})
    assert sorted(np.concatenate([val for _, val in found])) == list(range(600))
    for train, val in found:
        assert sorted([*train, *val]) == list(range(600))
        assert np.array_equal(train, np.sort(train))
        assert np.array_equal(val, np.sort(val))
        assert len(val) == pytest.approx(120, abs=30 if "groups" in names else 0)
        if "labels" in names:
            assert labels[val].mean() == pytest.approx(labels.mean(), abs=0.04 if "groups" in names else 0.006)
        if "groups" in names:
            assert not set(groups[train]) & set(groups[val])


@pytest.mark.parametrize("names", [(), ("labels",), ("groups",), ("labels", "groups")])
def test_folds_depend_on_the_seed_only(names: tuple[str, ...]) -> None:
    given = dict(zip(("labels", "groups"), imbalanced(), strict=True))
    settings = {name: given[name] for name in names}
    first, again, other = (folds(3, seed, **settings) for seed in (1, 1, 2))
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a[1], b[1]) for a, b in zip(first, other, strict=True))


def test_folds_refer_to_the_given_samples_only() -> None:
    labels = np.arange(600) % 3
    indices = np.arange(0, 600, 2)
    train, val = fold_indices(indices[::-1], 3, 1, 0, labels)
    assert sorted([*train, *val]) == indices.tolist()
    assert np.bincount(labels[val]).tolist() == [33, 33, 34] or np.bincount(labels[val]).sum() == 100


def test_the_test_split_is_the_same_with_and_without_folds() -> None:
    labels, _ = imbalanced()
    _, _, test = split_indices(600, SPLIT, 4, labels)
    vals = []
    for fold in range(4):
        train, val, same = split_indices(600, SPLIT, 4, labels, num_folds=4, fold=fold)
        assert np.array_equal(test, same)
        assert sorted([*train, *val, *test]) == list(range(600))
        vals.append(val)
    assert sorted([*np.concatenate(vals), *test]) == list(range(600))


def test_folds_divide_existing_val_samples_too() -> None:
    labels, _ = imbalanced()
    _, _, test = split_indices(500, SPLIT, 0, labels[:500], {"val"})
    found = [split_indices(500, SPLIT, 0, labels, {"val"}, num_folds=3, fold=fold, num_val=100) for fold in range(3)]
    assert all(np.array_equal(test, parts[2]) for parts in found)
    assert sorted(np.concatenate([*(parts[1] for parts in found), test])) == list(range(600))


def test_no_group_is_in_two_splits() -> None:
    labels, groups = imbalanced()
    for classes in (None, labels):
        parts = split_indices(600, SPLIT, 0, classes, groups=groups)
        assert sorted(np.concatenate(parts)) == list(range(600))
        names = [set(groups[part]) for part in parts]
        assert not names[0] & names[1] | names[0] & names[2] | names[1] & names[2]
        assert [len(part) / 600 for part in parts] == pytest.approx(SPLIT, abs=0.05)
    assert labels[parts[2]].mean() == pytest.approx(labels.mean(), abs=0.05)


@pytest.mark.parametrize("fraction", [0.1, 0.15, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9, 0.95])
def test_a_fraction_of_groups_is_approximate(fraction: float) -> None:
    groups = np.arange(1000) // 5
    kept, taken = split_off_groups(np.arange(1000), fraction, 0, groups)
    assert sorted([*kept, *taken]) == list(range(1000))
    assert len(taken) == pytest.approx(1000 * fraction, rel=0.11)
    few, one = split_off_groups(np.arange(10), fraction, 0, np.arange(10) // 5)
    assert (len(few), len(one)) == (5, 5)


@pytest.mark.parametrize(
    ("num_folds", "fold", "message"),
    [
        (None, 2, r"^data.fold=2 needs data.num_folds; set it, such as data.num_folds=5$"),
        (1, 0, r"^data.num_folds=1 must be 2 or more, or null; try 5$"),
        (0, 0, r"^data.num_folds=0 must be 2 or more"),
        (5, 5, r"^data.fold=5 is not in 0 … 4 \(data.num_folds=5\); try 0$"),
        (5, -1, r"^data.fold=-1 is not in 0 … 4"),
    ],
)
def test_invalid_settings_are_one_line_errors(num_folds: int | None, fold: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_folds(num_folds, fold)
    with pytest.raises(ValueError, match=message):
        Tabular(num_folds=num_folds, fold=fold)


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        (None, None, r"^data.num_folds=9, but the number of samples is 8; try data.num_folds=8$"),
        ([0, 0, 0, 0, 0, 1, 1, 1], None, r"the number of samples of the smallest class is 3; try data.num_folds=3$"),
        ([0, 0, 0, 0, 0, 0, 0, 1], None, r"the number of samples of the smallest class is 1; add samples$"),
        (None, [0, 0, 1, 1, 2, 2, 3, 3], r"the number of groups is 4; try data.num_folds=4$"),
        ([0, 1] * 4, [0, 0, 0, 0, 1, 1, 1, 1], r"the number of groups is 2; try data.num_folds=2$"),
    ],
)
def test_too_many_folds_are_one_line_errors(labels: list[int] | None, groups: list[int] | None, message: str) -> None:
    given = [None if values is None else np.array(values) for values in (labels, groups)]
    with pytest.raises(ValueError, match=message):
        fold_indices(np.arange(8), 9, 0, 0, *given)


def test_as_many_folds_as_samples_groups_or_folds_of_a_class_are_possible() -> None:
    for given in ({}, {"groups": np.arange(3)}, {"labels": np.zeros(3, np.int64)}):
        parts = [fold_indices(np.arange(3), 3, fold, 0, **given) for fold in range(3)]
        assert sorted(int(val[0]) for _, val in parts) == [0, 1, 2]
        assert all(len(val) == 1 for _, val in parts)
    check_folds(2, 1)
    with pytest.raises(ValueError, match=r"^data.fold=3 is not in 0 … 2"):
        fold_indices(np.arange(3), 3, 3, 0)
    with pytest.raises(ValueError, match=r"the number of groups is 1; add samples$"):
        fold_indices(np.arange(3), 2, 0, 0, groups=np.zeros(3))
    none = np.arange(0)
    with pytest.raises(ValueError, match=r"the number of samples is 0; add samples$"):
        fold_indices(none, 2, 0, 0, groups=none)
    with pytest.raises(ValueError, match=r"^0 group cannot be divided"):
        split_off_groups(none, 0.5, 0, none)


def test_a_rare_class_is_in_one_of_the_splits() -> None:
    labels = np.zeros(60, np.int64)
    labels[:2] = 1
    kept, taken = split_off_groups(np.arange(60), 0.2, 0, np.arange(60) // 2, labels)
    assert sorted([*kept, *taken]) == list(range(60))
    assert {*labels[kept].tolist(), *labels[taken].tolist()} == {0, 1}


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"^data: a fraction of 0.15 of 9 samples cannot be split off: 1 group cannot"):
        split_indices(9, SPLIT, 0, groups=np.zeros(9))
