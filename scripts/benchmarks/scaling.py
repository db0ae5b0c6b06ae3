"""Scaling: throughput of two data-parallel processes, relative to two independent runs at the same time."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Process, ratio_of_turns
from benchmarks.step import AS_SHIPPED, BEST, CPU, Work, adapted, reference_command, training_command, turns
from benchmarks.turns import Coordinator
from boltcutter.project import Project

BATCH = 64  # per process
WORK = Work(
    (CPU, "data=synthetic", "data.in_memory=true", "data.num_samples=30000", "model=convnet"), 10, 3, 12, 10, 3, (), {}
)
ALONE = f"data.batch_size={BATCH}"
TOGETHER = ("trainer=ddp", "trainer.devices=2", f"data.batch_size={2 * BATCH}")
GLOO = "trainer.strategy.shared_memory=false"
LEAST = 0.93
BY_HAND = 1.0  # target relative to DistributedDataParallel in a hand-written loop
GROUPS = ("together", "gloo", "by hand", "apart")


def main(project: Project, overrides: list[str]) -> None:
    """Measure throughput; options: ``rounds=3 turns=10 steps=12 folder=runs/bench``.

    From the step times of the two independent runs, also computes the throughput if they waited for the slower one at
    each step. This is an upper bound for any synchronous averaging of gradients.

    Raises:
        BenchmarkError: A process failed.
    """
    chosen = harness.parse_options(overrides, {"rounds": "", "turns": "", "steps": "", "folder": "runs/bench"})
    work = adapted(WORK, chosen)
    rates: dict[str, list[list[float]]] = {name: [] for name in (*GROUPS, "waiting")}
    for _ in range(work.rounds):
        measured = measure(work)
        for name, each_turn in measured.items():
            rates[name].append([sum(BATCH / rank["wall"] for rank in ranks) for ranks in each_turn])
        each = ((rank["each"] for rank in ranks) for ranks in measured["apart"])
        rates["waiting"].append([2 * BATCH / statistics.mean(map(max, *steps)) for steps in each])
    what, hand = "convnet, samples/s: DDP, 2 processes", "convnet, samples/s: DDP by hand"
    found = [
        ratio_of_turns(what, rates["together"], "2 runs at the same time", rates["apart"], LEAST, least=True),
        ratio_of_turns(what, rates["together"], "DDP by hand", rates["by hand"], BY_HAND, least=True),
        ratio_of_turns(what, rates["together"], "through gloo", rates["gloo"], BY_HAND, least=True),
        ratio_of_turns(hand, rates["by hand"], "2 runs at the same time", rates["apart"]),
        ratio_of_turns("2 runs that wait for each other", rates["waiting"], "2 runs at the same time", rates["apart"]),
    ]
    harness.report("scaling", Path(chosen["folder"]), found, rates)


def measure(work: Work) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the measurements of each rank, by group and turn, in new processes."""
    cores = harness.cores(2)
    measured: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in GROUPS}
    with tempfile.TemporaryDirectory() as folder, Coordinator(Path(folder)) as coordinator:
        keep = Path(folder) / "kept.pt"

        def run(name: str, on: list[int], *more: str) -> Process:
            command = training_command(
                work, coordinator, Path(folder) / name, more, keep if name == "together" else None
            )
            return Process(command, on, terminal=True, threads=1)

        first, _ = coordinator.register("together", run("together", cores, *TOGETHER), ranks=2)
        coordinator.register("gloo", run("gloo", cores, *TOGETHER, GLOO), ranks=2)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        loop = reference_command(
            [*work.overrides, *AS_SHIPPED, ALONE], BEST, turns(work, coordinator), keep, first["seeds"]
        )
        coordinator.register("by hand", Process([*launcher, *loop], cores, threads=1), ranks=2)
        apart = [run(f"apart-{core}", [core], ALONE) for core in cores]
        coordinator.register("apart", *apart, ranks=2)
        for _ in range(work.turns):
            for name in GROUPS:
                measured[name].append(coordinator.turn(name))
    return measured
