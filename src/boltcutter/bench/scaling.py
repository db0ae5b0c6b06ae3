"""Two processes that train one model, over two that train one each at the same time: what data-parallel costs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from boltcutter.bench import harness
from boltcutter.bench.harness import Process, ratio
from boltcutter.bench.step import AS_SHIPPED

BATCH = 64  # samples of each process
WORK = ["data=synthetic", "data.length=20000", "model=convnet", *AS_SHIPPED]
LEAST = 0.93


def main(configs: Path, words: list[str]) -> None:
    """Measure; ``rounds=3 warm=10 steps=40 folder=runs/bench`` choose how.

    Raises:
        Failed: A process failed.
    """
    chosen = harness.options(words, {"rounds": "3", "warm": "10", "steps": "40", "folder": "runs/bench"})
    warm, steps, cores = int(chosen["warm"]), int(chosen["steps"]), harness.cores(2)
    together: list[float] = []
    apart: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(int(chosen["rounds"])):
            together.append(train_together(Path(scratch), cores, warm, steps))
            apart.append(train_apart(Path(scratch), cores, warm, steps))
    found = ratio("convnet, samples/s: DDP, 2 processes", together, "2 runs at the same time", apart, LEAST, least=True)
    harness.report("scaling", Path(chosen["folder"]), [found], {"together": together, "apart": apart})


def train_together(scratch: Path, cores: list[int], warm: int, steps: int) -> float:
    """Samples a second of one run of two processes."""
    file = scratch / "together.json"
    words = [*WORK, "trainer=ddp", "trainer.devices=2", f"data.batch_size={2 * BATCH}"]
    Process(_command(words, file, warm, steps), cores, terminal=True, threads=1).wait()
    return 2 * BATCH / _seconds(file)


def train_apart(scratch: Path, cores: list[int], warm: int, steps: int) -> float:
    """Samples a second of two runs of one process each, added up."""
    files = [scratch / f"apart-{core}.json" for core in cores]
    running = [
        Process(_command([*WORK, f"data.batch_size={BATCH}"], file, warm, steps), [core], terminal=True)
        for file, core in zip(files, cores, strict=True)
    ]
    for process in running:
        process.wait()
    return sum(BATCH / _seconds(file) for file in files)


def _command(words: list[str], file: Path, warm: int, steps: int) -> list[str]:
    window = f"{{_target_: boltcutter.bench.window.Window, file: {file}, warm: {warm}, steps: {steps}}}"
    return [str(harness.TRAIN), *words, f"+callback.window={window}", f"runs={file.parent}/{file.stem}"]


def _seconds(file: Path) -> float:
    return float(harness.measured(file)["wall"])
