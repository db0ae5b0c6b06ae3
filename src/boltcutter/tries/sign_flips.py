"""Decide after every pair of runs whether a change is better than its baseline, with at most 5% false acceptance.

A pair is one run of the baseline and one of the change with the same seed, split and order of samples. Its difference
is change minus baseline, with the sign that makes more better. If the change does nothing, each difference is as likely
to have the other sign, whatever the distribution over seeds is. So all changes of sign of the differences seen so far
are equally likely, and can be counted. Of these ``2**k``, the test spends a share that grows with every look ``k`` to
``alpha`` at the end of the budget: those with the largest sums are taken out, and the change is accepted once the signs
that were seen are among them. The shares depend on the number of the look and on the sizes of the differences, never
on their signs, which is why looking after every pair costs nothing beyond ``alpha``.

Sources: Fisher, The Design of Experiments, 1935 (changes of sign). Lan and DeMets, Discrete Sequential Boundaries for
Clinical Trials, Biometrika 70, 1983 (error that is spent look by look). Mehta, Patel, Senchaudhuri and Weerahandi,
Exact Permutational Tests for Group Sequential Clinical Trials, Biometrics 50, 1994 (both together).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Word = Literal["accepted", "rejected", "undecided", "continue"]

ALPHA = 0.05  # of each of the two errors: accepting what is no better, rejecting what is better by the effect
BUDGET, MAX_BUDGET = 12, 20  # pairs by default, and at most: all changes of sign of 20 are a million
# Ratio of the mean size of the differences to the spread of their sizes, from which they count as alike. The value is
# ours: of 1.5, 2 and 2.5 it accepts effects of one standard deviation most often.
ALIKE = 1.5
TOLERANCE = 1e-9  # below which sums of differences are equal
STUDIES = 400  # that are simulated for a forecast


@dataclass(frozen=True)
class Kept:
    """Whether another metric is not worse by more than a tolerance.

    Args:
        is_shown: It is not.
        is_broken: It is.
        difference, low, high: Mean and interval of its differences, as of a ``Verdict``.
    """

    is_shown: bool
    is_broken: bool
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """What the pairs so far show.

    Args:
        word: ``undecided`` if the budget is spent, ``continue`` before.
        pairs: Number of pairs that it is based on; later ones do not count.
        difference: Mean of the differences.
        low: The improvement is above this, and below ``high``. Each end is wrong in at most 5% of studies, whenever
            these end; infinite as long as there is none.
        kept: The metrics that must not get worse, in their order.
    """

    word: Word
    pairs: int
    difference: float
    low: float
    high: float
    kept: tuple[Kept, ...] = ()


def first_look(alpha: float = ALPHA) -> int:
    """The fewest pairs that can accept, as all of one sign are then rarer than ``alpha``: 5 for 5%, 6 for 2.5%."""
    return math.ceil(-math.log2(alpha))


def spent_share(look: int, sizes: Array, budget: int, alpha: float = ALPHA) -> float:
    """The share of all changes of sign that may be taken out up to a look, from 1.

    It begins with one change of sign, and grows evenly to ``alpha`` at the end of the budget. It begins at the first
    look if the differences are of like size, as those of a clear effect are, and one pair later otherwise.
    """
    if look >= budget:
        return alpha
    spread = float(np.std(sizes, ddof=1)) if look > 1 else math.inf
    start = first_look(alpha) + (float(np.mean(sizes)) < ALIKE * spread)
    if look < start:
        return 0.0
    return 2.0**-start + (alpha - 2.0**-start) * (look - start) / (budget - start)


def first_positive_look(differences: Sequence[float] | Array, budget: int, alpha: float = ALPHA) -> int:
    """The number of pairs after which differences are shown to be positive; 0 if they are not, or not yet."""
    values = np.asarray(differences, np.float64)[:budget]
    sums, taken = np.zeros(1), 0  # of the changes of sign that are still in; the first of them is that of the data
    for look in range(1, len(values) + 1):
        value, sizes = values[look - 1], np.abs(values[:look])
        sums = (sums[:, None] + np.array([value, -value])).ravel()
        taken *= 2
        left = math.floor(spent_share(look, sizes, budget, alpha) * 2**look + TOLERANCE) - taken
        if left <= 0:
            continue
        limit = np.partition(sums, -left - 1)[-left - 1]  # the largest sum that has to stay in
        out = sums > limit + TOLERANCE * sizes.sum()  # so equal sums stay in together
        if out[0]:
            return look
        taken += int(out.sum())
        sums = sums[~out]
    return 0


def paired_differences(baseline: Sequence[float], change: Sequence[float], effect: float) -> Array:
    """Change minus baseline of each pair, where a failed run (NaN) loses.

    It loses by the largest difference of the pairs before, or the effect: its size must not depend on later pairs.
    Without such pairs, a change that fails where it would have been bad would look better than it is.
    """
    found: list[float] = []
    for before, after in zip(baseline, change, strict=True):
        if math.isnan(before) or math.isnan(after):
            sign = math.isnan(before) - math.isnan(after)  # 0 if both failed
            found.append(sign * max([effect, *map(abs, found)]))
        else:
            found.append(after - before)
    return np.array(found)


def lower_bound(differences: Array, budget: int, alpha: float = ALPHA) -> float:
    """The largest value that the differences are shown to exceed by now; ``-inf`` if there is none."""
    if len(differences) < min(first_look(alpha), budget):
        return -math.inf
    low = float(differences.min()) - TOLERANCE - 4 * float(np.ptp(differences))
    high = float(differences.mean())
    if not first_positive_look(differences - low, budget, alpha):
        return -math.inf
    for _ in range(30):
        middle = (low + high) / 2
        is_exceeded = first_positive_look(differences - middle, budget, alpha)
        low, high = (middle, high) if is_exceeded else (low, middle)
    return low


def check_budget(budget: int, alpha: float = ALPHA) -> None:
    """Raise ValueError for a budget that can accept nothing, or whose changes of sign are too many to be counted."""
    if not first_look(alpha) <= budget <= MAX_BUDGET:
        raise ValueError(f"budget={budget}: from {first_look(alpha)} to {MAX_BUDGET} pairs; try budget={BUDGET}")


def decide(
    baseline: Sequence[float],
    change: Sequence[float],
    effect: float,
    budget: int = BUDGET,
    margin: float = 0.0,
    alpha: float = ALPHA,
    constraints: Sequence[tuple[Sequence[float], Sequence[float], float]] = (),
) -> Verdict:
    """The verdict after these pairs, in their order; called again after every pair.

    Args:
        baseline: Value of each pair, of which more is better; NaN if its run failed.
        change: The same of the change.
        effect: The smallest improvement worth having, in units of the values. A change is accepted once it is shown to
            be better by more than ``margin``, and rejected once it is shown to improve by less than ``effect``.
        budget: The most pairs, fixed before the first.
        margin: Above 0, the improvement itself has to exceed it, which takes many more pairs.
        alpha: Of each of the two errors.
        constraints: Values of baseline and change in another metric, of which more is better, and the tolerance, above
            0. The change is accepted once it is also shown to be worse by less than that, and rejected once it is shown
            to be worse by more, each by the same test.

    Raises:
        ValueError: The budget is too small or too large, or the effect is not above the margin.
    """
    check_budget(budget, alpha)
    if not margin < effect:
        raise ValueError(f"effect={effect:g} is not above margin={margin:g}; try a smaller margin")
    values = paired_differences(baseline, change, effect)[:budget]
    better = first_positive_look(values - margin, budget, alpha) or budget + 1
    smaller = first_positive_look(effect - values, budget, alpha) or budget + 1
    others = [(paired_differences(first, second, size)[:budget], size) for first, second, size in constraints]
    shown = [first_positive_look(other + size, budget, alpha) or budget + 1 for other, size in others]
    broken = [first_positive_look(-other - size, budget, alpha) or budget + 1 for other, size in others]
    accepted, rejected = max(better, *shown, 0), min(smaller, *broken, budget + 1)
    pairs = min(accepted, rejected, len(values))
    word: Word = "continue" if len(values) < budget else "undecided"
    if min(accepted, rejected) <= budget:
        word = "accepted" if accepted < rejected else "rejected"  # both at once: better, by less than the effect
    kept = tuple(
        Kept(first <= pairs, last <= pairs, *_mean_and_interval(other[:pairs], budget, alpha))
        for (other, _), first, last in zip(others, shown, broken, strict=True)
    )
    return Verdict(word, pairs, *_mean_and_interval(values[:pairs], budget, alpha), kept)


def _mean_and_interval(seen: Array, budget: int, alpha: float) -> tuple[float, float, float]:
    mean = float(seen.mean()) if len(seen) else math.nan
    return mean, lower_bound(seen, budget, alpha), -lower_bound(-seen, budget, alpha)


@dataclass(frozen=True)
class Outlook:
    """How studies end: the shares that accept and reject, and the mean number of their pairs."""

    accepted: float
    rejected: float
    pairs: float


@cache
def power(effect: float, truth: float, budget: int = BUDGET) -> Outlook:
    """How studies end if differences are normal, by simulation.

    Args:
        effect: The effect that is asked for, in standard deviations of the differences.
        truth: Mean of the differences, in the same unit.
        budget: The most pairs.
    """
    noise = np.random.default_rng(0).normal(size=(_num_studies(budget), budget))
    return outlook(noise + truth, effect, budget)


def _num_studies(budget: int) -> int:
    return max(STUDIES >> max(budget - BUDGET, 0), 50)  # as each pair doubles the time of a study


def outlook(studies: Array, effect: float, budget: int) -> Outlook:
    """How studies end, each a row of its differences (studies, budget)."""
    accepted, rejected, pairs = 0, 0, 0
    for values in studies:
        better = first_positive_look(values, budget) or budget + 1
        smaller = first_positive_look((effect - values)[:better], budget) or budget + 1
        accepted += better < smaller
        rejected += smaller <= min(better, budget)
        pairs += min(better, smaller, budget)
    count = len(studies)
    return Outlook(accepted / count, rejected / count, pairs / count)


@cache
def detectable(budget: int = BUDGET, share: float = 0.85) -> tuple[float, float]:
    """An effect in standard deviations that is accepted in at least a share of studies, and the share."""
    for tenths in range(5, 31):
        if (found := power(tenths / 10, tenths / 10, budget).accepted) >= share:
            return tenths / 10, found
    return 3.0, found


def expected_pairs(differences: Array, effect: float, budget: int) -> float:
    """The mean number of pairs in all, if those to come are normal with mean and spread of the pairs so far."""
    rest = budget - len(differences)
    spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else 0.0
    if not rest or not spread:
        return float(max(len(differences), first_look()))
    count = max(_num_studies(budget) // 4, 25)
    noise = np.random.default_rng(0).normal(float(differences.mean()), spread, (count, rest))
    return outlook(np.hstack([np.tile(differences, (count, 1)), noise]), effect, budget).pairs


def failures_not_excluded(pairs: int, alpha: float = ALPHA) -> float:
    """The largest rate of failures with which so many pairs have none in at least 5% of studies."""
    return float(1 - alpha ** (1 / pairs))
