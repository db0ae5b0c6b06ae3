from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import require

from boltcutter.search.trial import Trial, read_reports

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
from boltcutter.search.ray_trial import INTERRUPTED, TrialProcess, read_facts, write_facts  # noqa: E402

MakeTrial = Callable[..., Trial]


def start(make_trial: MakeTrial, files: Path, do: str, *, replays: bool = False, decides: bool = True) -> TrialProcess:
    """A worker of a trial, as Ray Tune would make it."""
    process = TrialProcess.__new__(TrialProcess)
    process._trial_info = None
    config = {"number": 0, "replays": replays, "do": do}
    process.setup(config, make_trial=make_trial, files=str(files), population=False, decides=decides)
    return process


def reports(process: TrialProcess) -> tuple[list[float], dict[str, Any]]:
    """The losses that a worker reports, of which it may repeat one when it continues, and its last result."""
    losses: dict[int, float] = {}
    while not (result := process.step()).get("done"):
        facts = json.loads(result["report"])
        losses |= {step: metrics["loss"] for step, metrics in facts["reports"]}
        assert facts["values"] == process._values
        assert result["loss"] == losses[facts["reports"][-1][0]]
    return list(losses.values()), result


def test_facts_of_a_trial(tmp_path: Path) -> None:
    assert read_facts(tmp_path, "a") is None
    write_facts(tmp_path, "a", {"number": 3, "replays": False, "optimizer.lr": 0.1})
    assert read_facts(tmp_path, "a") == {"number": 3, "replays": False}


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize(
    ("do", "losses", "state", "error"),
    [
        ("3 2 1", [3, 2, 1], "complete", ""),
        ("3 kill 2", [3, 2], "complete", ""),
        ("3 fail", [3], "failed", "optimizer.lr=9: too large"),
        ("kill kill kill kill", [], "failed", "killed by SIGKILL"),
    ],
)
def test_a_trial_ends(
    make_trial: MakeTrial, tmp_path: Path, do: str, losses: list[float], state: str, error: str, decides: bool
) -> None:
    process = start(make_trial, tmp_path, do, decides=decides)
    found, last = reports(process)
    assert (found, last["state"], last["error"]) == (losses, state, error)
    process.cleanup()
    assert not process._trial.is_alive()


def test_reports_that_nothing_decides_on_are_gathered(make_trial: MakeTrial, tmp_path: Path) -> None:
    process = start(make_trial, tmp_path, "3 2 1", decides=False)
    assert [step for step, _ in json.loads(process.step()["report"])["reports"]] == [1, 2, 3]
    assert process.step()["state"] == "complete"
    process.cleanup()


def test_an_interrupted_trial_reports_again_what_it_did(make_trial: MakeTrial, tmp_path: Path) -> None:
    process = start(make_trial, tmp_path, "3 2 1")
    process.step()
    process.step()
    (tmp_path / INTERRUPTED).touch()
    process.cleanup()
    assert not process._trial.is_alive()
    (tmp_path / INTERRUPTED).unlink()
    assert reports(start(make_trial, tmp_path, "3 2 1"))[0] == [3, 2, 1]
    assert reports(start(make_trial, tmp_path, "3 2 1", replays=True))[0] == [3, 2, 1]


def test_a_trial_that_the_scheduler_stops_completes(make_trial: MakeTrial, tmp_path: Path) -> None:
    process = start(make_trial, tmp_path, "3 2 1")
    process.step()
    process.cleanup()
    assert process._trial.finish() == ("pruned", "")


def test_without_a_scheduler_training_does_not_wait_for_ray(make_trial: MakeTrial, tmp_path: Path) -> None:
    process = start(make_trial, tmp_path, "3 2", decides=False)
    process.step()
    end = time.monotonic() + 30
    while len(read_reports(process._trial.folder, "loss")) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert [report.metrics["loss"] for report in read_reports(process._trial.folder, "loss")] == [3, 2]
    process.cleanup()
