"""Folds for cross-validation, and splits that keep groups of samples together; offered as ``folds``."""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.data.streams import Purpose, hash64, seed32, stream

Indices = npt.NDArray[np.int64]

MAX_PARTS = 20  # parts of the groups that are taken together at most
TOLERANCE = 0.1  # relative error of a fraction of groups


def check_folds(num_folds: int | None, fold: int) -> None:
    """Check the settings of a fold.

    Raises:
        ValueError: There are fewer than two folds, no fold of this number, or a fold without a number of folds.
    """
    if num_folds is None:
        if fold:
            raise ValueError(f"data.fold={fold} needs data.num_folds; set it, such as data.num_folds=5")
    elif num_folds < 2:
        raise ValueError(f"data.num_folds={num_folds} must be 2 or more, or null; try 5")
    elif not 0 <= fold < num_folds:
        raise ValueError(f"data.fold={fold} is not in 0 … {num_folds - 1} (data.num_folds={num_folds}); try 0")


def fold_indices(
    indices: Indices,
    num_folds: int,
    fold: int,
    seed: int,
    labels: npt.NDArray[Any] | None = None,
    groups: npt.NDArray[Any] | None = None,
) -> tuple[Indices, Indices]:
    """Divide samples at random into folds: one for validation, the others for training.

    ``labels`` and ``groups`` have an entry for every sample that ``indices`` can refer to.

    The folds of a seed are disjoint and contain each sample once. They are stratified by class if ``labels`` are given,
    and no group is in two folds if ``groups`` are given.

    Returns:
        Sorted indices for training and for validation.

    Raises:
        ValueError: There is no such fold, or there are more folds than samples, groups, or samples of a class.
    """
    check_folds(num_folds, fold)
    indices = np.sort(indices)
    labels = None if labels is None else labels[indices]
    key = stream(Purpose.FOLDS, seed)
    groups = None if groups is None else _shuffled_groups(groups[indices], key)
    limits = {"samples": len(indices)}
    if groups is not None:
        limits["groups"] = int(groups.max(initial=-1)) + 1
    if labels is not None:
        limits["samples of the smallest class"] = int(np.unique(labels, return_counts=True)[1].min(initial=len(labels)))
    name = min(limits, key=limits.__getitem__)
    if limits[name] < num_folds:
        remedy = f"try data.num_folds={limits[name]}" if limits[name] > 1 else "add samples"
        raise ValueError(f"data.num_folds={num_folds}, but the number of {name} is {limits[name]}; {remedy}")
    chosen = _parts(len(indices), num_folds, key, labels, groups)[fold]
    return np.delete(indices, chosen), indices[chosen]


def split_off_groups(
    indices: Indices, fraction: float, key: int, groups: npt.NDArray[Any], labels: npt.NDArray[Any] | None = None
) -> tuple[Indices, Indices]:
    """Split about a fraction in (0, 1) of the samples off, with all samples of a group on the same side.

    ``labels`` and ``groups`` have an entry for every sample that ``indices`` can refer to, and ``key`` is the stream of
    the split.

    Returns:
        Sorted indices of the remaining samples, and of those that were split off.

    Raises:
        ValueError: There are too few groups.
    """
    groups = _shuffled_groups(groups[indices], key)
    num_groups = int(groups.max(initial=-1)) + 1
    if num_groups < 2:
        raise ValueError(f"{num_groups} group cannot be divided; at least two are needed")
    # The fewest of the fewest parts, because each one is stratified: 1 of 7 for a fraction of 0.15, 2 of 5 for 0.4.
    for count in range(1, MAX_PARTS):
        num_parts = max(count + 1, round(count / fraction))
        if abs(count / num_parts - fraction) <= TOLERANCE * fraction:
            break
    num_parts = min(num_parts, num_groups)
    count = min(max(1, round(fraction * num_parts)), num_parts - 1)
    parts = _parts(len(indices), num_parts, key, None if labels is None else labels[indices], groups)
    taken = np.concatenate(parts[:count])
    return np.sort(np.delete(indices, taken)), np.sort(indices[taken])


def _shuffled_groups(groups: npt.NDArray[Any], key: int) -> Indices:
    """Number the groups in random order."""
    names, numbers = np.unique(groups, return_inverse=True)
    return np.random.default_rng(key).permutation(len(names))[numbers]


def _parts(
    num_samples: int, num_parts: int, key: int, labels: npt.NDArray[Any] | None, groups: Indices | None
) -> list[Indices]:
    """Positions of the samples in each part."""
    # Imported here: see split_off.
    from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

    splitter: Any
    seed = seed32(hash64(key, 1))  # the groups were shuffled by the key itself
    if groups is not None and labels is not None:
        # Groups are in random order already: with shuffle=True, scikit-learn before 1.8 does not stratify.
        splitter = StratifiedGroupKFold(num_parts)
    elif groups is not None:
        # Without shuffle=True, the order of groups of the same size depends on the CPU's vector instructions.
        splitter = GroupKFold(num_parts, shuffle=True, random_state=seed)
    else:
        splitter = (KFold if labels is None else StratifiedKFold)(num_parts, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # Folds of a smaller class are refused; the number of parts of other splits only follows from their fraction.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        found = splitter.split(np.empty(num_samples), labels, groups)
        return [part.astype(np.int64) for _, part in islice(found, num_parts)]
