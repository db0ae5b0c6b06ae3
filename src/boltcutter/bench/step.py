"""Time of a training step, over that of hand-written loops that do the same arithmetic."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter.bench import harness
from boltcutter.bench.harness import Failed, Ratio, ratio

# Without W&B, which works in a process of its own; what comes after training is not timed anyway.
AS_SHIPPED = ["logger=csv", "report=false", "test=false", "trainer.accelerator=cpu"]


@dataclass(frozen=True)
class Work:
    """A training to be measured.

    Args:
        words: Of ``train.py``; all that they do not name is as shipped.
        warm: Steps before the clock starts.
        steps: That are timed.
        rounds: How often each loop has its turn.
        loops: Which ones.
        targets: By what is divided by what.
    """

    words: tuple[str, ...]
    warm: int
    steps: int
    rounds: int
    loops: tuple[str, ...]
    targets: dict[tuple[str, str], float]


OURS, COMPILED = "boltcutter", "boltcutter, compiled"
GUIDE, BEST, BEST_COMPILED = "guides' loop", "best", "best, compiled"
FASTEST = "fastest by hand"
TOLERANCE = 2e-3  # of the first losses, relative: other kernels round otherwise
WORKS = {
    "mlp": Work(
        ("data=synthetic", "data.length=40000", "model=mlp", "model.hidden=[64,128,64]"),
        50, 500, 3, (OURS, GUIDE, BEST, BEST_COMPILED), {(OURS, GUIDE): 1.0, (OURS, FASTEST): 1.35},
    ),
    "convnet": Work(
        ("data=synthetic", "data.length=10000", "model=convnet"),
        10, 50, 2, (OURS, COMPILED, GUIDE, BEST_COMPILED),
        {(OURS, GUIDE): 0.95, (COMPILED, GUIDE): 0.8, (COMPILED, FASTEST): 1.05},
    ),
    "resnet": Work(
        ("data=synthetic", "data.length=2000", "data.shape=[3,32,32]", "data.batch_size=128", "model=resnet"),
        1, 2, 1, (OURS, COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, GUIDE): 0.9, (COMPILED, FASTEST): 1.03},
    ),
    "gpt": Work(
        ("data=text", "model=gpt", "task=language"),
        3, 10, 2, (OURS, COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, GUIDE): 0.95, (COMPILED, FASTEST): 1.03},
    ),
}  # fmt: skip
Measured = dict[str, list[dict[str, Any]]]  # by loop, for each round


def main(configs: Path, words: list[str]) -> None:
    """Measure; ``work=mlp,gpt threads=1,2 rounds=3 steps=20 folder=runs/bench`` choose what.

    ``clock=cpu`` counts the time of processors instead, which tells more while other things run on the machine.

    Raises:
        Failed: A process failed, or two loops did not compute the same.
    """
    known = {
        "work": ",".join(WORKS),
        "threads": "1,2",
        "rounds": "",
        "steps": "",
        "clock": "wall",
        "folder": "runs/bench",
    }
    chosen = harness.options(words, known)
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    for name in chosen["work"].split(","):
        if name not in WORKS:
            raise Failed(f"work={name}: no such work; there are: {', '.join(WORKS)}")
        for threads in map(int, chosen["threads"].split(",")):
            rounds, steps = (int(chosen[key]) if chosen[key] else None for key in ("rounds", "steps"))
            measured = measure(WORKS[name], threads, rounds, steps)
            what = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            ratios += compare(WORKS[name], measured, what, chosen["clock"])
            details[what] = measured
            summary = [
                f"{loop} {statistics.median(found[chosen['clock']] for found in each) * 1e3:.3f}"
                for loop, each in measured.items()
            ]
            print(f"{what}, ms a step: {'; '.join(summary)}", flush=True)
    harness.report("step", Path(chosen["folder"]), ratios, details)


def measure(work: Work, threads: int, rounds: int | None = None, steps: int | None = None) -> Measured:
    """All loops of ``work`` in turn, each in a fresh process.

    Raises:
        Failed: Losses of the first steps differ.
    """
    steps, cores = steps or work.steps, harness.cores(threads)
    measured: Measured = {loop: [] for loop in work.loops}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(rounds or work.rounds):
            for loop in work.loops:
                measured[loop].append(once(work, loop, steps, cores, Path(scratch)))
    for reference in set(work.loops) - {OURS, COMPILED}:
        # Compiled dropout draws other numbers, so what is compiled is compared with what is.
        twin = COMPILED if reference == BEST_COMPILED and COMPILED in measured else OURS
        agree(measured[twin][0]["losses"], measured[reference][0]["losses"], f"{twin} and {reference}")
    return measured


def once(work: Work, loop: str, steps: int, cores: list[int], scratch: Path) -> dict[str, Any]:
    """What one loop does in a fresh process; Boltcutter's first run keeps what the others start from."""
    file, compiled = scratch / "measured.json", loop in (COMPILED, BEST_COMPILED)
    keep = scratch / "kept.pt"
    if loop in (OURS, COMPILED):
        window = f"{{_target_: boltcutter.bench.window.Window, file: {file}, warm: {work.warm}, steps: {steps}"
        window += "}" if keep.exists() else f", keep: {keep}}}"
        command = [str(harness.TRAIN), *work.words, *AS_SHIPPED, f"task.compile={str(compiled).lower()}"]
        command += [f"+callback.window={window}", f"runs={scratch}"]
    else:
        spec = by_hand([*work.words, *AS_SHIPPED], loop, work.warm, steps, file, keep)
        command = ["-m", "boltcutter.bench.reference", json.dumps(spec)]
    file.unlink(missing_ok=True)
    harness.Process(command, cores, terminal=loop in (OURS, COMPILED)).wait()
    return harness.measured(file)


def by_hand(words: list[str], loop: str, warm: int, steps: int, file: Path, keep: Path) -> dict[str, Any]:
    """What ``boltcutter.bench.reference`` is told, to do by hand what the words of ``train.py`` mean."""
    cfg = harness.resolved(words)
    spec = {name: cfg[name] for name in ("model", "optimizer", "scheduler")}
    spec |= {"clip": cfg["trainer"]["gradient_clip_val"], "compile": loop == BEST_COMPILED, "warm": warm}
    spec |= {"steps": steps, "file": str(file), "keep": str(keep), "loop": "guide" if loop == GUIDE else "best"}
    return spec


def agree(ours: list[float], theirs: list[float], who: str) -> None:
    """See that two loops compute the same.

    Raises:
        Failed: They do not.
    """
    same = [math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(ours, theirs, strict=True)]
    if not all(same):
        raise Failed(f"{who} do not compute the same: their first losses are {ours} and {theirs}")


def compare(work: Work, measured: Measured, what: str, clock: str = "wall") -> list[Ratio]:
    """Boltcutter over the guides' loop and over the fastest hand-written one, for each way that it was run."""
    seconds = {loop: [found[clock] for found in each] for loop, each in measured.items()}
    by_hand = [loop for loop in (GUIDE, BEST, BEST_COMPILED) if loop in seconds]
    fastest = min(by_hand, key=lambda loop: statistics.median(seconds[loop]))
    found = []
    for ours in (loop for loop in (OURS, COMPILED) if loop in seconds):
        for over, theirs in ((GUIDE, GUIDE), (FASTEST, fastest)):
            label = theirs if over == GUIDE else f"{FASTEST} ({theirs})"
            target = work.targets.get((ours, over))
            found.append(ratio(f"{what}: {ours}", seconds[ours], label, seconds[theirs], target))
    return found
