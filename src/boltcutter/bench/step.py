"""Time of a training step, over that of hand-written loops that do the same arithmetic."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from boltcutter.bench import harness
from boltcutter.bench.harness import BenchmarkError, Process, Ratio, ratio_of_turns
from boltcutter.bench.turns import Coordinator
from boltcutter.project import Project

# Without W&B, which works in a process of its own; what comes after training is not timed anyway.
AS_SHIPPED = ["logger=csv", "report=false", "test=false"]


@dataclass(frozen=True)
class Work:
    """A training to be measured.

    Args:
        words: Of ``train.py``, with the accelerator; all that they do not name is as shipped.
        warm: Steps before the first turn.
        lead: Steps of each turn that are not timed.
        steps: Steps of each turn that are.
        turns: That each loop has in a round.
        rounds: Of fresh processes.
        loops: Which ones.
        targets: By what is divided by what.
    """

    words: tuple[str, ...]
    warm: int
    lead: int
    steps: int
    turns: int
    rounds: int
    loops: tuple[str, ...]
    targets: dict[tuple[str, str], float]


OURS, COMPILED = "boltcutter", "boltcutter, compiled"
GUIDE, BEST, BEST_COMPILED = "guides' loop", "best", "best, compiled"
PLAIN, KERAS = "plain Lightning", "Keras's fit"
LOOPS = {GUIDE: "guide", BEST: "best", BEST_COMPILED: "best", PLAIN: "lightning", KERAS: "keras"}  # in reference.py
FASTEST = "fastest by hand"
TOLERANCE = 2e-3  # of the first losses, relative: other kernels round otherwise
CPU, CUDA = "trainer.accelerator=cpu", "trainer.accelerator=cuda"
NOISE = ("data=synthetic", "data.in_memory=true")
WORKS = {
    "mlp": Work(
        (CPU, *NOISE, "data.num_samples=60000", "model=mlp", "model.hidden_sizes=[64,128,64]"),
        50, 10, 60, 12, 3, (OURS, GUIDE, BEST, BEST_COMPILED, PLAIN), {(OURS, GUIDE): 1.0, (OURS, FASTEST): 1.35},
    ),
    "convnet": Work(
        (CPU, *NOISE, "data.num_samples=10000", "model=convnet"),
        10, 2, 10, 12, 2, (OURS, COMPILED, GUIDE, BEST_COMPILED),
        {(OURS, GUIDE): 0.95, (COMPILED, GUIDE): 0.8, (COMPILED, FASTEST): 1.05},
    ),
    "resnet": Work(
        (CPU, *NOISE, "data.num_samples=2000", "data.shape=[3,32,32]", "data.batch_size=128", "model=resnet"),
        5, 0, 1, 6, 1, (OURS, COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, GUIDE): 0.9, (COMPILED, FASTEST): 1.03},
    ),
    "gpt": Work(
        (CPU, "data=text", "model=gpt", "task=language"),
        5, 0, 2, 8, 2, (OURS, COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, GUIDE): 0.95, (COMPILED, FASTEST): 1.03},
    ),
    "keras": Work(  # without dropout, whose seeds Keras's fit draws otherwise
        (CPU, *NOISE, "data.num_samples=10000", "model=keras_convnet", "model.dropout=0"),
        10, 2, 10, 12, 2, (OURS, KERAS), {(OURS, KERAS): 1.0},
    ),
}  # fmt: skip
ON_CUDA = {
    "mnist": Work(
        (CUDA, *NOISE, "data.num_samples=60000", "model=convnet"),
        50, 10, 60, 12, 3, (OURS, COMPILED, GUIDE, BEST, BEST_COMPILED), {(COMPILED, GUIDE): 0.2},
    ),
    "resnet50": Work(
        (CUDA, *NOISE, "data.num_samples=10000", "data.shape=[3,224,224]", "data.num_classes=1000",
         "data.batch_size=128", "model=resnet", "model.depth=50", "model.stem=large", "trainer.precision=bf16-mixed"),
        10, 1, 5, 10, 2, (COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, FASTEST): 1.02},
    ),
    "gpt_124m": Work(
        (CUDA, "experiment=gpt_124m", "data=text", "data.shape=[1024]", "data.batch_size=16",
         "trainer.accumulate_grad_batches=1"),
        10, 1, 5, 10, 2, (COMPILED, GUIDE, BEST_COMPILED), {(COMPILED, FASTEST): 1.02},
    ),
}  # fmt: skip
Measured = dict[str, list[list[dict[str, Any]]]]  # by loop, for each round and turn


def main(project: Project, words: list[str]) -> None:
    """Measure; ``work=mlp,gpt threads=1,2 rounds=3 turns=6 steps=20 folder=runs/bench`` choose what.

    ``clock=cpu`` counts the time of processors instead, which tells more while other things run on the machine;
    ``device=cuda`` measures other works on a GPU, with all processors.

    Raises:
        BenchmarkError: A process failed, or two loops did not compute the same.
    """
    known = {
        "device": "cpu",
        "work": "",
        "threads": "",
        "rounds": "",
        "turns": "",
        "steps": "",
        "clock": "wall",
        "folder": "runs/bench",
    }
    chosen = harness.parse_options(words, known)
    for key, values in (("device", ("cpu", "cuda")), ("clock", ("wall", "cpu"))):
        if chosen[key] not in values:
            raise BenchmarkError(f"{key}={chosen[key]}: not measured; there are: {', '.join(values)}")
    if chosen["device"] == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("device=cuda: torch finds no GPU here; take device=cpu")
    works, usual = (ON_CUDA, str(len(harness.cores()))) if chosen["device"] == "cuda" else (WORKS, "1,2")
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    usable = [name for name in works if name != "keras" or find_spec("keras")]
    for name in (chosen["work"] or ",".join(usable)).split(","):
        if name not in works:
            raise BenchmarkError(f"work={name}: no such work; there are: {', '.join(works)}")
        work = adapted(works[name], chosen)
        for threads in map(int, (chosen["threads"] or usual).split(",")):
            measured = measure(work, threads)
            what = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            ratios += compare(work, measured, what, chosen["clock"])
            details[what] = measured
            summary = [f"{loop} {middle(each, chosen['clock']) * 1e3:.3f}" for loop, each in measured.items()]
            least = measured[work.loops[0]][0][-1]["least"]
            share = f"; MFU {least / middle(measured[work.loops[0]], 'wall'):.0%}" if least else ""
            print(f"{what}, ms a step: {'; '.join(summary)}{share}", flush=True)
    harness.report("step", Path(chosen["folder"]), ratios, details)


def measure(work: Work, threads: int) -> Measured:
    """All loops of ``work`` in turn, in fresh processes for each round.

    Raises:
        BenchmarkError: Losses of the first steps differ.
    """
    cores = harness.cores(threads)
    measured: Measured = {loop: [] for loop in work.loops}
    for _ in range(work.rounds):
        with tempfile.TemporaryDirectory() as scratch, Coordinator(Path(scratch)) as table:
            keep = Path(scratch) / "kept.pt"
            seeds: list[int] = []
            for loop in work.loops:
                if loop in (OURS, COMPILED):
                    more = [f"task.compile={str(loop == COMPILED).lower()}"]
                    command = train(work, table, Path(scratch), more, keep if loop == work.loops[0] else None)
                else:
                    command = by_hand([*work.words, *AS_SHIPPED], loop, turns(work, table), keep, seeds)
                process = Process(command, cores, terminal=loop in (OURS, COMPILED, PLAIN, KERAS))
                (found,) = table.register(loop, process)
                seeds = seeds or found["seeds"]
                measured[loop].append([])
            for _ in range(work.turns):
                for loop in work.loops:
                    measured[loop][-1] += table.turn(loop)
    for reference in set(work.loops) - {OURS, COMPILED}:
        # Compiled dropout draws other numbers, so what is compiled is compared with what is.
        twin = COMPILED if OURS not in measured or (reference == BEST_COMPILED and COMPILED in measured) else OURS
        agree(measured[twin][0][-1]["losses"], measured[reference][0][-1]["losses"], f"{twin} and {reference}")
    return measured


def adapted(work: Work, chosen: dict[str, str]) -> Work:
    """A work with the rounds, turns and steps that were asked for."""
    given: dict[str, Any] = {key: int(chosen[key]) for key in ("rounds", "turns", "steps") if chosen[key]}
    return replace(work, **given)


def batches(work: Work) -> int:
    """How many are used up."""
    return work.warm + work.turns * (work.lead + work.steps)


def turns(work: Work, table: Coordinator) -> dict[str, Any]:
    """What a process must know to take turns."""
    return {"address": table.address, "warm": work.warm, "lead": work.lead, "steps": work.steps}


def train(work: Work, table: Coordinator, scratch: Path, more: Sequence[str], keep: Path | None = None) -> list[str]:
    """The command that lets ``train.py`` take turns, and keeps what others start from."""
    window = {**turns(work, table), **({"keep": keep, "batches": batches(work)} if keep else {})}
    told = ", ".join(f"{name}: {value}" for name, value in window.items())
    window_word = f"+callback.window={{_target_: boltcutter.bench.window.TimingWindow, {told}}}"
    return [str(harness.TRAIN), *work.words, *AS_SHIPPED, *more, window_word, f"runs={scratch}"]


def by_hand(
    words: Sequence[str],
    loop: str,
    turns: dict[str, Any],
    keep: Path,
    seeds: Sequence[int],
    without: Sequence[str] = (),
) -> list[str]:
    """The command that does by hand what the words of ``train.py`` mean, from what one of its windows has kept."""
    cfg = harness.resolved(words)
    spec = {name: cfg[name] for name in ("model", "optimizer", "scheduler")}
    spec |= {"device": cfg["trainer"]["accelerator"], "precision": str(cfg["trainer"]["precision"])}
    spec |= {"clip": cfg["trainer"]["gradient_clip_val"], "compile": loop == BEST_COMPILED, "turns": turns}
    spec |= {"keep": str(keep), "seeds": seeds, "loop": LOOPS[loop], "without": without}
    return ["-m", "boltcutter.bench.reference", json.dumps(spec)]


def middle(rounds: list[list[dict[str, Any]]], clock: str) -> float:
    """The median of all turns, in seconds a step."""
    return float(statistics.median(turn[clock] for turns in rounds for turn in turns))


def agree(ours: list[float], theirs: list[float], who: str) -> None:
    """See that two loops compute the same.

    Raises:
        BenchmarkError: They do not.
    """
    same = [math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(ours, theirs, strict=True)]
    if not all(same):
        raise BenchmarkError(f"{who} do not compute the same: their first losses are {ours} and {theirs}")


def compare(work: Work, measured: Measured, what: str, clock: str = "wall") -> list[Ratio]:
    """Boltcutter over the guides' loop and over the fastest hand-written one, or over Keras's own loop."""
    seconds = {loop: [[turn[clock] for turn in turns] for turns in each] for loop, each in measured.items()}
    if KERAS in seconds:
        return [ratio_of_turns(f"{what}: {OURS}", seconds[OURS], KERAS, seconds[KERAS], work.targets[OURS, KERAS])]
    by_hand = [loop for loop in (GUIDE, BEST, BEST_COMPILED) if loop in seconds]
    fastest = min(by_hand, key=lambda loop: middle(measured[loop], clock))
    found = []
    for ours in (loop for loop in (OURS, COMPILED) if loop in seconds):
        for over, theirs in ((GUIDE, GUIDE), (FASTEST, fastest)):
            label = theirs if over == GUIDE else f"{FASTEST} ({theirs})"
            target = work.targets.get((ours, over))
            found.append(ratio_of_turns(f"{what}: {ours}", seconds[ours], label, seconds[theirs], target))
    if PLAIN in seconds:
        for over in (GUIDE, fastest):
            found.append(ratio_of_turns(f"{what}: {PLAIN}", seconds[PLAIN], over, seconds[over]))
    return found
