from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.search.trial import Trial
from boltcutter.tries import launched
from boltcutter.tries.pairs import Pairs
from boltcutter.tries.sides import Side, Version

CODE = {"commit": None}


class Cluster:
    """Jobs that end when it is looked at them, the newest first, after as many kills as are wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs, self.submitted, self.cancelled, self.kills = list[Path](), list[str](), list[str](), dict[str, int]()
        self.looked = 0
        for name in ("submit", "state_of", "cancel"):
            monkeypatch.setattr(launched, name, getattr(self, name))
        monkeypatch.setattr(launched, "POLL_SECONDS", 0.0)

    def submit(self, trial: Trial, overrides: tuple[str, ...]) -> None:
        assert overrides == ("launch=slurm",)
        self.submitted.append(trial.folder.name)
        trial.folder.mkdir(parents=True, exist_ok=True)
        self.write(trial.folder, "running")
        self.jobs.append(trial.folder)

    def write(self, folder: Path, reason: str) -> None:
        value = 0.9 if folder.name.endswith("change") else 0.8
        record: dict[str, Any] = {
            "attempts": [{"reason": reason}],
            "metrics": {"val/accuracy": value},
            "config": {"seed": 0},
        }
        (folder / "record.json").write_text(json.dumps(record))

    def state_of(self, folder: Path) -> str:
        if not folder.is_dir():
            return "new"
        if folder not in self.jobs:
            return "complete"
        self.looked += 1
        if folder != self.jobs[-1]:
            return "running"
        if self.kills.get(folder.name, 0) > 0:
            self.kills[folder.name] -= 1
            self.jobs.remove(folder)
            return "killed"
        self.jobs.remove(folder)
        self.write(folder, "completed")
        return "complete"

    def cancel(self, folder: Path) -> None:
        self.cancelled.append(folder.name)


@pytest.fixture
def pairs(project: Project, tmp_path: Path) -> Pairs:
    side = Side("baseline", (), Version(), project, CODE)
    (folder := tmp_path / "runs" / "tries" / "abc").mkdir(parents=True)
    return Pairs(folder, side, side, list(range(12)), "val/accuracy", parallel=10)


class Shown:
    def ended(self, result: object) -> None:
        """Shows nothing."""


def run(pairs: Pairs, should_stop: Callable[[], bool], is_decided: Callable[[], bool]) -> None:
    launched.run_launched(
        pairs, ("launch=slurm",), parallel=10, should_stop=should_stop, is_decided=is_decided, progress=Shown()
    )


def test_five_pairs_start_at_once_and_killed_jobs_are_submitted_again(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.kills = {"abc-02-change": 2}
    is_decided = lambda: len(pairs.complete()) >= 5  # noqa: E731
    run(pairs, is_decided, is_decided)
    assert len({*cluster.submitted[:10]}) == 10
    assert cluster.submitted.count("abc-02-change") == 3
    assert not any(name > "abc-06" for name in cluster.submitted)
    assert not [name for name in cluster.cancelled if name < "abc-06"]


def test_jobs_go_on_after_an_interruption_and_none_is_submitted_twice(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    run(pairs, lambda: cluster.looked > 12, lambda: False)
    assert not cluster.cancelled
    assert "jobs go on" in capsys.readouterr().err
    before = len(cluster.submitted)
    is_decided = lambda: len(again.complete()) >= 5  # noqa: E731
    again = Pairs(pairs.folder, pairs.baseline, pairs.change, pairs.seeds, pairs.metric, parallel=10)
    run(again, is_decided, is_decided)
    assert before <= len(cluster.submitted) == len({*cluster.submitted})


def test_a_job_that_is_refused_is_a_mistake(pairs: Pairs) -> None:
    """By the command itself, which here is a program that refuses the learning rate."""
    asked = pairs.ask(0)
    assert asked
    trial = pairs.make_trial(asked, {})
    trial.folder.mkdir()
    trial.overrides = [*trial.overrides, "optimizer.lr=-1"]
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1: not positive"):
        launched.submit(trial, ["launch=local"])


def test_an_interrupt_of_the_terminal_does_not_reach_a_submission(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "launch"
    program.write_text(f"#!{sys._base_executable} -S\nimport os, sys; sys.exit(f'error: session {{os.getsid(0)}}')\n")  # type: ignore[attr-defined]
    program.chmod(0o755)
    asked = pairs.ask(0)
    assert asked
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match=r"session \d+") as caught:
        launched.submit(pairs.make_trial(asked, {}), ["launch=local"])
    assert str(caught.value) != f"session {os.getsid(0)}"
