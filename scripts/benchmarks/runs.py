"""Cost of ``boltcutter runs --live`` to a training that it follows: CPU time while a page asks, and while none does."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from scipy.stats import binom

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Process, Ratio
from benchmarks.step import WORKS, training_command
from benchmarks.turns import Coordinator
from boltcutter.project import Project

TARGET = 1.01  # CPU time of a training that is followed, relative to one that is not
INTERVAL = 1.0  # seconds between two questions of a page
PAUSE = 1.5  # seconds between two here, after which the server reads all files again
PROGRESS = 10  # questions between two lines of output
PATHS = ("/data.json", "/bench/report.html")  # that an open report and the page ask for


class Page(threading.Thread):
    """Asks for the data of the page and for the report of the run, whenever it is told to.

    Args:
        url: Address of the server, with its token, as it prints it.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, _, token = url.partition("/?token=")
        self._headers, self.error = {"Authorization": f"Bearer {token}"}, ""
        self._asks, self.is_answered = threading.Event(), threading.Event()
        self.is_answered.set()

    def ask(self) -> None:
        """Begin to ask; ``is_answered`` is set once both answers are there."""
        self.is_answered.clear()
        self._asks.set()

    def run(self) -> None:
        """Ask until the process ends."""
        while self._asks.wait():
            self._asks.clear()
            try:
                for path in PATHS:
                    httpx.get(self.url + path, headers=self._headers, timeout=60).raise_for_status()
            except httpx.HTTPError as error:
                self.error = f"runs --live: {type(error).__name__}: {error}"
            self.is_answered.set()


def main(project: Project, overrides: list[str]) -> None:
    """Measure a training on one core, and the server on the other cores.

    Options: ``work=mlp asks=100 steps=20 seconds=180 folder=runs/bench``. The measurement ends after ``asks`` questions
    of a page or ``seconds``. CPU time of the training process is compared, which other busy processes change least.

    Raises:
        BenchmarkError: A process failed.
    """
    known = {"work": "mlp", "asks": "100", "steps": "20", "seconds": "180", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    if chosen["work"] not in WORKS:
        raise BenchmarkError(f"work={chosen['work']}: unknown; choose from: {', '.join(WORKS)}")
    work = replace(WORKS[chosen["work"]], lead=0, steps=int(chosen["steps"]))
    with tempfile.TemporaryDirectory() as scratch, Coordinator(Path(scratch)) as coordinator:
        endless = [f"folder={scratch}/bench", "trainer.max_epochs=-1", "trainer.max_steps=10000000"]
        command = training_command(work, coordinator, Path(scratch), endless)
        coordinator.register("training", Process(command, harness.cores(1)))
        if others := harness.cores()[1:]:  # for the server and the page
            os.sched_setaffinity(0, others)
        serve = [sys.executable, "-m", "boltcutter", "runs", "--live", f"runs={scratch}", "port=0"]
        server = subprocess.Popen(serve, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            page = Page(server.stdout.readline().strip())
            page.start()
            found = measure(coordinator, page, int(chosen["asks"]), int(chosen["seconds"]))
        finally:
            server.kill()
            server.wait()
    alone = statistics.median(turn["cpu"] for each in found for turn in each["alone"])
    turns = statistics.mean(len(each["followed"]) for each in found)
    print(f"{1 / alone:.0f} steps per CPU second alone; {turns:.1f} turns of {work.steps} steps until an answer")
    followed = cost(found, work.steps)
    harness.report("runs", Path(chosen["folder"]), [followed], found)


def measure(coordinator: Coordinator, page: Page, asks: int, seconds: float) -> list[dict[str, list[dict[str, float]]]]:
    """Measure short turns: while the page waits for its answers, and before and after that, which are alone."""
    found: list[dict[str, list[dict[str, float]]]] = []
    until = time.monotonic() + seconds

    def turn() -> dict[str, float]:
        measured: dict[str, Any] = coordinator.turn("training")[0]
        return {clock: measured[clock] for clock in ("cpu", "wall")}

    while len(found) < asks and time.monotonic() < until:
        followed, alone, began = list[dict[str, float]](), list[dict[str, float]](), time.monotonic()
        page.ask()
        while not page.is_answered.is_set():
            followed.append(turn())
        if page.error:
            raise BenchmarkError(page.error)
        while len(alone) < len(followed) or time.monotonic() < began + PAUSE:
            alone.append(turn())
        found.append({"followed": followed, "alone": alone})
        if len(found) % PROGRESS == 0:
            print(f"{len(found)} of {asks} questions", flush=True)
    return found


def cost(found: Sequence[dict[str, list[dict[str, float]]]], steps: int) -> Ratio:
    """CPU time of a training that is asked about each second, relative to one that is not.

    Of each question, the turns that follow the answer tell what the turns until then would have taken. The median of
    the differences is what a question costs; its 95% interval, from order statistics, needs six questions.
    """
    alone = [statistics.fmean(turn["cpu"] for turn in each["alone"]) for each in found]
    followed = [[turn["cpu"] for turn in each["followed"]] for each in found]
    extra = sorted(steps * (sum(turns) - len(turns) * usual) for turns, usual in zip(followed, alone, strict=True))
    place = max(int(binom.ppf(0.025, len(extra), 0.5)), 1)  # of the ends of the interval, counted from both sides
    value, *ends = (1 + each / INTERVAL for each in (statistics.median(extra), extra[place - 1], extra[-place]))
    return Ratio("followed by a page", "alone", value, (ends[0], ends[1]), TARGET)
