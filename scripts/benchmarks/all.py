"""Run all benchmarks in sequence, and plot their ratios in one figure."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Ratio
from boltcutter.project import Project

PARTS = ("step", "scaling", "startup", "memory", "loader")
ROUNDS = {"startup": "3", "memory": "3"}


def main(project: Project, overrides: list[str]) -> None:
    """Run all benchmarks; ``folder=runs/bench`` sets the output folder, ``parts=step,loader`` selects benchmarks.

    Raises:
        BenchmarkError: A process failed.
    """
    chosen = harness.parse_options(overrides, {"folder": "runs/bench", "parts": ",".join(PARTS)})
    folder = Path(chosen["folder"])
    ratios: list[Ratio] = []
    for part in chosen["parts"].split(","):
        if part not in PARTS:
            raise harness.BenchmarkError(f"parts={part}: unknown benchmark; choose from: {', '.join(PARTS)}")
        more = [f"rounds={ROUNDS[part]}"] if part in ROUNDS else []
        import_module(f"benchmarks.{part}").main(project, [f"folder={folder}", *more])
        for found in json.loads((folder / f"{part}.json").read_text())["ratios"]:
            found.pop("met")
            ratios.append(Ratio(**{**found, "what": f"{part}: {found['what']}", "spread": tuple(found["spread"])}))
        print()
    harness.report("all", folder, ratios, None)
    missed = [r.what for r in ratios if not r.met]
    print(f"{len(ratios) - len(missed)} of {len(ratios)} meet their targets")
    if missed:
        print("missed:", *missed, sep="\n  ")
