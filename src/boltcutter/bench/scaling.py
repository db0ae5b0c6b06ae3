"""Two processes that train one model, over two that train one each at the same time: what data-parallel costs."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from boltcutter.bench import harness
from boltcutter.bench.harness import Process, ratio_of_turns
from boltcutter.bench.step import AS_SHIPPED, BEST, CPU, Work, adapted, by_hand, train, turns
from boltcutter.bench.turns import Coordinator
from boltcutter.project import Project

BATCH = 64  # samples of each process
WORK = Work(
    (CPU, "data=synthetic", "data.in_memory=true", "data.num_samples=30000", "model=convnet"), 10, 3, 12, 10, 3, (), {}
)
ALONE = f"data.batch_size={BATCH}"
TOGETHER = ("trainer=ddp", "trainer.devices=2", f"data.batch_size={2 * BATCH}")
GLOO = "trainer.strategy.shared_memory=false"
LEAST = 0.93
BY_HAND = 1.0  # of what DistributedDataParallel does in a loop written by hand
GROUPS = ("together", "gloo", "by hand", "apart")


def main(project: Project, words: list[str]) -> None:
    """Measure; ``rounds=3 turns=10 steps=12 folder=runs/bench`` choose how.

    Beside two runs at the same time, which never wait for each other, stand two that wait at each step for the
    slower one and do nothing else; that is worked out from the times of their steps. No way to average gradients can
    do better.

    Raises:
        BenchmarkError: A process failed.
    """
    chosen = harness.parse_options(words, {"rounds": "", "turns": "", "steps": "", "folder": "runs/bench"})
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
    """What each rank of each group says of each of its turns, in fresh processes."""
    cores = harness.cores(2)
    measured: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in GROUPS}
    with tempfile.TemporaryDirectory() as folder, Coordinator(Path(folder)) as table:
        keep = Path(folder) / "kept.pt"

        def run(name: str, on: list[int], *more: str) -> Process:
            command = train(work, table, Path(folder) / name, more, keep if name == "together" else None)
            return Process(command, on, terminal=True, threads=1)

        first, _ = table.register("together", run("together", cores, *TOGETHER), ranks=2)
        table.register("gloo", run("gloo", cores, *TOGETHER, GLOO), ranks=2)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        loop = by_hand([*work.words, *AS_SHIPPED, ALONE], BEST, turns(work, table), keep, first["seeds"])
        table.register("by hand", Process([*launcher, *loop], cores, threads=1), ranks=2)
        apart = [run(f"apart-{core}", [core], ALONE) for core in cores]
        table.register("apart", *apart, ranks=2)
        for _ in range(work.turns):
            for name in GROUPS:
                measured[name].append(table.turn(name))
    return measured
