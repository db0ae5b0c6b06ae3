"""Cost of each feature per training step: Boltcutter without the feature, relative to the default configuration."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Process
from benchmarks.step import AS_SHIPPED, PLAIN, WORKS, adapted, reference_command, training_command, turns
from benchmarks.turns import Coordinator
from boltcutter.project import Project

PARTS = {
    "default": [],
    "default, again": [],  # measures the noise
    "no-op hooks (SkipNoOpHooks)": ["~callback.skip_no_op_hooks"],
    "fused optimizer": ["optimizer.fused=false"],
    "metrics": ["task.metrics=null"],
    "guard": ["~callback.guard"],
    "ledger": ["~callback.ledger"],
    "preemption": ["~callback.preemption"],
    "reseed": ["~callback.reseed"],
    "throughput": ["~callback.throughput"],
    "progress": ["~callback.progress"],
    "learning rate": ["~callback.learning_rate"],
    "clipping": ["trainer.gradient_clip_val=null"],
    "logging": ["trainer.log_every_n_steps=0", "~callback.learning_rate"],
}


OF_PLAIN = ", plain Lightning"
PLAIN_PARTS = {
    "default": [],
    "log": ["log"],
    "metrics, and log": ["log", "metrics"],
    "single samples": ["single samples"],
    "unfused optimizer": ["unfused optimizer"],
    "bar": ["bar"],
}


def main(project: Project, overrides: list[str]) -> None:
    """Measure on one core, in alternating turns; options: ``work=mlp rounds=3 folder=runs/bench``.

    Also measures the cost of features in plain Lightning, as in its guides. ``only=ledger`` measures one feature of
    Boltcutter; ``clock=cpu`` the CPU time, which others that use the machine change less, ``clock=bytecode`` the
    instructions of Python.

    Raises:
        BenchmarkError: A process failed.
    """
    chosen = harness.parse_options(
        overrides,
        {"work": "mlp", "rounds": "", "turns": "", "steps": "", "clock": "wall", "only": "", "folder": "runs/bench"},
    )
    if (only := chosen["only"]) and only not in PARTS:
        raise harness.BenchmarkError(f"only={only}: no feature; choose from: {', '.join(PARTS)}")
    work = adapted(WORKS[chosen["work"]], chosen)
    parts = [part for part in _all() if not only or (part[0] in ("default", "default, again", only) and not part[2])]
    parts = [part for part in parts if not {*part[1]} & {*work.overrides}]  # instructions are counted without the bar
    unit, scale = ("instructions", 1.0) if chosen["clock"] == "bytecode" else ("µs", 1e6)
    measured: dict[str, list[float]] = {f"{part}{of}": [] for part, _, of in parts}
    for _ in range(work.rounds):
        with tempfile.TemporaryDirectory() as scratch, Coordinator(Path(scratch)) as coordinator:
            keep = Path(scratch) / "kept.pt"
            seeds: list[int] = []
            for part, without, of in parts:
                if of:
                    by = [*work.overrides, *AS_SHIPPED]
                    command = reference_command(by, PLAIN, turns(work, coordinator), keep, seeds, without)
                else:
                    command = training_command(work, coordinator, Path(scratch), without, None if seeds else keep)
                (ready,) = coordinator.register(part + of, Process(command, harness.cores(1), terminal=True))
                seeds = seeds or ready["seeds"]
            for _ in range(work.turns):
                for part, found in measured.items():
                    found += [turn[chosen["clock"]] * scale for turn in coordinator.turn(part)]
    print(f"{chosen['work']}, one thread: {harness.machine()}")
    for part, _, of in parts:
        found, whole = measured[part + of], measured["default" + of]
        change = statistics.median(b - a for a, b in zip(whole, found, strict=True))
        beside = "" if found is whole else f"  ({change:+.0f})"
        print(f"{part + of:42} {statistics.median(found):8.0f} {unit} per step{beside}")
    folder = Path(chosen["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.json").write_text(
        json.dumps({"machine": harness.machine(), "unit": unit, "per_step": measured}, indent=1)
    )


def _all() -> list[tuple[str, list[str], str]]:
    """List all features, how each is disabled, and the loop that they belong to."""
    ours = [(part, without, "") for part, without in PARTS.items()]
    return ours + [(part, without, OF_PLAIN) for part, without in PLAIN_PARTS.items()]
