from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from boltcutter_search import progress as module
from boltcutter_search.progress import Progress, format_values
from boltcutter_search.results import Result
from boltcutter_search.trial import Report

RESULT = Result(0, "complete", {"optimizer.lr": 0.0123456}, {"loss": 0.5}, [], {}, 1.0, Path("0000"))


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the standard output be a terminal of 40 columns and 6 rows that is redrawn immediately."""
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")


def test_a_line_for_each_trial_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress([("loss", "min")], 4, [RESULT, replace(RESULT, number=1, state="running")])
    progress.ended(replace(RESULT, number=1, objectives={"loss": 0.25}))
    progress.ended(replace(RESULT, number=2, state="failed", objectives={}, error="out of memory"))
    progress.refresh({3: [Report(1, {"loss": 0.1})]})  # no terminal
    assert capsys.readouterr().out.splitlines() == [
        "[2/4] trial 1 complete: loss=0.25  optimizer.lr=0.01235",
        "[3/4] trial 2 failed: out of memory  optimizer.lr=0.01235",
    ]
    assert progress.best == 0.25


def test_the_best_value() -> None:
    progress = Progress([("f1", "max")], 9)
    assert progress.best is None
    for value in (0.1, 0.9, 0.5):
        progress.ended(replace(RESULT, objectives={"f1": value}))
    progress.ended(replace(RESULT, state="pruned", objectives={"f1": 1.0}))
    assert progress.best == 0.9


def test_the_table_is_redrawn_in_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    progress = Progress([("loss", "min")], 4)
    progress.began(1, {"optimizer.lr": 0.001})
    progress.refresh({1: []})
    first = capsys.readouterr().out
    assert first.startswith("0 of 4 trials ended, 0:00\n")
    assert "1  starting  optimizer.lr=0.001" in first
    progress.ended(RESULT)
    progress.refresh({1: [Report(1, {"loss": 2.0}), Report(2, {"loss": 1.5})]})
    second = capsys.readouterr().out
    assert second.startswith(f"\x1b[{first.count(chr(10))}A\x1b[J[1/4] trial 0 complete")
    assert "1 of 4 trials ended (1 complete)" in second
    assert "loss=1.5 after 2 validations" in second


def test_the_table_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    progress = Progress([("loss", "min")], 99)
    for number in range(50):
        progress.began(number, {"model.hidden_sizes": "[1024, 1024, 1024, 1024]"})
    progress.refresh({number: [] for number in range(50)})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) == 39


def test_values_on_one_line() -> None:
    assert format_values({"a": 1e-7 / 3, "b": "[64]", "c": 3}) == "a=3.333e-08 b=[64] c=3"
