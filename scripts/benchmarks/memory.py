"""Peak memory of training, relative to hand-written loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Ratio, ratio
from benchmarks.step import COMPILED, GUIDE, OURS, WORKS, measure
from boltcutter.project import Project

MOST = 1.15


def main(project: Project, overrides: list[str]) -> None:
    """Measure peak memory; options: ``work=resnet threads=2 rounds=1 folder=runs/bench``.

    Raises:
        BenchmarkError: A process failed.
    """
    known = {"work": "resnet", "threads": "2", "rounds": "1", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    for name in chosen["work"].split(","):
        work = replace(WORKS[name], rounds=int(chosen["rounds"]), turns=1)
        measured = measure(work, int(chosen["threads"]))
        ratios += compare(name, {loop: [turn["mib"] for (turn,) in each] for loop, each in measured.items()})
        details[name] = measured
    harness.report("memory", Path(chosen["folder"]), ratios, details)


def compare(name: str, mib: dict[str, list[float]]) -> list[Ratio]:
    """Compare Boltcutter with the guides' loop, and compiled with the compiled hand-written loop."""
    found = [ratio(f"{name}: {OURS}", mib[OURS], GUIDE, mib[GUIDE], MOST)]
    if COMPILED in mib:
        other = next(loop for loop in mib if loop.startswith("best") and "compiled" in loop)
        found.append(ratio(f"{name}: {COMPILED}", mib[COMPILED], other, mib[other], MOST))
    return found
