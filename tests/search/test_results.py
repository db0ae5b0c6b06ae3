from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boltcutter.search.results import (
    Metrics,
    Progress,
    Result,
    count_states,
    format_trials,
    format_value,
    pareto_front,
    rank,
)

METRICS: Metrics = [("val/loss", "min")]
BOTH: Metrics = [("loss", "min"), ("size", "min")]


def trial(number: int, state: str, loss: float | None = None, error: str = "", **values: Any) -> Result:
    objectives = {} if loss is None else {"val/loss": loss}
    return Result(number, state, values, objectives, [], {}, 65.0, Path(), error)


def test_the_best_trials_come_first() -> None:
    results = [
        trial(0, "complete", 0.30000001, lr=0.001230000001, compile=True),
        trial(1, "pruned", 0.1, lr=0.1),
        trial(2, "complete", 0.2, lr=1e-5, momentum=0.9),
        trial(3, "failed", None, "\nRuntimeError: out of memory\nTraceback …", lr=0.1),
        trial(4, "running", None, lr=0.1),
    ]
    assert format_trials(results, METRICS).splitlines() == [
        "trial  val/loss  lr       momentum  compile  time",
        "0002   0.2       1e-5     0.9       –        1 min 5 s",
        "0000   0.3       0.00123  –         true     1 min 5 s",
        "5 trials: 2 complete, 1 pruned, 1 failed, 1 running",
        "trial 0003 failed: RuntimeError: out of memory",
    ]


def test_long_tables_are_cut() -> None:
    results = [trial(n, "complete", float(n)) for n in range(5)] + [trial(n, "failed") for n in (5, 6)]
    lines = format_trials(results, METRICS, limit=1).splitlines()
    assert lines[2:] == [
        "… and 4 more",
        "7 trials: 5 complete, 2 failed",
        "trial 0005 failed: unknown error",
        "… and 1 more failed",
    ]


def test_the_pareto_front_is_marked() -> None:
    results = [
        Result(n, "complete", {}, {"loss": loss, "size": size}, [], {}, 1.0, Path())
        for n, (loss, size) in enumerate([(0.1, 9.0), (0.2, 5.0), (0.3, 7.0)])
    ]
    lines = format_trials(results, [("loss", "min"), ("size", "min")]).splitlines()
    assert [line.split()[0] for line in lines] == ["trial", "0000*", "0001*", "0002", "*", "3"]


def test_a_search_in_its_beginning() -> None:
    assert format_trials([], METRICS) == "0 trials"
    assert format_trials([trial(0, "running"), trial(1, "pruned", 0.5)], METRICS) == "2 trials: 1 pruned, 1 running"
    assert count_states([trial(0, "running")]) == {"running": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001230000001, "0.00123"),
        (1e-5, "1e-5"),
        (12.0, "12"),
        (0.98318444, "0.98318"),
        (123456.0, "1.2346e5"),
        (64, "64"),
        (True, "true"),
        ("sgd", "sgd"),
        (None, "–"),
        (math.nan, "nan"),
    ],
)
def test_values_are_short(value: Any, text: str) -> None:
    assert format_value(value) == text


def ranked(number: int, state: str = "complete", **objectives: float) -> Result:
    return Result(number, state, {}, objectives, [], {}, 1.0, Path())


TRIALS = [
    ranked(0, loss=0.3, size=1.0),
    ranked(1, loss=0.1, size=9.0),
    ranked(2, loss=0.2, size=9.0),
    ranked(3, loss=0.2, size=5.0),
    ranked(4, "pruned", loss=0.0, size=0.0),
    ranked(5, "failed"),
    ranked(6, loss=math.nan, size=0.0),
    ranked(7, loss=0.1, size=9.0),
]


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
    assert pareto_front(TRIALS, BOTH) == {0, 1, 3, 7}
    assert pareto_front(TRIALS, [("loss", "max"), ("size", "min")]) == {0}
    assert pareto_front(TRIALS, [("loss", "min")]) == set()


RESULT = Result(0, "complete", {"optimizer.lr": 0.0123456}, {"loss": 0.5}, [], {}, 1.0, Path("0000"))


def test_a_line_for_each_trial_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress([("loss", "min")], 4, [RESULT, replace(RESULT, number=1, state="running")])
    progress.ended(replace(RESULT, number=1, objectives={"loss": 0.25}, values={"a": 1e-7 / 3, "b": "[64]", "c": 3}))
    progress.ended(replace(RESULT, number=2, state="failed", objectives={}, error="out of memory"))
    assert capsys.readouterr().out.splitlines() == [
        "[2/4] trial 1 complete: loss=0.25  a=3.3333e-8 b=[64] c=3",
        "[3/4] trial 2 failed: out of memory  optimizer.lr=0.012346",
    ]
    assert progress.best == 0.25


def test_the_best_value() -> None:
    progress = Progress([("f1", "max")], 9)
    assert progress.best is None
    for value in (0.1, 0.9, 0.5):
        progress.ended(replace(RESULT, objectives={"f1": value}))
    progress.ended(replace(RESULT, state="pruned", objectives={"f1": 1.0}))
    assert progress.best == 0.9
