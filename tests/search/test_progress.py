from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from boltcutter_search.progress import Progress
from boltcutter_search.results import Result

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
