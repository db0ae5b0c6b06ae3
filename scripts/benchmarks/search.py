"""A search relative to a shell loop over the same trainings, and the cost of a trial as their number grows.

``trainings``: eight trainings, two at a time, by ``search`` on this machine and on Ray, relative to ``xargs -P 2``.

``trials``: trials whose training does nothing, so that only the cost of the search is left: study, journal, progress,
and Ray Tune. The mean over trials 50 to 100 is compared with that over trials 500 to 1,000. The report of all trials is
written at the end.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import ROOT, TRAIN, Process, Ratio, ratio
from boltcutter.project import Project
from boltcutter.search.plan import Plan, make_search, read_settings
from boltcutter.search.results import Progress, Result
from boltcutter.search.trial import Sampled, Trial

MOST = 1.15  # target of a search over the shell loop
GROWTH = 1.25  # target of the cost of a trial at the end over that after a tenth of the trials
REPORT_SECONDS = 5.0  # target of the report
ENGINES = ("local", "ray")
LEARNING_RATES = [round(0.001 * (index + 1), 3) for index in range(8)]
VALIDATIONS = 3  # of a trial that does nothing
METRICS: list[tuple[str, Any]] = [("val/loss", "min")]


def main(project: Project, overrides: list[str]) -> None:
    """Measure; options: ``work=trainings,trials rounds=1 epochs=60 trials=1000 folder=runs/bench``.

    Raises:
        BenchmarkError: A process failed.
    """
    known = {"work": "trainings,trials", "rounds": "1", "epochs": "60", "trials": "1000", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if "trainings" in chosen["work"].split(","):
            seconds = measure_trainings(Path(scratch), int(chosen["rounds"]), int(chosen["epochs"]))
            details["trainings"] = seconds
            for engine in ENGINES:
                what = f"8 trainings, engine={engine}"
                ratios.append(ratio(what, seconds[engine], "xargs -P 2", seconds["xargs"], MOST))
        if "trials" in chosen["work"].split(","):
            for engine in ENGINES:
                ratios += measure_trials(project, Path(scratch), engine, int(chosen["trials"]), details)
    harness.report("search", Path(chosen["folder"]), ratios, details)


def measure_trainings(scratch: Path, rounds: int, epochs: int) -> dict[str, list[float]]:
    """Seconds of eight trainings, two at a time, by each of the ways in turn."""
    training = ["logger=null", "report=false", "test=false", f"trainer.max_epochs={epochs}", "trainer.accelerator=cpu"]
    grid = f"search.space.optimizer.lr=grid({','.join(map(str, LEARNING_RATES))})"
    search = [
        str(ROOT / "scripts" / "search.py"),
        "search=grid",
        "search.max_parallel=2",
        grid,
        "~search.space.data.batch_size",
    ]
    seconds: dict[str, list[float]] = {name: [] for name in ("xargs", *ENGINES)}
    for number in range(rounds):
        for name, times in seconds.items():
            folder = scratch / f"{name}-{number}"
            if name == "xargs":
                train = shlex.join([sys.executable, str(TRAIN), *training, "optimizer.lr={}", f"folder={folder}/{{}}"])
                loop = f"printf '%s\\n' {' '.join(map(str, LEARNING_RATES))} | xargs -P 2 -I{{}} {train}"
                command = ["-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1], shell=True))", loop]
            else:
                command = [*search, f"search.engine={name}", *training, f"folder={folder}"]
            began = time.perf_counter()
            Process(command, harness.cores(), threads=1).wait()
            times.append(time.perf_counter() - began)
            print(f"8 trainings, {name:6} {times[-1]:7.1f} s", flush=True)
            if len(list(folder.rglob("metrics.csv"))) != len(LEARNING_RATES):
                raise harness.BenchmarkError(f"{name}: some of the trainings are missing in {folder}")
    return seconds


class NoOpTrial(Trial):
    """A trial whose training does nothing but report a few validations."""

    def start(self) -> bool:
        """Send all reports."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            for step in range(VALIDATIONS):
                metrics = {name: (self.number % 97 + 1) / (step + 1) for name, _ in METRICS}
                theirs.sendall(f"{json.dumps({'step': step, 'metrics': metrics})}\n".encode())
        return True

    def finish(self) -> tuple[str, str]:
        """End."""
        self._wait(0.0)
        return "complete", ""


@dataclass
class MakeTrial:
    """Makes trials that do nothing, also in the workers of Ray."""

    project: Project
    folder: Path

    def __call__(self, sampled: Sampled, environment: Mapping[str, str]) -> Trial:
        """Make a trial."""
        return NoOpTrial(sampled.number, self.folder / "trials" / f"{sampled.number:04d}", [], "val/loss", self.project)


class Clock(Progress):
    """Notes when trials end."""

    def __init__(self, total: int) -> None:
        super().__init__(METRICS, total)
        self.ends: list[float] = []

    def ended(self, result: Result) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())
        with redirect_stdout(StringIO()):
            super().ended(result)

    def cost(self, number: int) -> float:
        """Mean seconds of the second half of the first trials."""
        half = number // 2
        return (self.ends[number - 1] - self.ends[half - 1]) / (number - half)


def measure_trials(project: Project, scratch: Path, engine: str, total: int, details: dict[str, Any]) -> list[Ratio]:
    """Run trials that do nothing, and write their report."""
    from boltcutter.search import local
    from boltcutter.search.outcome import write_outcome
    from boltcutter.search.study import Study

    settings = read_settings(project, ["search=random", f"search.engine={engine}", f"search.num_trials={total}"])
    search = make_search(settings)
    folder = scratch / f"trials-{engine}"
    folder.mkdir()
    plan = Plan(project, folder, settings, [], search, METRICS, [{}], 1, 0.0)
    study, clock = Study(folder, plan.space, METRICS), Clock(total)
    options: dict[str, Any] = {"total": total, "gpus": 0.0, "should_stop": lambda: False, "progress": clock}
    if engine == "ray":
        from boltcutter.search import ray_tune

        ray_tune.run_trials(study, MakeTrial(project, folder), search, cpus=1, folder=folder, **options)
    else:
        local.run_trials(study, MakeTrial(project, folder), parallel=2, **options)
    if len(clock.ends) != total or any(result.state != "complete" for result in study.results()):
        raise harness.BenchmarkError(f"{engine}: {len(clock.ends)} of {total} trials ended, or not all are complete")
    costs = {number: clock.cost(number) for number in (10, 100, 1000, 10_000) if number <= total}
    details[f"seconds of a trial, {engine}"] = costs
    for number, cost in costs.items():
        print(f"engine={engine}: {1000 * cost:7.1f} ms for a trial of {number:,} that do nothing", flush=True)
    found = []
    if total >= 100:
        first, last = total // 10, total
        what = f"a trial of {last:,}, engine={engine}"
        found.append(ratio(what, [clock.cost(last)], f"one of {first:,}", [clock.cost(first)], GROWTH))
    if engine == "local":
        began = time.perf_counter()
        with redirect_stdout(StringIO()):
            study = Study(folder, plan.space, METRICS)
            write_outcome(plan, study.results(), study.importances())
        seconds = time.perf_counter() - began
        details["seconds of the report"] = seconds
        found.append(ratio(f"report of {total:,} trials", [seconds], f"{REPORT_SECONDS:g} s", [REPORT_SECONDS], 1.0))
    return found
