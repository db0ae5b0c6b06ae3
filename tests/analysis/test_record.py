"""The runs below a folder."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from boltcutter.analysis.groups import read_group
from boltcutter.analysis.record import best_run, find_runs, is_held, metric_mode
from boltcutter.environment.lease import Holder
from boltcutter.environment.process import start_time

from .conftest import Write


def test_runs_are_listed_by_age(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "digits" / "b", day=2, test={"test/accuracy": 0.9}, tags=["x"])
    write(tmp_path / "digits" / "a", day=1)
    (tmp_path / "digits" / "c").mkdir()
    (tmp_path / "digits" / "c" / "record.json").write_text("[")
    first, second, third = find_runs(tmp_path)
    assert (first.id, second.id, third.id, third.status) == ("a", "b", "c", "unreadable")
    assert (second.name, second.folder, second.kind) == ("digits-convnet", str(tmp_path / "digits" / "b"), "run")
    assert (second.metrics, second.tags, second.devices) == ({"test/accuracy": 0.9}, ("x",), "2 × CPU")
    assert (second.seconds, second.started, second.parent) == (90.0, 1767355200.0, None)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("completed", "completed"),
        ("completed, but nothing is trained", "completed"),
        ("interrupted", "interrupted"),
        ("preempted by SIGTERM, saved last.ckpt", "interrupted"),
        ("killed", "killed"),
        ("running", "killed"),
        ("ValueError: x", "failed"),
        (None, "not started"),
    ],
)
def test_status(tmp_path: Path, write: Write, reason: str | None, status: str) -> None:
    write(tmp_path / "run", reason=reason)
    assert find_runs(tmp_path)[0].status == status


def test_a_run_is_running_while_its_process_is_alive(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "run", reason="running")
    (folder / ".lease").write_text(json.dumps(asdict(Holder.here())))
    assert is_held(folder)
    assert find_runs(tmp_path)[0].status == "running"
    code = "import json, dataclasses; from boltcutter.environment.lease import Holder; "
    done = subprocess.check_output(
        [sys.executable, "-c", f"{code}print(json.dumps(dataclasses.asdict(Holder.here())))"]
    )
    (folder / ".lease").write_bytes(done)
    assert not is_held(folder)
    assert find_runs(tmp_path)[0].status == "killed"
    (folder / ".lease").unlink()
    os.mkfifo(folder / ".lease")
    assert not is_held(folder)


def test_a_launched_run_that_has_not_started_is_submitted(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "run", reason=None, launch={"id": "1"})
    run = find_runs(tmp_path)[0]
    assert (run.status, run.kind) == ("submitted", "job")


def test_a_search_has_the_metrics_of_its_best_trial(tmp_path: Path, write: Write) -> None:
    folder = tmp_path / "digits" / "s"
    for number, accuracy in enumerate((0.8, 0.9, 0.7)):
        write(
            folder / "trials" / f"{number:04}", day=number + 2, metrics={"val/accuracy": accuracy, "val/loss": number}
        )
    search = {"created": "2026-01-01T00:00:00+00:00", "metrics": [["val/accuracy", "max"]], "settings": {}}
    (folder / "search.json").write_text(json.dumps(search))
    runs = find_runs(tmp_path)
    assert [(run.id, run.kind, run.parent) for run in runs] == [
        ("s", "search", None),
        *((f"s/{number:04}", "trial", "s") for number in range(3)),
    ]
    assert runs[0].metrics == {"val/accuracy": 0.9, "val/loss": 1.0}
    assert runs[0].status == "interrupted"
    (folder / "trials.csv").touch()
    (folder / "search.json").write_text(json.dumps(search | {"fixed": [{"data.fold": 0}]}))
    assert [run.kind for run in find_runs(tmp_path)] == ["search", "fold", "fold", "fold"]
    assert find_runs(tmp_path)[0].status == "completed"


def test_a_launched_process_that_has_died_at_its_start_is_failed(tmp_path: Path, write: Write) -> None:
    host, own = socket.gethostname(), start_time(os.getpid())
    ids = [f"{os.getpid()} on {host} since {own}", f"{os.getpid()} on {host} since 1", f"{os.getpid()} on else since 1"]
    for number, job in enumerate(ids):
        write(tmp_path / str(number), reason=None, launch={"id": job})
    assert [run.status for run in sorted(find_runs(tmp_path), key=lambda run: run.id)] == [
        *("submitted", "failed", "submitted")
    ]


def test_a_search_with_repeated_runs_has_the_best_mean(tmp_path: Path, write: Write) -> None:
    folder = tmp_path / "digits" / "s"
    losses = {0.1: (0.5, 9.0), 0.2: (2.0, 4.0), 0.3: (0.1,)}  # of seeds 0 and 1, of which one is missing
    pairs = [(lr, seed, loss) for lr, found in losses.items() for seed, loss in enumerate(found)]
    for number, (lr, seed, loss) in enumerate(pairs):
        settings = {"optimizer": {"lr": lr}, "seed": seed, "callback": {"reseed": {"seed": "${seed}"}}}
        write(folder / "trials" / f"{number:04}", metrics={"val/loss": loss}, settings=settings)
    search = {"metrics": [["val/loss", "min"]], "settings": {"space": {"optimizer.lr": "grid(0.1, 0.2, 0.3)"}}}
    fixed = [{"optimizer.lr": lr, "seed": seed} for lr in losses for seed in (0, 1)]
    (folder / "search.json").write_text(json.dumps({**search, "fixed": fixed}))
    runs = find_runs(tmp_path)
    assert next(run for run in runs if run.kind == "search").metrics == {"val/loss": 3.0}
    group = read_group(str(folder), runs, "val/loss")
    assert sorted(group.values) == [2.0, 4.0]


def test_the_best_run_is_by_the_mode_that_runs_monitor(tmp_path: Path, write: Write) -> None:
    for number, value in enumerate((0.2, 0.3, float("nan"))):
        write(tmp_path / str(number), metrics={"val/accuracy": value, "val/loss": value, "odd": value})
    runs = find_runs(tmp_path)
    assert [best_run(runs, name) for name in ("val/accuracy", "val/loss", "odd", "none")] == [
        *(runs[1], runs[0], runs[0], None)
    ]
    assert (metric_mode(runs, "odd"), best_run(runs, "odd", "max")) == (None, runs[1])
    write(tmp_path / "0", settings={"callback": {"x": {"monitor": "odd", "mode": "max"}}})
    assert metric_mode(find_runs(tmp_path), "odd") == "max"
