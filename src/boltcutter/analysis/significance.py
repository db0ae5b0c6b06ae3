"""Whether one group of results is better than another: differences, intervals, tests, power and sample size.

Intervals have 95% confidence, and differences are those of the second group from the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.data.streams import Purpose, stream

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
Interval = tuple[float, float]

ALPHA, POWER = 0.05, 0.8
CONCLUSIVE_PAIRS = 6  # the fewest whose changes of sign can be as rare as 5%
PERMUTED_PAIRS = 10  # from which a permutation test has nearly the power of the t-test
EXACT_PAIRS = 12  # up to which all changes of sign are counted
RESAMPLES = 9999  # drawn for more pairs, and by the bootstrap
MAX_COUNT = 10_000  # runs of each group, beyond which more of them is no answer


@dataclass(frozen=True)
class Estimate:
    """A difference of two means, and what can be said about it.

    Args:
        count: Number of pairs, or of values of the smaller group.
        interval: Confidence interval of the difference; None if the values admit none.
        p: Probability of a difference at least as large if both are equally good.
        effect: Standardized difference, ``dz`` of pairs or Hedges' ``g``; None without a spread.
        error: Standard error of the difference.
        freedom: Degrees of freedom of Student's t.
        variance, floor: The squared error of ``n`` values is ``variance / n + floor``, as folds share samples.
        ratio: Degrees of freedom for each value beyond the first.
    """

    test: str
    count: int
    difference: float
    interval: Interval | None
    p: float
    effect: float | None
    error: float
    freedom: float
    variance: float
    floor: float = 0.0
    ratio: float = 1.0

    def smallest_effect(self) -> float:
        """The smallest difference that these values show with a probability of 80%."""
        from scipy.optimize import brentq

        return self.error and float(
            self.error * brentq(lambda shift: power(shift, 1.0, self.freedom) - POWER, 0.1, 1000)
        )

    def needed(self, effect: float) -> int | None:
        """Number of values that show a difference of this size with a probability of 80%; None if too many would."""
        if not self.error:
            return CONCLUSIVE_PAIRS
        counts = np.arange(2, MAX_COUNT + 1)
        errors = np.sqrt(self.variance / counts + self.floor)
        enough = np.nonzero(power(abs(effect), errors, self.ratio * (counts - 1)) >= POWER)[0]
        return int(counts[enough[0]]) if len(enough) else None


def compare_pairs(differences: Values, num_folds: int | None = None) -> Estimate:
    """Compare pairs, or folds of a (repeated) cross-validation, by Student's t, or from ten pairs by permutation.

    Differences of folds are correlated, as folds share training samples. The variance of their mean is estimated as
    (1 / n + n_test / n_train) s², where n_test / n_train is 1 / (num_folds - 1).

    Source: Nadeau and Bengio, Inference for the Generalization Error, Machine Learning 52, 2003; for repeated
    cross-validation Bouckaert and Frank, Evaluating the Replicability of Significance Tests, PAKDD 2004.
    """
    values = np.asarray(differences, np.float64)
    count, mean, std = len(values), float(np.mean(values)), _std(values)
    floor = 0.0 if num_folds is None else std**2 / (num_folds - 1)
    error = math.sqrt(std**2 / count + floor)
    if not std or (num_folds is None and count >= PERMUTED_PAIRS):
        test, (p, interval) = "permutation test of pairs", permutation(values)
    else:
        test = "paired t-test" if num_folds is None else "t-test corrected for folds"
        p, interval = _student(mean, error, count - 1)
    return Estimate(test, count, mean, interval, p, mean / std if std else None, error, count - 1, std**2, floor)


def compare_groups(first: Values, second: Values) -> Estimate:
    """Compare independent values, at least two of each, by Welch's t-test.

    Source: Welch, The Generalization of 'Student's' Problem, Biometrika 34, 1947. Hedges, Distribution Theory for
    Glass's Estimator of Effect Size, Journal of Educational Statistics 6, 1981.
    """
    groups = [np.asarray(values, np.float64) for values in (first, second)]
    counts = [len(values) for values in groups]
    variances = [_std(values) ** 2 for values in groups]
    mean = float(np.mean(groups[1]) - np.mean(groups[0]))
    shares = [variance / count for variance, count in zip(variances, counts, strict=True)]
    error, total = math.sqrt(sum(shares)), sum(variances)
    if not error:
        p = 1.0 if not mean else 2 / math.comb(sum(counts), counts[0])  # of all ways to draw the groups
        return Estimate("permutation test", min(counts), mean, None, p, None, 0.0, 0.0, 0.0)
    freedom = sum(shares) ** 2 / sum(share**2 / (n - 1) for share, n in zip(shares, counts, strict=True))
    p, interval = _student(mean, error, freedom)
    within = sum(counts) - 2
    pooled = math.sqrt(sum(v * (n - 1) for v, n in zip(variances, counts, strict=True)) / within)
    effect = mean / pooled * (1 - 3 / (4 * within - 1))
    ratio = total**2 / sum(variance**2 for variance in variances)
    return Estimate("Welch's t-test", min(counts), mean, interval, p, effect, error, freedom, total, ratio=ratio)


def permutation(differences: Values) -> tuple[float, Interval | None]:
    """The p value of paired differences if each could have had the other sign, and the interval that belongs to it.

    Its ends are means of subsets: changing the signs of a subset, after ``m`` is subtracted, raises the mean if the
    mean of the subset is below ``m``. So it excludes 0 exactly if p is at most 0.05. Fewer than six pairs have none.

    Source: Fisher, The Design of Experiments, 1935. Hartigan, Using Subsample Values as Typical Values, Journal of the
    American Statistical Association 64, 1969.
    """
    values = np.asarray(differences, np.float64)
    means = np.sort(_subsets(len(values)) @ values)
    rounding = 1e-12 * float(np.abs(values).max())
    tail = 1 + min(int(np.sum(means <= rounding)), int(np.sum(means >= -rounding)))
    outside = math.floor(ALPHA / 2 * (len(means) + 1))
    interval = (float(means[outside - 1]), float(means[-outside])) if outside else None
    return min(1.0, 2 * tail / (len(means) + 1)), interval


@cache
def _subsets(count: int) -> Array:
    """Weights, shape (S, count), that average each subset of values, or the same random ones if there are too many."""
    if count <= EXACT_PAIRS:
        chosen = np.arange(1, 2**count)[:, None] >> np.arange(count) & 1
    else:
        chosen = np.random.default_rng(stream(Purpose.BOOTSTRAP, 0, position=1)).integers(0, 2, (RESAMPLES, count))
        chosen = chosen[chosen.any(axis=1)]
    return np.asarray(chosen / chosen.sum(axis=1, keepdims=True), np.float64)


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact p value of the numbers of samples that only one of two classifiers has right.

    Source: McNemar, Note on the Sampling Error of the Difference between Correlated Proportions, Psychometrika 12,
    1947. Dietterich, Approximate Statistical Tests for Comparing Supervised Classification Learning Algorithms, Neural
    Computation 10, 1998.
    """
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0


def bootstrap(differences: Values, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, Interval]:
    """The p value of a mean difference per sample, and its interval, both of the same bootstrap of the samples.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 15.
    """
    values = np.asarray(differences, np.float64)
    rng = np.random.default_rng(stream(Purpose.BOOTSTRAP, seed))
    size = max(1, 10_000_000 // len(values))  # resamples at a time
    drawn = (rng.integers(0, len(values), (min(size, resamples - k), len(values))) for k in range(0, resamples, size))
    means = np.concatenate([values[indices].mean(axis=1) for indices in drawn])
    tail = 1 + min(int(np.sum(means <= 0)), int(np.sum(means >= 0)))
    low, high = np.quantile(means, (ALPHA / 2, 1 - ALPHA / 2))
    return min(1.0, 2 * tail / (resamples + 1)), (float(low), float(high))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p values for the number of comparisons, so that at most 5% of studies have any false decision.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(values)
    raised = np.arange(len(values), 0, -1) * np.asarray(values, np.float64)[order]
    found = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(found[place]) for place in np.argsort(order)]


def power(effect: Any, error: Any, freedom: Any) -> Any:
    """Probability that a two-sided t-test shows a true difference, given its standard error and degrees of freedom."""
    from scipy.special import nctdtr, stdtrit

    limit, shift = stdtrit(freedom, 1 - ALPHA / 2), effect / error
    below, opposite = (np.nan_to_num(nctdtr(freedom, shift, sign * limit)) for sign in (1, -1))  # NaN stands for 0
    return 1 - below + opposite


def _student(mean: float, error: float, freedom: float) -> tuple[float, Interval]:
    """The p value and the interval of a mean by Student's t."""
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(freedom, 1 - ALPHA / 2)) * error
    return float(2 * stdtr(freedom, -abs(mean) / error)), (mean - half, mean + half)


def _std(values: Array) -> float:
    """Sample standard deviation; exactly 0 if the values differ by rounding only."""
    found = float(np.std(values, ddof=1))
    return found if found > 1e-12 * float(np.abs(values).max()) else 0.0
