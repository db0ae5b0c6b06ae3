"""Random splits of samples into train, val and test."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.data import folds
from boltcutter.data.folds import Indices as Indices
from boltcutter.data.streams import Purpose, seed32, stream


def check_split(fractions: tuple[float, float, float]) -> None:
    """Check the fractions of train, val and test; that of test may be 0.

    Raises:
        ValueError: One is not positive, or they do not add up to 1.
    """
    if abs(sum(fractions) - 1) > 1e-6 or min(fractions[:2]) <= 0 or fractions[2] < 0:
        raise ValueError(
            f"data.split={list(fractions)} must be three positive fractions that add up to 1; "
            "try [0.7, 0.15, 0.15], or [0.9, 0.1, 0] without a test split"
        )


def split_indices(
    num_samples: int,
    fractions: tuple[float, float, float],
    seed: int,
    labels: npt.ArrayLike | None = None,
    existing: Collection[str] = (),
    *,
    num_folds: int | None = None,
    fold: int = 0,
    groups: npt.ArrayLike | None = None,
    num_val: int = 0,
) -> tuple[Indices, Indices, Indices]:
    """Split sample indices at random into train, val and test; stratified by class if ``labels`` are given.

    With ``num_folds``, the samples that are not in the test split are divided into folds: one is the val split, the
    others are the train split. The test split is the same as without folds.

    Args:
        num_samples: Number of samples.
        fractions: Fractions of train, val and test, which add up to 1.
        seed: Seed of the split.
        labels: Class index of each sample, shape (num_samples,).
        existing: Those of ``val`` and ``test`` that have samples of their own; they get none of these samples.
        num_folds: Number of folds for cross-validation; None: no folds.
        fold: The fold for validation, from 0.
        groups: Group of each sample, such as the patient, shape (num_samples,). No group is in two splits or folds, so
            the sizes of splits are approximate.
        num_val: Number of val samples that exist already, after the others in ``labels`` and ``groups``. Only folds use
            them.

    Returns:
        Sorted indices of each split.

    Raises:
        ValueError: The fractions do not add up to 1, or there are too few samples.
    """
    check_split(fractions)
    classes = None if labels is None else np.asarray(labels)
    members = None if groups is None else np.asarray(groups)
    train_fraction, val_fraction, test_fraction = fractions
    val_fraction, test_fraction = val_fraction * ("val" not in existing), test_fraction * ("test" not in existing)
    total = train_fraction + val_fraction + test_fraction
    rest, test = split_off(np.arange(num_samples), test_fraction / total, seed, classes, members)
    if num_folds:
        rest = np.concatenate([rest, np.arange(num_samples, num_samples + num_val)])
        train, val = folds.fold_indices(rest, num_folds, fold, seed, classes, members)
    else:
        # Relative to all samples, so that rounding in the first split does not change the size of the second.
        train, val = split_off(rest, val_fraction / total * num_samples / len(rest), seed, classes, members, number=1)
    return train, val, test


def split_off(
    indices: Indices,
    fraction: float,
    seed: int,
    labels: Indices | None = None,
    groups: npt.NDArray[Any] | None = None,
    *,
    number: int = 0,
) -> tuple[Indices, Indices]:
    """Split a random fraction off some samples; stratified by class if ``labels`` are given.

    Args:
        indices: Indices of the samples.
        fraction: Fraction to split off, in [0, 1).
        seed: Seed of the split.
        labels: Class index of every sample that ``indices`` can refer to.
        groups: Group of every sample that ``indices`` can refer to; all samples of a group stay together.
        number: Number of the split, among several of a seed.

    Returns:
        Sorted indices of the remaining samples, and of those that were split off.

    Raises:
        ValueError: There are too few samples or groups.
    """
    if fraction == 0:
        return np.sort(indices), indices[:0]
    # Imported here: not every dataset is split, and scikit-learn with pandas takes 70 MiB and delays the first step.
    from sklearn.model_selection import train_test_split

    stratify = None if labels is None else labels[indices]
    count = max(1, round(fraction * len(indices)))
    key = stream(Purpose.SPLIT, seed, position=number)
    try:
        if groups is not None:
            found: tuple[Indices, Indices] = folds.split_off_groups(indices, fraction, key, groups, labels)
            return found
        remaining, taken = train_test_split(indices, test_size=count, random_state=seed32(key), stratify=stratify)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"data: a fraction of {fraction:.2f} of {len(indices)} samples cannot be split off: {reason.rstrip('.')}; "
            "add samples, or remove rare classes"
        ) from None
    return np.sort(remaining), np.sort(taken)
