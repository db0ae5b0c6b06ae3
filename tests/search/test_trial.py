from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from boltcutter.search import trial as module
from boltcutter.search.trial import Report, Sampled, Trial, last_error, read_reports, trial_overrides

MakeTrial = Callable[..., Trial]


def start(make_trial: MakeTrial, do: str) -> Trial:
    trial = make_trial(Sampled(0, {"do": do}), {})
    assert trial.start()
    return trial


def losses(trial: Trial) -> list[float]:
    """Answer all reports until the end, and return the losses."""
    while trial.receive():
        trial.answer("continue")
    return [report.metrics["loss"] for report in trial.reports]


def test_values_become_overrides() -> None:
    values = {"a": 0.1, "b": 3, "c": "[64, 32]", "d": "null", "e": 1e-7}
    assert trial_overrides(values) == ["a=0.1", "b=3", "c=[64, 32]", "d=null", "e=1e-07"]


def test_a_trial_reports_and_ends(make_trial: MakeTrial) -> None:
    trial = start(make_trial, "3 2 1")
    assert losses(trial) == [3, 2, 1]
    assert trial.finish() == ("complete", "")
    assert not trial.start()  # it is complete


def test_a_trial_waits_for_an_answer_and_stops(make_trial: MakeTrial) -> None:
    trial = start(make_trial, "3 2 1")
    assert trial.receive() == Report(1, {"loss": 3.0})
    assert trial.is_alive()
    trial.answer("stop")
    assert trial.receive() is None
    assert trial.finish() == ("pruned", "")


def test_a_failure_is_the_error_that_was_printed(make_trial: MakeTrial) -> None:
    trial = start(make_trial, "3 fail")
    assert losses(trial) == [3]
    assert trial.finish() == ("failed", "optimizer.lr=9: too large")


@pytest.mark.parametrize("fault", ["kill", "killed-while-it-writes", "killed-but-for-a-child"])
def test_a_trial_that_was_killed_continues(make_trial: MakeTrial, fault: str) -> None:
    trial = start(make_trial, f"3 {fault} 2 {fault} 1")
    descriptors = len(os.listdir("/proc/self/fd"))
    for expected in ([3], [3, 2], [3, 2, 1]):
        begin = time.monotonic()
        assert losses(trial) == expected
        assert time.monotonic() < begin + 10
        state, error = trial.finish()
        if len(expected) < 3:
            assert (state, error) == ("running", "killed by SIGKILL")
            assert trial.restart()
    assert state == "complete"
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    if fault == "killed-but-for-a-child":
        os.kill(int((trial.folder / "child").read_text()), signal.SIGKILL)


def test_a_trial_that_is_always_killed_fails(make_trial: MakeTrial) -> None:
    trial = start(make_trial, "kill " * 9)
    for _ in range(module.MAX_RESTARTS):
        assert losses(trial) == []
        assert trial.finish() == ("running", "killed by SIGKILL")
        assert trial.restart()
    assert losses(trial) == []
    trial.finish()
    assert not trial.restart()


def test_an_interrupted_trial_continues_in_another_process(make_trial: MakeTrial) -> None:
    trial = start(make_trial, "3 2")
    trial.receive()
    trial.end()
    assert not trial.is_alive()
    assert trial.finish() == ("running", "")
    again = make_trial(Sampled(0, {"do": ""}), {})
    assert again.reports == trial.reports
    assert again.start()
    assert losses(again) == [3, 2]
    assert again.finish() == ("complete", "")


def test_a_trial_that_does_not_save_in_time_is_killed(make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_TIMEOUT", 0.3)
    trial = start(make_trial, "3 hang")
    trial.receive()
    trial.answer("continue")
    time.sleep(0.2)
    trial.end()
    assert not trial.is_alive()


def test_a_trial_starts_once_an_earlier_process_has_ended(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def is_alive() -> bool:
        looks.append(1)
        return len(looks) < 3

    monkeypatch.setattr(module.lease, "read_holder", lambda folder: SimpleNamespace(is_alive=is_alive))
    trial = start(make_trial, "")
    assert len(looks) == 3
    assert losses(trial) == []
    trial.finish()


def test_a_trial_in_a_job_is_none_of_its_processes(make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "BOLTCUTTER_REQUEUE"):
        monkeypatch.setenv(name, "1")
    trial = start(make_trial, "1")
    trial.receive()
    variables = Path(f"/proc/{trial._process.pid}/environ").read_bytes()  # type: ignore[union-attr]
    trial.end()
    assert b"BOLTCUTTER_TRIAL_FD" in variables
    assert b"SLURM_" not in variables
    assert b"REQUEUE" not in variables


def test_reports_of_a_run(tmp_path: Path) -> None:
    assert read_reports(tmp_path, "loss") == []
    (tmp_path / "metrics.csv").write_text("step,loss,lr\n8,3.5,\n9,,0.1\n17,2.5,0.2\n26,1.")
    assert read_reports(tmp_path, "loss") == [
        Report(9, {"loss": 3.5}),
        Report(18, {"loss": 2.5, "lr": 0.2}),
        Report(27, {"loss": 1.0}),
    ]
    (tmp_path / "metrics.csv").write_text("step,loss\n8,3.5\n,2.5\n17,x\n")  # cut off, or written twice
    assert read_reports(tmp_path, "loss") == [Report(9, {"loss": 3.5})]


def test_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    assert last_error(tmp_path, log) == "ended without a message"
    log.write_text("Traceback\nKeyError: 3\n\n")
    assert last_error(tmp_path, log) == "KeyError: 3"
    log.write_text("error: first\nerror[rank 1]: second: third\n")
    assert last_error(tmp_path, log) == "second: third"
    log.unlink()
    (tmp_path / "record.json").write_text('{"attempts": [{"reason": "out of memory"}]}')
    assert last_error(tmp_path, log) == "out of memory"
