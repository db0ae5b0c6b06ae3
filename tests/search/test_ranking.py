from __future__ import annotations

import math
from pathlib import Path

import pytest

from boltcutter_search.ranking import Metrics, has_objectives, pareto_front, rank
from boltcutter_search.results import Result


def trial(number: int, state: str = "complete", **objectives: float) -> Result:
    return Result(number, state, {}, objectives, [], {}, 1.0, Path())


TRIALS = [
    trial(0, loss=0.3, size=1.0),
    trial(1, loss=0.1, size=9.0),
    trial(2, loss=0.2, size=9.0),
    trial(3, loss=0.2, size=5.0),
    trial(4, "pruned", loss=0.0, size=0.0),
    trial(5, "failed"),
    trial(6, loss=math.nan, size=0.0),
    trial(7, loss=0.1, size=9.0),
]
BOTH: Metrics = [("loss", "min"), ("size", "min")]


@pytest.mark.parametrize(
    ("metrics", "numbers"),
    [
        ([("loss", "min")], [1, 7, 2, 3, 0]),
        ([("loss", "max")], [0, 2, 3, 1, 7]),
        (BOTH, [1, 7, 3, 0, 2]),
    ],
)
def test_complete_trials_are_ranked(metrics: Metrics, numbers: list[int]) -> None:
    assert [result.number for result in rank(TRIALS, metrics)] == numbers


def test_the_pareto_front_is_not_dominated() -> None:
    assert [result.number for result in pareto_front(TRIALS, BOTH)] == [1, 7, 3, 0]
    assert [result.number for result in pareto_front(TRIALS, [("loss", "max"), ("size", "min")])] == [0]


def test_a_trial_needs_a_finite_value_of_each_metric() -> None:
    assert [has_objectives(result, BOTH) for result in TRIALS] == [True] * 5 + [False, False, True]
