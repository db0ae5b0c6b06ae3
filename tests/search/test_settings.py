from __future__ import annotations

from typing import Any

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.search.settings import Search, objectives

CFG = {"callback": {"checkpoint": {"monitor": "val/loss", "mode": "min"}, "progress": {"x": 1}, "ema": None}}


@pytest.mark.parametrize(
    ("settings", "setting", "remedy"),
    [
        ({"num_trials": 0}, "search.num_trials=0", "try 1"),
        ({"max_parallel": -1}, "search.max_parallel=-1", "try 1"),
        ({"cpus": 0.0}, "search.cpus=0", "try search.cpus=1"),
        ({"seeds": 1}, "search.seeds=1", "try 2"),
        ({"seeds": 0, "folds": 5}, "search.seeds=0", "try 1"),
        ({"gpus": 1.5}, "search.gpus=1.5", "try 1"),
        ({"gpus": -1}, "search.cpus=None, search.gpus=-1", "try search.cpus=1"),
        ({"folds": 1}, "search.folds=1", "try 2"),
        ({"max_time": "8w"}, "search.max_time=8w", "try 8:00:00"),
        ({"max_time": "1:2"}, "search.max_time=1:2", "try 8:00:00"),
    ],
)
def test_mistakes(settings: dict[str, Any], setting: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"^{setting}.*{remedy}$"):
        Search(**settings)


def test_time_limit() -> None:
    assert Search(max_time="1:02:03").time_limit == 3723
    assert [Search(max_time=text).time_limit for text in ("90s", "30m", "8h", "2d")] == [90, 1800, 28800, 172800]
    assert Search().time_limit is None


def test_given_values_combine_grids_seeds_and_folds() -> None:
    assert Search().fixed(3) == [{}]
    assert Search(seeds=2).fixed(3) == [{"seed": 3}, {"seed": 4}]
    assert Search(folds=2, space={"a": "grid(x, y)"}).fixed(3) == [
        {"a": "x", "data.num_folds": 2, "data.fold": 0},
        {"a": "x", "data.num_folds": 2, "data.fold": 1},
        {"a": "y", "data.num_folds": 2, "data.fold": 0},
        {"a": "y", "data.num_folds": 2, "data.fold": 1},
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("val/loss", "min")]),
        ({"mode": "max"}, [("val/loss", "max")]),
        ({"metric": "val/loss"}, [("val/loss", "min")]),
        ({"metric": "val/f1", "mode": "max"}, [("val/f1", "max")]),
        ({"metric": ["val/f1", "val/loss"], "mode": ["max", "min"]}, [("val/f1", "max"), ("val/loss", "min")]),
    ],
)
def test_the_metric_is_by_default_that_of_the_best_checkpoint(
    settings: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert objectives(Search(**settings), CFG) == expected


@pytest.mark.parametrize(
    ("settings", "cfg", "problem"),
    [
        ({}, {}, "search.metric=null: no callback monitors a metric; set search.metric="),
        ({"metric": "val/f1"}, CFG, "search.mode: not set for val/f1; set search.mode="),
        ({"metric": ["a", "b"], "mode": ["min"]}, CFG, "search.mode=['min']: expected one for each of 2 metrics"),
    ],
)
def test_metrics_without_a_mode(settings: dict[str, Any], cfg: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[").replace("]", r"\]")):
        objectives(Search(**settings), cfg)
