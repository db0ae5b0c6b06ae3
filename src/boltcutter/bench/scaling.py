"""Two processes that train one model, over two that train one each at the same time: what data-parallel costs."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from boltcutter.bench import harness
from boltcutter.bench.harness import Process, ratio
from boltcutter.bench.step import AS_SHIPPED, BEST, by_hand

BATCH = 64  # samples of each process
WORK = ["data=synthetic", "data.length=20000", "model=convnet", *AS_SHIPPED]
GLOO = "trainer.strategy.shared_memory=false"
LEAST = 0.93
BY_HAND = 1.0  # of what DistributedDataParallel does in a loop written by hand


def main(configs: Path, words: list[str]) -> None:
    """Measure; ``rounds=5 warm=10 steps=100 folder=runs/bench`` choose how.

    Beside two runs at the same time, which never wait for each other, stand two that wait at each step for the
    slower one and do nothing else; that is worked out from the times of their steps. No way to average gradients can
    do better.

    Raises:
        Failed: A process failed.
    """
    chosen = harness.options(words, {"rounds": "5", "warm": "10", "steps": "100", "folder": "runs/bench"})
    warm, steps, cores = int(chosen["warm"]), int(chosen["steps"]), harness.cores(2)
    rates: dict[str, list[float]] = {name: [] for name in ("together", "gloo", "by hand", "apart", "waiting")}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(int(chosen["rounds"])):
            rates["together"].append(train_together(Path(scratch), cores, warm, steps))
            rates["gloo"].append(train_together(Path(scratch), cores, warm, steps, GLOO))
            rates["by hand"].append(train_by_hand(Path(scratch), cores, warm, steps))
            each = train_apart(Path(scratch), cores, warm, steps)
            rates["apart"].append(sum(BATCH / statistics.mean(times) for times in each))
            rates["waiting"].append(2 * BATCH / statistics.mean(map(max, *each)))
    what, hand = "convnet, samples/s: DDP, 2 processes", "convnet, samples/s: DDP by hand"
    found = [
        ratio(what, rates["together"], "2 runs at the same time", rates["apart"], LEAST, least=True),
        ratio(what, rates["together"], "DDP by hand", rates["by hand"], BY_HAND, least=True),
        ratio(what, rates["together"], "through gloo", rates["gloo"], BY_HAND, least=True),
        ratio(hand, rates["by hand"], "2 runs at the same time", rates["apart"]),
        ratio("2 runs that wait for each other", rates["waiting"], "2 runs at the same time", rates["apart"]),
    ]
    harness.report("scaling", Path(chosen["folder"]), found, rates)


def train_together(scratch: Path, cores: list[int], warm: int, steps: int, *more: str) -> float:
    """Samples a second of one run of two processes."""
    file = scratch / "together.json"
    words = [*WORK, *more, "trainer=ddp", "trainer.devices=2", f"data.batch_size={2 * BATCH}"]
    command = _command(words, file, warm, steps, keep=scratch / "kept.pt")
    Process(command, cores, terminal=True, threads=1).wait()
    return 2 * BATCH / float(harness.measured(file)["wall"])


def train_by_hand(scratch: Path, cores: list[int], warm: int, steps: int) -> float:
    """Samples a second of two processes of the best loop by hand, from the weights that ``train_together`` has kept."""
    file = scratch / "by-hand.json"
    spec = by_hand(WORK, BEST, warm, steps, file, scratch / "kept.pt")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    Process([*launcher, "-m", "boltcutter.bench.reference", json.dumps(spec)], cores, threads=1).wait()
    return 2 * BATCH / float(harness.measured(file)["wall"])


def train_apart(scratch: Path, cores: list[int], warm: int, steps: int) -> list[list[float]]:
    """Seconds of each step of two runs of one process each, at the same time."""
    files = [scratch / f"apart-{core}.json" for core in cores]
    running = [
        Process(_command([*WORK, f"data.batch_size={BATCH}"], file, warm, steps), [core], terminal=True)
        for file, core in zip(files, cores, strict=True)
    ]
    for process in running:
        process.wait()
    return [harness.measured(file)["each"] for file in files]


def _command(words: list[str], file: Path, warm: int, steps: int, **more: Any) -> list[str]:
    given = {"file": file, "warm": warm, "steps": steps, **more}
    window = ", ".join(f"{name}: {value}" for name, value in given.items())
    window = f"{{_target_: boltcutter.bench.window.Window, {window}}}"
    return [str(harness.TRAIN), *words, f"+callback.window={window}", f"runs={file.parent}/{file.stem}"]
