"""Time of a training step, relative to hand-written loops with the same computation."""

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

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Process, Ratio, ratio_of_turns
from benchmarks.turns import Coordinator
from boltcutter.project import Project

# Without W&B, which runs in a separate process, and without report and test, which are not timed.
AS_SHIPPED = ["logger=csv", "report=false", "test=false"]


@dataclass(frozen=True)
class Work:
    """A training to be measured.

    Args:
        overrides: Overrides of ``train.py``, with the accelerator; all other settings have their defaults.
        warm: Number of steps before the first turn.
        lead: Number of steps at the start of each turn that are not timed.
        steps: Number of timed steps of each turn.
        turns: Number of turns of each loop in a round.
        rounds: Number of rounds; each uses new processes.
        loops: Names of the loops.
        targets: Upper bounds of ratios, by numerator and denominator.
        counts: Whether to count bytecode instructions.
    """

    overrides: tuple[str, ...]
    warm: int
    lead: int
    steps: int
    turns: int
    rounds: int
    loops: tuple[str, ...]
    targets: dict[tuple[str, str], float]
    counts: bool = False


OURS, COMPILED = "boltcutter", "boltcutter, compiled"
GUIDE, BEST, BEST_COMPILED = "guides' loop", "best", "best, compiled"
PLAIN, KERAS = "plain Lightning", "Keras's fit"
LOOPS = {GUIDE: "guide", BEST: "best", BEST_COMPILED: "best", PLAIN: "lightning", KERAS: "keras"}  # in reference.py
FASTEST = "fastest by hand"
CLOCKS = {"wall": ("ms", 1e3), "cpu": ("ms", 1e3), "bytecode": ("instructions", 1)}  # with units
TOLERANCE = 2e-3  # relative difference of the first losses; kernels differ in rounding
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
    "keras": Work(  # without dropout, which Keras seeds differently
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


def main(project: Project, overrides: list[str]) -> None:
    """Measure step times; options: ``work=mlp,gpt threads=1,2 rounds=3 turns=6 steps=20 folder=runs/bench``.

    ``clock=cpu`` measures CPU time instead, which is less noisy on a busy machine, and ``clock=bytecode`` the number of
    bytecode instructions, which does not depend on the load (of the thread that trains, and without the progress bar,
    which is redrawn by time). ``device=cuda`` measures other models on a GPU, with all CPU cores.

    Raises:
        BenchmarkError: A process failed, or the losses of two loops differ.
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
    chosen = harness.parse_options(overrides, known)
    for key, values in (("device", ("cpu", "cuda")), ("clock", CLOCKS)):
        if chosen[key] not in values:
            raise BenchmarkError(f"{key}={chosen[key]}: unknown; choose from: {', '.join(values)}")
    if chosen["device"] == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("device=cuda: torch finds no GPU; use device=cpu")
    works, usual = (ON_CUDA, str(len(harness.cores()))) if chosen["device"] == "cuda" else (WORKS, "1,2")
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    usable = [name for name in works if name != "keras" or find_spec("keras")]
    for name in (chosen["work"] or ",".join(usable)).split(","):
        if name not in works:
            raise BenchmarkError(f"work={name}: unknown; choose from: {', '.join(works)}")
        work = adapted(works[name], chosen)
        for threads in map(int, (chosen["threads"] or usual).split(",")):
            measured = measure(work, threads)
            what = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            ratios += compare(work, measured, what, chosen["clock"])
            details[what] = measured
            unit, scale = CLOCKS[chosen["clock"]]
            medians = {loop: median_of(each, chosen["clock"]) * scale for loop, each in measured.items()}
            summary = [f"{loop} {median:{'.3f' if unit == 'ms' else ',.0f'}}" for loop, median in medians.items()]
            least = measured[work.loops[0]][0][-1]["least"]
            share = f"; MFU {least / median_of(measured[work.loops[0]], 'wall'):.0%}" if least else ""
            print(f"{what}, {unit} per step: {'; '.join(summary)}{share}", flush=True)
            if work.counts:
                print_packages(measured, min((GUIDE, BEST), key=lambda loop: medians.get(loop, math.inf)))
    harness.report("step", Path(chosen["folder"]), ratios, details)


def measure(work: Work, threads: int) -> Measured:
    """Measure all loops of ``work`` in alternating turns, with new processes for each round.

    Raises:
        BenchmarkError: The losses of the first steps differ.
    """
    cores = harness.cores(threads)
    measured: Measured = {loop: [] for loop in work.loops}
    for _ in range(work.rounds):
        with tempfile.TemporaryDirectory() as scratch, Coordinator(Path(scratch)) as coordinator:
            keep = Path(scratch) / "kept.pt"
            seeds: list[int] = []
            for loop in work.loops:
                if loop in (OURS, COMPILED):
                    more = [f"task.compile={str(loop == COMPILED).lower()}"]
                    command = training_command(
                        work, coordinator, Path(scratch), more, keep if loop == work.loops[0] else None
                    )
                else:
                    command = reference_command(
                        [*work.overrides, *AS_SHIPPED], loop, turns(work, coordinator), keep, seeds
                    )
                process = Process(command, cores, terminal=loop in (OURS, COMPILED, PLAIN, KERAS))
                (found,) = coordinator.register(loop, process)
                seeds = seeds or found["seeds"]
                measured[loop].append([])
            for _ in range(work.turns):
                for loop in work.loops:
                    measured[loop][-1] += coordinator.turn(loop)
    for reference in set(work.loops) - {OURS, COMPILED}:
        # Compiled dropout draws other random numbers, so compare compiled loops with each other.
        twin = COMPILED if OURS not in measured or (reference == BEST_COMPILED and COMPILED in measured) else OURS
        check_losses(measured[twin][0][-1]["losses"], measured[reference][0][-1]["losses"], f"{twin} and {reference}")
    return measured


def adapted(work: Work, chosen: dict[str, str]) -> Work:
    """Return a work with the given numbers of rounds, turns and steps."""
    given: dict[str, Any] = {key: int(chosen[key]) for key in ("rounds", "turns", "steps") if chosen[key]}
    if chosen.get("clock") == "bytecode":  # the bar is redrawn by time, and compiled code is no bytecode
        loops = tuple(loop for loop in work.loops if loop not in (COMPILED, BEST_COMPILED))
        given |= {"counts": True, "loops": loops, "overrides": (*work.overrides, "~callback.progress"), "targets": {}}
    return replace(work, **given)


def print_packages(measured: Measured, reference: str) -> None:
    """Print how many instructions each package executes in a step, more than in a step of a hand-written loop."""
    ours, theirs = (measured[loop][-1][-1]["by_package"] for loop in (OURS, reference))
    more = {name: ours.get(name, 0) - theirs.get(name, 0) for name in ours | theirs}
    for name, number in sorted(more.items(), key=lambda item: -abs(item[1])):
        if abs(number) >= 10:
            print(f"  {number:+8,.0f}  {name}")


def batches(work: Work) -> int:
    """Return the number of batches that a loop needs."""
    return work.warm + work.turns * (work.lead + work.steps)


def turns(work: Work, coordinator: Coordinator) -> dict[str, Any]:
    """Return the arguments of ``StepTimer``."""
    shared = {"address": coordinator.address, "warm": work.warm, "lead": work.lead, "steps": work.steps}
    return shared | ({"counts": True} if work.counts else {})


def training_command(
    work: Work, coordinator: Coordinator, scratch: Path, more: Sequence[str], keep: Path | None = None
) -> list[str]:
    """Return the command that runs ``train.py`` with a ``TimingWindow``, and saves the initial state to ``keep``."""
    window = {**turns(work, coordinator), **({"keep": keep, "batches": batches(work)} if keep else {})}
    arguments = ", ".join(f"{name}: {value}" for name, value in window.items())
    window_override = f"+callback.window={{_target_: benchmarks.window.TimingWindow, {arguments}}}"
    return [str(harness.TRAIN), *work.overrides, *AS_SHIPPED, *more, window_override, f"runs={scratch}"]


def reference_command(
    overrides: Sequence[str],
    loop: str,
    turns: dict[str, Any],
    keep: Path,
    seeds: Sequence[int],
    without: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs a reference loop with the same configuration, from the state saved to ``keep``."""
    cfg = harness.resolved(overrides)
    spec = {name: cfg[name] for name in ("model", "optimizer", "scheduler")}
    spec |= {"device": cfg["trainer"]["accelerator"], "precision": str(cfg["trainer"]["precision"])}
    spec |= {"clip": cfg["trainer"]["gradient_clip_val"], "compile": loop == BEST_COMPILED, "turns": turns}
    spec |= {"keep": str(keep), "seeds": seeds, "loop": LOOPS[loop], "without": without}
    return ["-m", "benchmarks.reference", json.dumps(spec)]


def median_of(rounds: list[list[dict[str, Any]]], clock: str) -> float:
    """Return the median of all turns, in seconds per step."""
    return float(statistics.median(turn[clock] for turns in rounds for turn in turns))


def check_losses(ours: list[float], theirs: list[float], who: str) -> None:
    """Check that two loops compute the same losses.

    Raises:
        BenchmarkError: The losses differ.
    """
    same = [math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(ours, theirs, strict=True)]
    if not all(same):
        raise BenchmarkError(f"{who} do not compute the same: their first losses are {ours} and {theirs}")


def compare(work: Work, measured: Measured, what: str, clock: str = "wall") -> list[Ratio]:
    """Compare Boltcutter with the guides' loop and the fastest hand-written one, or with Keras's loop."""
    seconds = {loop: [[turn[clock] for turn in turns] for turns in each] for loop, each in measured.items()}
    if KERAS in seconds:
        return [ratio_of_turns(f"{what}: {OURS}", seconds[OURS], KERAS, seconds[KERAS], work.targets[OURS, KERAS])]
    by_hand = [loop for loop in (GUIDE, BEST, BEST_COMPILED) if loop in seconds]
    fastest = min(by_hand, key=lambda loop: median_of(measured[loop], clock))
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
