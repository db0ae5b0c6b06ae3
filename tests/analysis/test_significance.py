"""False positives and power are those that are stated: 1,000 simulated studies of each kind."""

import math

import numpy as np
import pytest
from scipy import stats

from boltcutter.analysis.significance import (
    ALPHA,
    POWER,
    bootstrap,
    compare_groups,
    compare_pairs,
    holm,
    mcnemar,
    permutation,
    power,
)

STUDIES = 1000
LIMIT = stats.binom.ppf(0.999, STUDIES, ALPHA) / STUDIES  # 7.2% of 1,000 studies: once in 1,000 if the rate is 5%
DIFFERENCES = [0.4, 1.1, -0.2, 0.9, 0.7, 1.4, 0.3, 0.8]


def rejected(p_values: list[float]) -> float:
    assert len(p_values) == STUDIES
    return sum(p <= ALPHA for p in p_values) / STUDIES


def test_pairs_equal_scipy() -> None:
    found = compare_pairs(DIFFERENCES)
    expected = stats.ttest_1samp(DIFFERENCES, 0)
    low, high = expected.confidence_interval()
    assert found.test == "paired t-test"
    assert found.count == 8
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx((low, high), rel=1e-9)
    assert found.effect == pytest.approx(np.mean(DIFFERENCES) / np.std(DIFFERENCES, ddof=1))


def test_groups_equal_scipy() -> None:
    first, second = [0.1, 0.5, 0.3, 0.2], DIFFERENCES
    found = compare_groups(first, second)
    expected = stats.ttest_ind(second, first, equal_var=False)
    low, high = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx((low, high), rel=1e-9)
    assert found.count == 4
    pooled = math.sqrt((7 * np.var(second, ddof=1) + 3 * np.var(first, ddof=1)) / 10)
    assert found.effect == pytest.approx((np.mean(second) - np.mean(first)) / pooled * (1 - 3 / 39))
    one, two = np.var(first, ddof=1), np.var(second, ddof=1)
    assert found.ratio == pytest.approx((one + two) ** 2 / (one**2 + two**2))  # degrees of freedom of equal groups


def test_the_permutation_test_equals_scipy() -> None:
    p, interval = permutation(DIFFERENCES)
    zeros = np.zeros(len(DIFFERENCES))
    expected = stats.permutation_test(
        (DIFFERENCES, zeros), lambda a, b, axis: np.mean(a - b, axis), permutation_type="samples", vectorized=True
    )
    assert p == pytest.approx(expected.pvalue)
    assert interval is not None
    assert interval[0] < np.mean(DIFFERENCES) < interval[1]


def test_the_interval_of_the_permutation_test_excludes_what_the_test_rejects() -> None:
    rng = np.random.default_rng(0)
    for size in (6, 9, 12, 15):
        values = rng.normal(0.7, 1, size)
        for shift in np.linspace(-1, 2, 61):
            p, _ = permutation(values - shift)
            _, interval = permutation(values)
            assert interval is not None
            assert (p > ALPHA) == (interval[0] <= shift <= interval[1])


def test_five_pairs_cannot_be_decided_by_permutation() -> None:
    assert permutation([1.0, 1.1, 0.9, 1.2, 1.0]) == (2 / 2**5, None)
    assert compare_pairs([1.0, 1.1, 0.9, 1.2, 1.0]).p < 1e-4


def test_equal_results_show_nothing() -> None:
    same = compare_pairs([0.0] * 5)
    assert (same.p, same.effect, same.smallest_effect()) == (1.0, None, 0.0)
    constant = compare_pairs([0.1] * 5)  # rounding is no spread
    assert constant.p == 2 / 2**5
    assert constant.needed(0.1) == 6
    nothing = compare_groups([0.5] * 3, [0.5] * 4)
    assert (nothing.p, nothing.count, nothing.error, nothing.freedom, nothing.variance) == (1.0, 3, 0.0, 0.0, 0.0)
    assert compare_groups([0.5] * 3, [0.6] * 3).p == pytest.approx(2 / 20)


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, and never below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_mcnemar_by_hand() -> None:
    assert mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 2**8)
    assert mcnemar(0, 0) == 1.0


def test_power_equals_that_of_the_noncentral_distribution() -> None:
    limit = stats.t.ppf(0.975, 7)
    expected = stats.nct.sf(limit, 7, 2.5) + stats.nct.cdf(-limit, 7, 2.5)
    assert power(2.5, 1.0, 7) == pytest.approx(expected, rel=1e-6)
    assert power(0.0, 1.0, 7) == pytest.approx(ALPHA)


def test_no_number_of_repeated_folds_shows_a_small_effect() -> None:
    found = compare_pairs(DIFFERENCES[:5], num_folds=5)
    plain = compare_pairs(DIFFERENCES[:5])
    assert found.error == pytest.approx(plain.error * math.sqrt((1 / 5 + 1 / 4) / (1 / 5)))
    assert found.needed(0.1 * found.error) is None
    assert plain.needed(0.1 * plain.error) is not None
    assert plain.needed(1000.0) == 2


@pytest.mark.parametrize("count", [2, 3, 5, 9, 10, 14])
def test_seeds_of_equal_methods(count: int) -> None:
    rng = np.random.default_rng(count)
    pairs = rng.normal(0, 1, (STUDIES, count))
    assert rejected([compare_pairs(study).p for study in pairs]) <= LIMIT
    heavy = rng.standard_t(3, (STUDIES, count))
    assert rejected([compare_pairs(study).p for study in heavy]) <= LIMIT


def test_seeds_of_equal_methods_that_are_not_paired() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 1, (STUDIES, 8)), rng.normal(0, 3, (STUDIES, 5))
    assert rejected([compare_groups(a, b).p for a, b in zip(first, second, strict=True)]) <= LIMIT


def cross_validated(shift: float, studies: int, num_folds: int, repeats: int) -> np.ndarray:
    """Differences of the accuracy of two linear classifiers, which see half of the features each, in each fold.

    Args:
        shift: How much better the features of the second classifier are; with 0 the classifiers are equally good.
        studies: Number of data sets.
        num_folds: Number of folds.
        repeats: How often each data set is divided into folds.
    """
    samples, features = 100, 4
    rng = np.random.default_rng(num_folds)
    labels = rng.choice([-1.0, 1.0], (studies, samples))
    inputs = rng.normal(0, 1, (2, studies, samples, features)) + 0.4 * labels[..., None]  # of both classifiers
    inputs[1] += shift * labels[..., None]
    found = []
    for _ in range(repeats):
        folds = rng.permuted(np.tile(np.arange(samples) % num_folds, (studies, 1)), axis=1)
        for fold in range(num_folds):
            train = (folds != fold).astype(float)[..., None]
            gram = np.swapaxes(inputs * train, -1, -2) @ inputs
            weights = np.linalg.solve(gram, np.swapaxes(inputs * train, -1, -2) @ labels[..., None])
            right = (inputs @ weights)[..., 0] * labels > 0
            tested = (folds == fold).sum(axis=1)
            accuracy = (right * (folds == fold)).sum(axis=-1) / tested
            found.append(accuracy[1] - accuracy[0])
    return np.stack(found, axis=1)


@pytest.mark.parametrize(("num_folds", "repeats"), [(5, 1), (5, 3), (10, 1), (10, 3)])
def test_folds_of_equal_methods(num_folds: int, repeats: int) -> None:
    studies = cross_validated(0.0, STUDIES, num_folds, repeats)
    assert rejected([compare_pairs(study, num_folds).p for study in studies]) <= LIMIT


def test_folds_are_no_independent_runs() -> None:
    """What the correction is for: without it, repeated folds of equal methods differ far too often."""
    studies = cross_validated(0.0, STUDIES, 5, 3)
    assert rejected([compare_pairs(study).p for study in studies]) > 2 * LIMIT


def test_samples_of_equal_classifiers() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((2, STUDIES, 300)) < 0.9
    only = [(right[i] & ~right[1 - i]).sum(axis=1) for i in (0, 1)]
    assert rejected([mcnemar(a, b) for a, b in zip(*only, strict=True)]) <= LIMIT


def test_samples_of_equal_regressions() -> None:
    errors = np.random.default_rng(0).exponential(1, (2, STUDIES, 200)) ** 2  # skewed, as squared errors are
    studies = errors[1] - errors[0]
    assert rejected([bootstrap(study, resamples=999)[0] for study in studies]) <= LIMIT


def found_effects(p_values: list[float], differences: list[float]) -> float:
    """Share of the studies that show the effect, in its direction."""
    return sum(p <= ALPHA and d > 0 for p, d in zip(p_values, differences, strict=True)) / len(p_values)


@pytest.mark.parametrize("count", [3, 5, 9, 10, 14])
def test_a_planted_effect_is_found_at_the_stated_power(count: int) -> None:
    from scipy.optimize import brentq

    error = 1 / math.sqrt(count)
    effect = brentq(lambda effect: power(effect, error, count - 1) - POWER, 0, 20)
    studies = np.random.default_rng(count).normal(effect, 1, (STUDIES, count))
    found = [compare_pairs(study) for study in studies]
    share = found_effects([f.p for f in found], [f.difference for f in found])
    assert share == pytest.approx(POWER, abs=0.05)


def test_a_planted_effect_between_groups_is_found_at_the_stated_power() -> None:
    from scipy.optimize import brentq

    variance, count = 1 + 4, 6
    ratio = variance**2 / (1 + 16)
    error, freedom = math.sqrt(variance / count), ratio * (count - 1)
    effect = brentq(lambda effect: power(effect, error, freedom) - POWER, 0, 20)
    rng = np.random.default_rng(1)
    first, second = rng.normal(0, 1, (STUDIES, count)), rng.normal(effect, 2, (STUDIES, count))
    found = [compare_groups(a, b) for a, b in zip(first, second, strict=True)]
    assert found_effects([f.p for f in found], [f.difference for f in found]) == pytest.approx(POWER, abs=0.05)


@pytest.mark.parametrize(("num_folds", "repeats"), [(5, 1), (5, 3), (10, 1), (10, 3)])
def test_a_planted_effect_over_folds_is_found_at_the_stated_power(num_folds: int, repeats: int) -> None:
    """Differences that share training samples: of correlation 1 / num_folds, as Nadeau and Bengio assume."""
    from scipy.optimize import brentq

    count, shared = num_folds * repeats, 1 / num_folds
    rng = np.random.default_rng(count)
    noise = math.sqrt(shared) * rng.normal(0, 1, (STUDIES, 1)) + math.sqrt(1 - shared) * rng.normal(
        0, 1, (STUDIES, count)
    )
    error = math.sqrt((1 - shared) * (1 / count + 1 / (num_folds - 1)))
    effect = brentq(lambda effect: power(effect, error, count - 1) - POWER, 0, 20)
    found = [compare_pairs(study, num_folds) for study in noise + effect]
    assert found_effects([f.p for f in found], [f.difference for f in found]) == pytest.approx(POWER, abs=0.05)


@pytest.mark.parametrize("effect", [0.5, 1.0, 2.0])
def test_the_number_of_seeds_that_is_asked_for_finds_the_effect(effect: float) -> None:
    """The number for the true spread; from a pilot study it varies with the spread that was measured."""
    rng = np.random.default_rng(3)
    pilot = rng.normal(0, 1, 1000)
    pilot = (pilot - pilot.mean()) / pilot.std(ddof=1)
    count = compare_pairs(pilot).needed(effect)
    assert count is not None
    found = [compare_pairs(study) for study in rng.normal(effect, 1, (STUDIES, count))]
    share = found_effects([f.p for f in found], [f.difference for f in found])
    assert POWER - 0.05 <= share <= 0.95  # the last of few seeds adds much
    assert power(effect, 1 / math.sqrt(count - 1), count - 2) < POWER


def test_the_smallest_effect_is_the_one_of_the_stated_power() -> None:
    found = compare_pairs(DIFFERENCES)
    assert power(found.smallest_effect(), found.error, found.freedom) == pytest.approx(POWER)
    needed = found.needed(found.smallest_effect())
    assert needed == found.count


def test_the_bootstrap_and_its_interval_agree() -> None:
    values = np.random.default_rng(0).normal(0.2, 1, 400)
    p, (low, high) = bootstrap(values)
    assert (p, low, high) == (bootstrap(values)[0], *bootstrap(values)[1])
    assert bootstrap(np.abs(values), resamples=99)[0] == 2 / 100
    expected = stats.ttest_1samp(values, 0)
    assert p == pytest.approx(expected.pvalue, abs=0.003)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval()), abs=0.01)
