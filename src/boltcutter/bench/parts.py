"""What each part costs at a step: Boltcutter without it, in turn with all of it."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from boltcutter.bench import harness
from boltcutter.bench.harness import Process
from boltcutter.bench.step import WORKS, adapted, train
from boltcutter.bench.turns import Table

PARTS = {
    "all of it": [],
    "all of it, again": [],  # tells what chance does
    "hooks that nobody wrote (Lean)": ["~callback.lean"],
    "fused optimizer": ["optimizer.fused=false"],
    "metrics": ["task.metrics=null"],
    "guard": ["~callback.guard"],
    "preemption": ["~callback.preemption"],
    "reseed": ["~callback.reseed"],
    "throughput": ["~callback.throughput"],
    "progress": ["~callback.progress"],
    "learning rate": ["~callback.learning_rate"],
    "clipping": ["trainer.gradient_clip_val=null"],
    "logging": ["trainer.log_every_n_steps=0", "~callback.learning_rate"],
}


def main(configs: Path, words: list[str]) -> None:
    """Measure on one core, all in turn; ``work=mlp rounds=3 folder=runs/bench`` choose what.

    Raises:
        Failed: A process failed.
    """
    chosen = harness.options(words, {"work": "mlp", "rounds": "", "turns": "", "steps": "", "folder": "runs/bench"})
    work = adapted(WORKS[chosen["work"]], chosen)
    measured: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(work.rounds):
        with tempfile.TemporaryDirectory() as scratch, Table(Path(scratch)) as table:
            for part, without in PARTS.items():
                command = train(work, table, Path(scratch), without)
                table.seat(part, Process(command, harness.cores(1), terminal=True))
            for _ in range(work.turns):
                for part in PARTS:
                    measured[part] += [turn["wall"] * 1e6 for turn in table.turn(part)]
    print(f"{chosen['work']}, one thread: {harness.machine()}")
    for part, found in measured.items():
        change = statistics.median(b - a for a, b in zip(measured["all of it"], found, strict=True))
        beside = "" if part == "all of it" else f"  ({change:+.0f})"
        print(f"{part:32} {statistics.median(found):8.0f} µs a step{beside}")
    folder = Path(chosen["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.json").write_text(json.dumps({"machine": harness.machine(), "microseconds": measured}, indent=1))
