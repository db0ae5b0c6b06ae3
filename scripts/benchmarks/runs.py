"""Cost of ``boltcutter runs --live`` to a training whose run it follows: steps with and without a page that asks."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks import harness
from benchmarks.harness import Process, ratio_of_turns
from benchmarks.step import WORKS, adapted, batches, training_command
from benchmarks.turns import Coordinator
from boltcutter.project import Project


class Page(threading.Thread):
    """Asks for the data of the page and for the report of each run once a second while it is open.

    Args:
        url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.opened, self.asked = url, threading.Event(), 0

    def run(self) -> None:
        """Ask until the process ends."""
        while self.opened.wait():
            for path in ("/data.json", "/bench/report.html"):
                httpx.get(self.url + path, timeout=60)
                self.asked += 1
            time.sleep(1)


def main(project: Project, overrides: list[str]) -> None:
    """Measure on one core, in alternating turns; options: ``work=mlp rounds=1 turns=20 steps=6000 folder=runs/bench``.

    The server runs on the other cores.

    Raises:
        BenchmarkError: A process failed.
    """
    known = {"work": "mlp", "rounds": "1", "turns": "20", "steps": "6000", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    work = replace(adapted(WORKS[chosen["work"]], chosen), lead=100)
    work = replace(work, turns=2 * work.turns)
    with tempfile.TemporaryDirectory() as scratch, Coordinator(Path(scratch)) as coordinator:
        command = training_command(
            work,
            coordinator,
            Path(scratch),
            [f"folder={scratch}/bench", "trainer.max_epochs=-1", f"trainer.max_steps={batches(work) + 1}"],
        )
        coordinator.register("training", Process(command, harness.cores(1)))
        serve = [sys.executable, "-m", "boltcutter", "runs", "--live", f"runs={scratch}", "port=0"]
        server = subprocess.Popen(serve, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            page = Page(server.stdout.readline().split()[0])
            page.start()
            found: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(work.turns):
                (page.opened.set if turn % 2 else page.opened.clear)()
                found[bool(turn % 2)] += [measured["wall"] for measured in coordinator.turn("training")]
        finally:
            page.opened.clear()
            time.sleep(2)  # for its last request
            server.kill()
            server.wait()
    print(f"{1 / statistics.median(found[False]):.0f} steps per second alone; the page asked {page.asked} times")
    followed = ratio_of_turns("followed by a page", [found[True]], "alone", [found[False]], 1.01)
    harness.report("runs", Path(chosen["folder"]), [followed], found)
