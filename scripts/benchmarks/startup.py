"""Start-up time of commands, relative to ``import lightning.pytorch``."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks import harness
from benchmarks.harness import ROOT, ratio
from boltcutter.project import Project

MOST = 1.35  # target for the first training step


class FirstStep(Callback):
    """Ends the process immediately after the first training step."""

    def on_train_batch_end(self, *step: Any) -> None:
        """Exit without cleaning up, which is not measured."""
        os._exit(0)


def main(project: Project, overrides: list[str]) -> None:
    """Measure in new processes, alternating between commands; options: ``rounds=5 folder=runs/bench``."""
    chosen = harness.parse_options(overrides, {"rounds": "5", "folder": "runs/bench"})
    rounds = int(chosen["rounds"])
    with tempfile.TemporaryDirectory() as scratch:
        train = project.train_command
        first_step = f"+callback.first_step={{_target_: {__name__}.FirstStep}}"
        commands = {
            "import lightning.pytorch": ["-c", "import lightning.pytorch"],
            "--help": [*train, "--help"],
            "--check": [*train, "--check"],
            "first training step": [*train, first_step, f"runs={scratch}", "logger=null"],
            "first training step, with W&B": [*train, first_step, f"runs={scratch}"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(rounds + 1):
            for name, command in commands.items():
                took = measure([sys.executable, *command])
                if turn:  # the first turn fills the disk cache
                    seconds[name].append(took)
    base = "import lightning.pytorch"
    for name, times in seconds.items():
        print(f"{name:32} {statistics.median(times):6.2f} s   {min(times):.2f}–{max(times):.2f}")
    ratios = [
        ratio(name, times, base, seconds[base], MOST if name == "first training step" else None)
        for name, times in seconds.items()
    ]
    harness.report("startup", Path(chosen["folder"]), ratios, seconds)


def measure(command: list[str]) -> float:
    """Return the seconds until ``command`` ends.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, timeout=300)
    return time.perf_counter() - began
