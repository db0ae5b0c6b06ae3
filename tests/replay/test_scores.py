import numpy as np
import pytest

from boltcutter.replay.scores import FEWEST, HIGH, robust_z, step_scores


def test_a_distance_is_in_units_of_the_spread() -> None:
    values = np.random.default_rng(0).normal(5, 2, 1001)
    scores = robust_z([5, 7, 1, np.nan], values)
    assert scores[:3] == pytest.approx([0, 1, -2], abs=0.15)
    assert scores[3] == np.inf


def test_values_that_do_not_vary_make_none_unusual_that_is_near() -> None:
    assert robust_z([1.01, 2.0], np.ones(20)) == pytest.approx([1, 100])
    assert robust_z([3.0, np.inf], []).tolist() == [0, np.inf]


def test_steps_are_compared_with_those_before() -> None:
    losses = np.array([1.0, 1.1, 0.9, 1.05, 1.0, 1.1, 50.0, 1.0])
    scores = step_scores(losses)
    assert not scores[:FEWEST].any()
    assert (scores >= HIGH).tolist() == [False] * 6 + [True, False]
