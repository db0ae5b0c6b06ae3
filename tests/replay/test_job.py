import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay.conftest import Replayed

from boltcutter.config.errors import ConfigError
from boltcutter.project import SOURCE, Project
from boltcutter.replay.job import (
    COPY,
    Done,
    Job,
    ReplayError,
    folder_of,
    ledgers_of,
    newest_before,
    ranks_of,
    seconds_of,
    settings_before,
    surroundings,
    unrestored,
    worker,
)
from boltcutter.run.folder import read_record
from boltcutter.run.ledger import ROW, header, ledger_path

PROJECT = Project.at(Path(__file__).parents[2])


def test_the_newest_checkpoint_before_a_step_is_chosen() -> None:
    saved = [(100, "a"), (200, "b"), (300, "c")]
    assert newest_before(saved, 250) == (200, "b")
    assert newest_before(saved, 200) == (100, "a")
    assert newest_before(saved, 100) == (0, None)


def test_losses_are_means_over_ranks_and_batches() -> None:
    ranks = [{"losses": {"10": ["1.0", "2.0"], "9": ["nan"]}}, {"losses": {"10": ["3.0", "6.0"]}}]
    losses = Done(ranks, []).losses()
    assert list(losses) == [9, 10]
    assert losses[10] == 3.0


def test_runs_are_found(replayed: Replayed, tmp_path: Path) -> None:
    assert folder_of(str(replayed.run)) == replayed.run
    assert ranks_of(read_record(replayed.run)) == [1]
    with pytest.raises(ConfigError, match="with: missing"):
        folder_of(None, "with")
    for key in ("run", "with"):
        with pytest.raises(ConfigError, match=f"^{key}=.*: no run there"):
            folder_of(str(tmp_path), key)


@pytest.mark.parametrize(("ranks", "expected"), [([1, 2], [[4, 5], [4, 5]]), ([2, 1], [[1, 2, 3, 4, 5]])])
def test_steps_are_those_of_the_ranks_of_the_last_attempt(
    tmp_path: Path, ranks: list[int], expected: list[list[int]]
) -> None:
    for rank, steps in enumerate([[1, 2, 3, 4, 5], [4, 5]]):
        rows = np.zeros(len(steps), ROW)
        rows["step"] = steps
        ledger_path(tmp_path, rank).write_bytes(header("cpu") + rows.tobytes())
    record = {"attempts": [{"devices": each} for each in ranks] + [{"reason": "exit 2"}]}
    assert [ledger.rows["step"].tolist() for ledger in ledgers_of(tmp_path, record)] == expected


def test_a_signal_leaves_no_folder_and_no_process(replayed: Replayed) -> None:
    project = Project.at(replayed.run.parent / "project")

    def replay() -> None:
        with worker(surroundings(project, {}, own=True), read_record(replayed.run)) as started:
            folders.append(started.scratch)
            signal.raise_signal(signal.SIGTERM)

    folders: list[Path] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        replay()
    assert raised.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not folders[0].exists()


@pytest.mark.slow
def test_a_replay_that_takes_too_long_is_ended(replayed: Replayed, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    given = replace(surroundings(PROJECT, {}, own=True), python=str(python))
    with worker(given, read_record(replayed.run), 0.2) as started:
        for _ in range(2):  # the process is started anew
            process = started._process
            with pytest.raises(ReplayError, match=r"timeout=<more seconds>"):
                started.run(Job(str(replayed.run), "", 1))
            assert process.returncode == -signal.SIGKILL
    assert started._process.returncode is not None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([10.0], 600.0), ([100.0, 50], 3000.0), ([None, 5.0], 86400.0), ([], 600.0), ([1e300], 86400.0)],
)
def test_the_limit_of_a_replay_follows_from_the_run(seconds: list[float | None], expected: float) -> None:
    assert seconds_of({"attempts": [{"seconds": each} for each in seconds]}) == expected


def test_settings_of_a_step_before_a_resume_are_known() -> None:
    changed = [
        {"task.lr": {"was": 1, "now": 2}, "task.new": {"now": 3}, "model._target_": {"was": "a.B", "now": "a.C"}},
        {"task.lr": {"was": 2, "now": 4}, "data.path": {"was": "/a", "now": "/b"}},
    ]
    attempts = [{}, *({"resumed_at": at, "changed": each} for at, each in zip((10, 20), changed, strict=True))]
    assert settings_before({"attempts": attempts}, 10, own=True) == ({"task.lr": 1}, ["task.new"])
    assert settings_before({"attempts": attempts}, 11, own=True) == ({"task.lr": 2}, [])
    assert settings_before({"attempts": attempts}, 21, own=True) == ({}, [])
    assert settings_before({"attempts": attempts}, 10, own=False) == ({}, []), "attempts are not signed"
    assert settings_before({"attempts": [{"changed": ["task.lr"]}]}, 1, own=True) == ({}, []), "of another version"


def test_variables_that_the_run_has_read_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ABSENT", "PATH", "MY_TOKEN", "CHANGED", "PYTHONHASHSEED", "PYTHONOPTIMIZE"):
        monkeypatch.setenv(name, "now")
    read = {"ABSENT": None, "PATH": "/then", "MY_TOKEN": "***", "CHANGED": "then", "RANK": "1"}
    read |= {"PYTHONHASHSEED": "3", "PYTHONOPTIMIZE": "2"}
    found = surroundings(PROJECT, record := {"environment": {"variables": read}}, own=True).environment()
    assert {name: found.get(name) for name in read} == {
        "ABSENT": None,
        "PATH": "now",
        "MY_TOKEN": "now",
        "CHANGED": "then",
        "RANK": None,
        "PYTHONHASHSEED": "3",
        "PYTHONOPTIMIZE": "now",
    }
    other = {"environment": {"variables": {"MY_TOKEN": None, "CHANGED": "then"}}}
    assert unrestored((record, other), 0, own=True) == ["MY_TOKEN"]


def test_no_variable_of_the_record_of_somebody_else_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are executed, as ``GCONV_PATH`` and ``CXX``, or say where data and credentials are sent."""
    monkeypatch.setenv("CXX", "now")
    planted = {
        "CXX": "/theirs",
        "GCONV_PATH": "/theirs",
        "HTTPS_PROXY": "http://theirs",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }
    found = surroundings(PROJECT, record := {"environment": {"variables": planted}}, own=False)
    assert found.variables == ()
    assert found.environment()["CXX"] == "now"
    assert set(unrestored((record, {"environment": {"variables": dict.fromkeys(planted)}}), 0, own=False)) == {*planted}


def test_a_copy_of_the_code_comes_before_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    copied = replace(
        surroundings(PROJECT, {"hardware": {"threads": 3}}, own=True), project=Project.at(tmp_path)
    ).environment()
    assert copied["PYTHONPATH"].split(":") == [f"{tmp_path}/src", str(tmp_path), "/elsewhere"]
    assert (copied["OMP_NUM_THREADS"], copied[COPY]) == ("3", "1")
    assert surroundings(PROJECT, {}, own=True).environment()["PYTHONPATH"] == "/elsewhere"


def test_a_record_of_somebody_else_starts_no_million_of_threads() -> None:
    for threads, expected in ((4, 4), (10**9, None), (-1, None), ("x", None)):
        assert surroundings(PROJECT, {"hardware": {"threads": threads}}, own=False).threads == expected


def test_modules_are_found_where_the_run_has_found_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/now")
    record = {"environment": {"python": {"PYTHONPATH": "/then"}, "variables": {"A": "1", "B": "1"}}}
    given = surroundings(PROJECT, record, own=True)
    assert given.environment()["PYTHONPATH"] == "/then"
    other = {"environment": {"python": {"PYTHONPATH": None}, "variables": {"A": "2"}}}
    without = surroundings(PROJECT, other, own=True)
    assert "PYTHONPATH" not in without.environment()
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    assert without.environment()["PYTHONPATH"] == str(SOURCE), "where this library is"
    assert given.with_environment(without, ["A"]).variables == (("A", "2"), ("B", "1"))
    assert given.with_environment(without, ["PYTHONPATH"]) == replace(given, path="")
    assert surroundings(PROJECT, record, own=False).environment()["PYTHONPATH"] == str(SOURCE)
