from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from boltcutter.tries.sign_flips import (
    decide,
    expected_pairs,
    failures_not_excluded,
    first_look,
    first_positive_look,
    lower_bound,
    paired_differences,
    power,
)

SIZES = {
    "normal": np.abs(np.random.default_rng(0).normal(size=12)),
    "heavy tails": np.abs(np.random.default_rng(1).standard_t(1.5, size=12)),
    "ties": np.array([1, 2, 1, 1, 2, 3, 1, 0, 0, 2, 1, 1.0]),
    "alike": np.ones(12),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("budget", range(5, 13))
def test_no_more_than_five_percent_of_all_changes_of_sign_are_accepted(budget: int, sizes: np.ndarray) -> None:
    signs = np.array(list(itertools.product((1, -1), repeat=budget)))
    few = signs[:: max(1, len(signs) // 512)] if budget > 10 else signs
    found = [first_positive_look(row * sizes[:budget], budget) for row in few]
    accepted = sum(map(bool, found)) / len(few)
    if len(few) == len(signs):
        assert accepted <= 0.05
    assert not any(0 < look < first_look() for look in found)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("budget", [11, 12])
def test_the_null_is_exact_for_large_budgets(budget: int, sizes: np.ndarray) -> None:
    rows = itertools.product((1, -1), repeat=budget)
    accepted = sum(bool(first_positive_look(np.array(row) * sizes[:budget], budget)) for row in rows)
    assert 0 < accepted / 2**budget <= 0.05


def test_studies_end_as_often_as_stated() -> None:
    for size, accepted, pairs in ((0.5, 0.41, 10.3), (1.0, 0.87, 7.9), (2.0, 0.99, 5.4)):
        found = power(size, size)
        assert found.accepted == pytest.approx(accepted, abs=0.05)
        assert found.pairs == pytest.approx(pairs, abs=0.3)
        nothing = power(size, 0.0)
        assert nothing.accepted <= 0.07
        assert nothing.rejected == pytest.approx(accepted, abs=0.06)


def test_the_verdict_is_that_of_the_first_pair_that_can_tell() -> None:
    baseline = [0.80, 0.82, 0.79, 0.81, 0.80, 0.83]
    better = [value + gain for value, gain in zip(baseline, (0.02, 0.03, 0.02, 0.025, 0.03, -0.5), strict=True)]
    assert decide(baseline[:4], better[:4], 0.01).word == "continue"
    verdict = decide(baseline, better, 0.01)
    assert (verdict.word, verdict.pairs) == ("accepted", 5)  # what the sixth pair shows does not count
    assert 0 < verdict.low < verdict.difference < verdict.high < 0.05
    same = decide(baseline, baseline, 0.01)
    assert (same.word, same.pairs) == ("rejected", 5)
    noisy = [value + (-1) ** pair * 0.1 for pair, value in enumerate(baseline)]
    assert decide(baseline, noisy, 0.01, budget=6).word == "undecided"


def test_a_better_change_that_improves_by_less_than_the_effect_is_rejected() -> None:
    verdict = decide([1.0] * 5, [1.01, 1.011, 1.012, 1.013, 1.014], effect=0.1)
    assert verdict.word == "rejected"
    assert verdict.low > 0


def test_a_failed_run_loses_its_pair() -> None:
    nan = math.nan
    assert paired_differences([1, 1, nan, nan], [2, nan, 2, nan], 0.5).tolist() == [1, -1, 1, 0]
    assert paired_differences([1], [nan], 0.5).tolist() == [-0.5]
    assert decide([1.0] * 6, [2.0, nan, 2, nan, 2, nan], 0.5, budget=6).word == "undecided"


def test_the_margin_has_to_be_exceeded() -> None:
    baseline, change = [0.0] * 5, [1.0, 1.1, 1.2, 1.05, 1.15]
    assert decide(baseline, change, effect=2.0, margin=0.5, budget=5).word == "rejected"  # by less than 2
    assert decide(baseline, change, effect=1.01, margin=0.5, budget=5).word == "accepted"
    assert decide(baseline, change, effect=1.11, margin=1.1, budget=5).word == "undecided"


def test_bounds_exclude_what_the_test_excludes() -> None:
    values = np.random.default_rng(0).normal(1, 1, 8)
    low = lower_bound(values, 12)
    assert first_positive_look(values - low + 1e-6, 12)
    assert not first_positive_look(values - low - 1e-3, 12)
    assert lower_bound(values[:4], 12) == -math.inf


def test_the_expected_cost_is_between_the_pairs_so_far_and_the_budget() -> None:
    clear = expected_pairs(np.array([1.0, 1.1, 0.9]), 1.0, 12)
    unclear = expected_pairs(np.array([1.0, -0.5, 0.2]), 0.4, 12)
    assert 5 <= clear < 6 < unclear <= 12
    assert failures_not_excluded(5) == pytest.approx(0.45, abs=0.01)


def test_impossible_questions_are_refused() -> None:
    for values in ({"budget": 4}, {"budget": 21}, {"margin": 1.0}):
        with pytest.raises(ValueError, match=next(iter(values))):
            decide([1.0], [1.0], effect=0.5, **values)  # type: ignore[arg-type]


def test_a_change_is_accepted_only_if_another_metric_is_shown_not_to_get_worse() -> None:
    """By the same test, mirrored; each of the two may stop it at its own look."""
    better = [0.02, 0.03, 0.025, 0.02, 0.03, 0.022, 0.028, 0.025]
    zeros = [0.0] * 8

    def word(*changes: float) -> tuple[str, int, bool, bool]:
        found = decide(zeros, better, 0.01, 8, constraints=[(zeros, changes, 0.5)])
        return found.word, found.pairs, found.kept[0].is_shown, found.kept[0].is_broken

    assert word(*[-0.1, 0.1, 0.0, -0.05, 0.1, 0, 0, 0]) == ("accepted", 5, True, False)
    assert word(*[-1.0, -1.1, -0.9, -1.0, -1.2, -1, -1, -1]) == ("rejected", 5, False, True)
    assert word(*[-1.0, 0.1, -0.9, 0.0, -1.2, 0.2, -0.4, -0.6]) == ("undecided", 8, False, False)
    later = word(*[0.0, 0.1, -0.7, 0.0, 0.1, 0.0, 0.1, 0.0])
    assert later[0] == "accepted"
    assert later[1] > 5
    lost = decide(zeros, [*better[:7], math.nan], 0.01, 8, constraints=[(zeros, [*zeros[:7], math.nan], 0.5)])
    assert lost.word == "accepted"
