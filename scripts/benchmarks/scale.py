"""How time and memory up to the first training step, or of one command, grow with the size of what is given.

``samples`` of a computed data set, ``tokens`` in a file that is sparse, so that no disk is measured, image ``files``,
``parameters`` of an MLP, ``metrics`` of a task over 2,000 steps, ``names`` that are logged in 25 steps, ``runs`` in a
folder that is listed without and with an index, ``ranks`` that are processes of this machine, and ``fake_ranks``: rank
0 of so many with torch's fake process group, which is everything before the first step but the collectives;
``modules`` of a model, ``keys`` of a configuration, ``rows`` of the metrics of a run whose curves are drawn.

CPU time is that of all processes, memory the largest resident set of one process, or of this one if it has more. An
exponent e says that what exceeds the cost of the smallest size grows with size^e between the two largest sizes; 0 if it
is within the noise.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks import harness
from benchmarks.harness import ROOT, SECONDS, TRAIN, BenchmarkError
from boltcutter.project import Project

NOISE = 0.15, 0.1  # seconds, and part of the smallest size's cost, that an increase must exceed
NOISE_MIB = 16.0
MARGIN = 0.15  # of a measured exponent over the expected one
LAST = f"+callback.last={{_target_: {__name__}.LastStep, steps: %d}}"
QUIET = ["logger=null", "report=false", "trainer.accelerator=cpu"]
FAKE = """
import runpy, sys, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
new_group = dist.new_group
dist.new_group = lambda *args, **options: new_group(*args, **options | {"backend": "fake"})
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(sys.argv.pop(1)))
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IMAGE = bytes.fromhex(  # one white pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
)


class Keys(Callback):
    """Has many settings.

    Args:
        values: The settings.
    """

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values


class LogNames(Callback):
    """Logs many metrics in each step, and their means at the end of each epoch.

    Args:
        number: Number of metrics.
    """

    def __init__(self, number: int) -> None:
        self.names = [f"many/m{each}" for each in range(number)]

    def on_train_batch_end(self, trainer: Any, module: Any, *step: Any) -> None:
        """Log the number of the step by each name."""
        for name in self.names:
            module.log(name, float(trainer.global_step), on_step=True, on_epoch=True)


class LastStep(Callback):
    """Ends the process immediately after some training steps.

    Args:
        steps: Number of steps; 0: before the first one.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, *step: Any) -> None:
        """Exit before the first step."""
        if not self.steps:
            os._exit(0)

    def on_train_batch_end(self, trainer: Any, *step: Any) -> None:
        """Exit without cleaning up, which is not measured."""
        if trainer.global_step >= self.steps:
            os._exit(0)


@dataclass(frozen=True)
class Cost:
    """The cost of one size: CPU time and duration in seconds, and the largest memory of a process in MiB."""

    cpu: float
    duration: float
    mib: float


Commands = Sequence[tuple[list[str], dict[str, str]]]  # arguments of Python and variables, of processes side by side


@dataclass(frozen=True)
class Work:
    """What grows.

    Args:
        sizes: From the smallest to the largest.
        prepare: Takes a size and an empty folder, and returns commands.
        expected: The largest exponents of CPU time and of memory.
        warm: Whether the second of two executions in the same folder is measured.
    """

    sizes: Sequence[int]
    prepare: Callable[[int, Path], Commands]
    expected: tuple[float, float]
    warm: bool = False


def train(folder: Path, *overrides: str, steps: int = 1) -> list[str]:
    """The arguments of Python that train for some steps."""
    return [str(TRAIN), *QUIET, f"runs={folder}/runs", LAST % steps, *overrides]


def samples(size: int, folder: Path) -> Commands:
    """Samples that are computed from their index."""
    return [(train(folder, "data=synthetic", f"data.num_samples={size}"), {})]


def tokens(size: int, folder: Path) -> Commands:
    """A file of 16-bit tokens, all of them 0, that uses no space on the disk."""
    with open(folder / "tokens.bin", "wb") as file:
        file.truncate(2 * size)
    gpt = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=1"]
    data = ["data=tokens", f"data.path={folder}/tokens.bin", "data.shape=[64]", "data.vocab_size=256"]
    return [(train(folder, "task=language", "model=gpt", *data, *gpt), {})]


def files(size: int, folder: Path) -> Commands:
    """Images of one pixel in ten folders."""
    for number in range(size):
        place = folder / "images" / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(IMAGE)
    data = ["data=images", f"data.folder={folder}/images", "data.shape=[3, 8, 8]", "data.num_workers=0"]
    return [(train(folder, *data), {})]


def parameters(size: int, folder: Path) -> Commands:
    """Parameters of one hidden layer; weights, gradients and the optimizer's state are 16 bytes each."""
    width = round(math.sqrt(size))
    return [(train(folder, "model=mlp", f"model.hidden_sizes=[{width}, {width}]", "data=synthetic"), {})]


def metrics(size: int, folder: Path) -> Commands:
    """Metrics of each training step, over 2,000 steps."""
    accuracy = "{_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10, validate_args: false"
    differ = [f"top_k: {number % 9 + 1}, ignore_index: {number // 9}" for number in range(size)]  # no state in common
    many = [f"+task.metrics.m{number}={accuracy}, {each}}}" for number, each in enumerate(differ)]
    return [(train(folder, *many, "trainer.limit_val_batches=0", "data=synthetic", "model=linear", steps=2000), {})]


def names(size: int, folder: Path) -> Commands:
    """Names that a callback logs, with their columns of metrics.csv, in an epoch and some steps of the next one."""
    many = f"+callback.names={{_target_: {__name__}.LogNames, number: {size}}}"
    command = [each for each in train(folder, many, "model=linear", steps=25) if each != "logger=null"]
    return [([*command, "logger=csv", "trainer.log_every_n_steps=10"], {})]


def runs(size: int, folder: Path) -> Commands:
    """Records of runs that are listed."""
    for number in range(size):
        place = folder / f"name-{number % 10}" / f"20260101-000000-{number:08x}"
        place.mkdir(parents=True)
        config = {"seed": number % 100, "optimizer": {"lr": 0.001 * (number % 7 + 1)}, "task": {"a": list(range(50))}}
        attempt = {"start": "2026-01-01T12:00:00+00:00", "reason": "completed", "seconds": 9.0, "device": "cpu"}
        record = {"config": config, "name": "x", "attempts": [attempt], "metrics": {"val/accuracy": number / size}}
        (place / "record.json").write_text(json.dumps(record))
    return [(["-m", "boltcutter", "runs", f"runs={folder}", "--limit", "10"], {})]


def ranks(size: int, folder: Path) -> Commands:
    """Processes that train together over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0"}
    shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"scale-{port}", "BOLTCUTTER_RUN_ID": f"scale-{port}"}
    command = train(folder, "trainer=ddp", f"trainer.devices={size}", "data=synthetic", f"data.batch_size={size}")
    return [(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def fake_ranks(size: int, folder: Path) -> Commands:
    """Rank 0 of nodes with eight devices each."""
    overrides = [f"trainer.num_nodes={size // 8}", "trainer.devices=8", f"data.batch_size={size}", "trainer=ddp"]
    command = train(folder, "data=synthetic", *overrides, "data.num_samples=1000000", steps=0)
    ((_, variables), *_) = ranks(size, folder)
    return [(["-c", FAKE, str(size), *command], variables | {"LOCAL_WORLD_SIZE": "8"})]


def modules(size: int, folder: Path) -> Commands:
    """Layers of a chain, each of four units."""
    sizes = f"model.hidden_sizes=[{','.join('4' for _ in range(size // 4))}]"  # layer, norm, activation, dropout
    return [(train(folder, "model=mlp", sizes, "data=synthetic", "data.shape=[1, 2, 2]"), {})]


def keys(size: int, folder: Path) -> Commands:
    """Keys of a configuration that is checked."""
    values = ", ".join(f"k{number}: {number}" for number in range(size))
    callback = f"+callback.keys={{_target_: {__name__}.Keys, values: {{{values}}}}}"
    return [(["-m", "boltcutter", "check", "model=mlp", callback], {})]


def rows(size: int, folder: Path) -> Commands:
    """Rows of the metrics of a run whose curves are drawn."""
    ((command, variables),) = runs(1, folder)
    (place,) = folder.glob("*/*")
    with open(place / "metrics.csv", "w") as file:
        file.write("step,epoch,train/loss\n")
        file.writelines(f"{number},{number // 1000},{1 / (number + 1)}\n" for number in range(size))
    return [([*command, f"--html={folder}/runs.html"], variables)]


WORKS = {
    "samples": Work((10**4, 10**6, 10**8, 10**9), samples, (0, 0)),
    "tokens": Work((10**6, 10**8, 10**10), tokens, (0, 0)),
    "files": Work((10**3, 10**4, 10**5), files, (1, 1)),
    "parameters": Work((10**5, 10**7, 10**8), parameters, (1, 1)),
    "metrics": Work((1, 10, 100), metrics, (1, 1)),
    "names": Work((10**2, 10**3, 10**4), names, (1, 1)),
    "runs": Work((10**3, 10**4, 10**5), runs, (1, 1)),
    "runs_index": Work((10**3, 10**4, 10**5), runs, (1, 1), warm=True),
    "modules": Work((10**2, 10**3, 10**4), modules, (1, 1)),
    "keys": Work((10**2, 10**3, 10**4), keys, (1, 1)),
    "rows": Work((10**5, 10**6, 10**7), rows, (1, 1)),
    "ranks": Work((1, 4, 8, 16), ranks, (1, 0)),
    "fake_ranks": Work((8, 512, 4096), fake_ranks, (1, 0)),  # torchmetrics gathers each metric of each rank
}


def main(project: Project, overrides: list[str]) -> None:
    """Measure; options: ``work=samples,… rounds=1 folder=runs/bench``.

    Raises:
        BenchmarkError: A process failed, or an option is invalid.
    """
    known = {"work": ",".join(WORKS), "rounds": "1", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    unknown = sorted(set(chosen["work"].split(",")) - set(WORKS))
    if unknown:
        raise BenchmarkError(f"work={unknown[0]}: unknown; choose from: {', '.join(WORKS)}")
    print(f"scale: {harness.machine()}")
    found: dict[str, Any] = {}
    for name in chosen["work"].split(","):
        work = WORKS[name]
        costs = [measure(work, size, int(chosen["rounds"])) for size in work.sizes]
        for size, cost in zip(work.sizes, costs, strict=True):
            print(f"{name:12} {size:13,} {cost.cpu:9.2f} s CPU {cost.duration:9.2f} s {cost.mib:9.0f} MiB", flush=True)
        cpu, mib = exponents(work.sizes, costs)
        missed = cpu > work.expected[0] + MARGIN or mib > work.expected[1] + MARGIN
        expected = f"expected at most {work.expected[0]} and {work.expected[1]}{', missed' if missed else ''}"
        print(f"{name:12} exponent {cpu:.2f} of time, {mib:.2f} of memory; {expected}")
        sizes = {str(size): asdict(cost) for size, cost in zip(work.sizes, costs, strict=True)}
        found[name] = {"sizes": sizes, "exponents": [cpu, mib], "expected": work.expected}
    folder = Path(chosen["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.json").write_text(json.dumps({"machine": harness.machine(), **found}, indent=1))


def measure(work: Work, size: int, rounds: int) -> Cost:
    """The median cost of a size.

    Raises:
        BenchmarkError: A process failed.
    """
    costs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            commands = work.prepare(size, Path(scratch))
            if work.warm:
                execute(commands)
            costs.append(execute(commands))
    return Cost(*(statistics.median(getattr(cost, name) for cost in costs) for name in ("cpu", "duration", "mib")))


def execute(commands: Commands) -> Cost:
    """Execute commands side by side.

    Raises:
        BenchmarkError: One failed or did not end in time.
    """
    began = time.perf_counter()
    path = os.pathsep.join(filter(None, [str(TRAIN.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as errors:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables,
            )
            for arguments, variables in commands
        ]
        used = []
        try:
            for process in processes:
                while True:
                    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                    if pid:
                        process.returncode = os.waitstatus_to_exitcode(status)
                        break
                    if time.perf_counter() - began > SECONDS:
                        raise BenchmarkError(f"a measured process did not end in {SECONDS} s")
                    time.sleep(0.01)
                used.append(usage)
                if process.returncode:
                    errors.seek(0)
                    lines = errors.read().decode(errors="replace").strip().splitlines()
                    raise BenchmarkError(f"a measured process ended with {process.returncode}: {(lines or [''])[-1]}")
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    process.wait()
    unit = 1 << (20 if sys.platform == "darwin" else 10)  # of ru_maxrss
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return Cost(cpu, time.perf_counter() - began, max(usage.ru_maxrss for usage in used) / unit)


def exponents(sizes: Sequence[int], costs: Sequence[Cost]) -> tuple[float, float]:
    """How CPU time and memory beyond those of the smallest size grow between the two largest sizes."""

    def exponent(values: list[float], noise: float) -> float:
        before, after = values[-2] - values[0], values[-1] - values[0]
        if after <= noise:
            return 0.0
        return math.log(after / max(before, noise)) / math.log(sizes[-1] / sizes[-2])

    cpu = [cost.cpu for cost in costs]
    return exponent(cpu, max(NOISE[0], NOISE[1] * cpu[0])), exponent([cost.mib for cost in costs], NOISE_MIB)
