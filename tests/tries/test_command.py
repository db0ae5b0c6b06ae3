from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.extend import NegativeResult
from boltcutter.project import Project
from boltcutter.tries import listing
from boltcutter.tries.command import UNDECIDED, try_command


def ask_plain(project: Project, *arguments: str) -> tuple[int, dict[str, Any]]:
    try:
        return 0, try_command(project, [*arguments])
    except NegativeResult as end:
        return int(end.code or 0), end.result


def started(runs: Path) -> list[str]:
    return [line for file in runs.glob("tries/*/started.txt") for line in file.read_text().split()]


def test_a_change_is_accepted(ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = ask("optimizer.lr=0.05")
    assert (status, result["verdict"], result["pairs"], result["runs"]) == (0, "accepted", 5, 10)
    assert 0.04 < result["low"] < result["difference"] < result["high"] < 0.06
    assert [pair["seed"] for pair in result["all_pairs"]] == [0, 1, 2, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("pair ") for line in lines) == 5
    assert next(line for line in lines if line.startswith("pair 4 of ≤ 12")).endswith("no verdict before pair 5")
    again, same = ask("optimizer.lr=0.05")  # nothing runs twice
    assert (again, same["verdict"], len(started(tmp_path / "runs"))) == (0, "accepted", 10)
    assert len((tmp_path / "runs" / "tries.jsonl").read_text().splitlines()) == 1


def test_a_change_is_rejected(ask) -> None:
    status, result = ask("optimizer.lr=0.001")
    assert (status, result["verdict"]) == (1, "rejected")
    assert result["high"] < 0.01


@pytest.mark.slow
def test_what_cannot_be_told_is_undecided_and_asked_again_on_fresh_seeds(ask, tmp_path: Path) -> None:
    arguments = ("optimizer.lr=0.0012", "effect=0.0024", "budget=5")
    status, result = ask(*arguments)
    assert (status, result["verdict"], result["pairs"]) == (UNDECIDED, "undecided", 5)
    assert ask(*arguments)[1]["id"] == result["id"]  # the budget is fixed before
    _, second = ask(*arguments, "--again")
    assert second["askings"] == 2
    assert not {*second["seeds"]} & {*result["seeds"]}
    assert any("10 of 100" in line for line in second["explanation"])
    _, larger = ask("optimizer.lr=0.0012", "effect=0.0024", "budget=6")
    assert larger["askings"] == 3
    assert larger["seeds"][0] == 10


@pytest.mark.slow
def test_smaller_is_better_where_the_metric_says_so(ask) -> None:
    assert ask("optimizer.lr=0.05", "metric=val/loss")[0] == 0  # the loss is lower
    status, result = ask("optimizer.lr=0.05", "metric=val/loss", "mode=max")
    assert (status, result["verdict"]) == (1, "rejected")


def test_an_effect_may_be_relative(ask) -> None:
    _, result = ask("optimizer.lr=0.05", "effect=1%")
    assert result["effect_size"] == pytest.approx(result["all_pairs"][0]["baseline"]["value"] / 100)


@pytest.mark.slow
def test_failed_and_non_finite_runs_lose_their_pairs(ask) -> None:
    status, result = ask("optimizer.lr=0.05", "tags=[fail:1,nan:2,fail:5,nan:6]", "budget=7")
    assert (status, result["verdict"]) == (UNDECIDED, "undecided")
    lost = {pair["seed"]: pair["change"]["error"] for pair in result["all_pairs"] if pair["change"]["error"]}
    assert {*lost} == {1, 2, 5, 6}
    assert "too large" in lost[1]
    assert "val/accuracy" in lost[2]
    assert any(line.startswith("change: 4 of 7 runs lost") for line in result["explanation"])


def test_a_killed_run_is_resumed(ask, tmp_path: Path) -> None:
    status, _ = ask("optimizer.lr=0.05", "tags=[kill:0,kill:3]")
    assert status == 0
    assert Counter(started(tmp_path / "runs")).most_common(2)[0][1] == 2


def test_the_arguments_of_a_run_are_a_mistake_not_an_outcome(ask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=-1: not positive"):
        ask("optimizer.lr=-1")
    assert started(tmp_path / "runs") == []
    with pytest.raises(ConfigError, match=r"val/accuracies.*did you mean val/accuracy"):
        ask("optimizer.lr=0.05", "metric=val/accuracies")


@pytest.mark.slow
def test_runs_of_the_baseline_are_used_by_several_tries(ask, project: Project, tmp_path: Path) -> None:
    """Outside of a repository code is not identified, so no run of another try is."""
    ask("optimizer.lr=0.05")
    _, result = ask("optimizer.lr=0.06")
    assert result["reused"] == 0


@pytest.mark.slow
def test_runs_at_the_same_time_give_the_same_verdict(ask, tmp_path: Path) -> None:
    _, one = ask("optimizer.lr=0.05", f"runs={tmp_path / 'one'}")
    _, four = ask("optimizer.lr=0.05", "parallel=4", f"runs={tmp_path / 'four'}")
    for key in ("verdict", "pairs", "difference", "low", "high", "seeds"):
        assert one[key] == four[key]
    lines = (tmp_path / "one" / "tries.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["verdict"] == "accepted"


@pytest.mark.slow
def test_what_was_accepted_is_confirmed_together_on_fresh_seeds(ask, project: Project, tmp_path: Path) -> None:
    runs = f"runs={tmp_path / 'runs'}"
    ask("optimizer.lr=0.05", "budget=5", "against=tags=[a]")
    ask("trainer.max_epochs=3", "optimizer.lr=0.06", "budget=5", "effect=0.02", "against=tags=[a]")
    status, result = ask_plain(project, "--confirm", runs)
    assert status == 0
    assert len(result["confirms"]) == 2
    assert result["effect"] == "0.02"
    assert result["seeds"][0] == 5
    assert {"trainer.max_epochs=3", "optimizer.lr=0.06", "tags=[a]"} <= {*result["change_overrides"]}
    listed = listing.tries_command(project, [runs])
    assert [entry["verdict"] for entry in listed] == ["accepted"] * 3
    with pytest.raises(ConfigError, match="nothing was accepted"):
        ask("--confirm")


def test_the_limits_of_an_agent_hold(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_TRY_LIMITS", "30/4")
    status, result = ask("optimizer.lr=0.05")
    assert (status, result["is_stopped"], result["pairs"], result["runs"]) == (UNDECIDED, True, 2, 4)
    assert any("max_runs=4" in line for line in result["explanation"])
    monkeypatch.delenv("BOLTCUTTER_TRY_LIMITS")
    assert ask("optimizer.lr=0.05")[0] == 0
