"""Time from a command to its answer, over the time of ``import lightning.pytorch`` alone."""

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

from boltcutter.bench import harness
from boltcutter.bench.harness import ROOT, ratio
from boltcutter.project import Project

MOST = 1.35  # for the first training step


class FirstStep(Callback):
    """Ends the process at once when the first training step is done."""

    def on_train_batch_end(self, *step: Any) -> None:
        """Leave without tidying up: only the time until here is asked for."""
        os._exit(0)


def main(project: Project, words: list[str]) -> None:
    """Measure in fresh processes, in turn, and print medians as ratios; ``rounds=5 folder=runs/bench`` choose how."""
    chosen = harness.parse_options(words, {"rounds": "5", "folder": "runs/bench"})
    rounds = int(chosen["rounds"])
    with tempfile.TemporaryDirectory() as scratch:
        script = str(project.root / "scripts" / "train.py")
        first_step = f"+callback.first_step={{_target_: {__name__}.FirstStep}}"
        commands = {
            "import lightning.pytorch": ["-c", "import lightning.pytorch"],
            "--help": [script, "--help"],
            "--check": [script, "--check"],
            "first training step": [script, first_step, f"runs={scratch}", "logger=null"],
            "first training step, with W&B": [script, first_step, f"runs={scratch}"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(rounds + 1):
            for name, command in commands.items():
                took = measure([sys.executable, *command])
                if turn:  # the first one only warms the disk
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
    """Seconds until ``command`` ends.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, timeout=300)
    return time.perf_counter() - began
