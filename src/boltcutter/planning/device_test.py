"""``boltcutter doctor --test``: train on the devices that are there, and report what works.

Each check runs in processes of its own with a time limit, so that a crash or a hang is one row of the table.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.config.errors import ConfigError
from boltcutter.environment.startup import PARENT_PID
from boltcutter.extend import NegativeResult
from boltcutter.task.compiler import CUDA_GRAPH

TOTAL_TIME, CHECK_TIME = 540.0, 180.0  # seconds for all checks, and for one process
NETWORK = ["data=digits", "model=mlp", "task=classification", "optimizer=sgd", "callback=default"]
QUICK = ["logger=null", "report=false", "test=false"]
TOLERANCE = 1e-4  # of weights after an epoch; sums of gradients are rounded in another order
FALLBACK = f"error:task.compile={CUDA_GRAPH}"  # a warning that begins so
NO_GPU = "torch finds no CUDA device; if nvidia-smi lists one, install a torch for the CUDA version that it shows"


class Row(NamedTuple):
    """The outcome of a check; ``result`` is ``works``, ``fails`` or ``not tried``."""

    check: str
    result: str
    detail: str


class CheckError(Exception):
    """A check failed."""


class NotTriedError(Exception):
    """A check does not apply to this machine."""


def run_device_test(arguments: list[str]) -> list[dict[str, str]]:
    """Run all checks, print a table and return its rows; the exit status is 1 if one fails."""
    if other := [argument for argument in arguments if argument != "--test"]:
        raise ConfigError(f"{other[0]}: --test takes no overrides; remove it")
    rows = []
    with TemporaryDirectory(prefix="boltcutter-doctor-") as folder:
        for row in Devices(Path(folder)).rows():
            rows.append(row)
            print(f"{row.check:24}{row.result:11}{row.detail}", flush=True)
    counts = Counter(row.result for row in rows)
    print(", ".join(f"{counts[result]} {result}" for result in ("works", "fails", "not tried") if counts[result]))
    found = [row._asdict() for row in rows]
    if counts["fails"]:
        raise NegativeResult(found)
    return found


class Devices:
    """The devices of this machine, and what is tried on them; two processes on the CPU where there is no GPU."""

    def __init__(self, folder: Path, *, total_time: float = TOTAL_TIME, check_time: float = CHECK_TIME) -> None:
        self.folder, self.check_time, self.end = folder, check_time, time.monotonic() + total_time
        (folder / "configs").mkdir(exist_ok=True)  # a project of nothing but the built-in options
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.count = self.gpus or 2
        self.common = [*NETWORK, *QUICK, f"trainer.accelerator={'gpu' if self.gpus else 'cpu'}"]
        self.common += [f"data.batch_size={16 * self.count}"]
        self.reference = cache(partial(self.train, "reference"))

    def checks(self) -> dict[str, Callable[[], str]]:
        """All checks by name; each returns what was measured."""
        module = "boltcutter.planning.device_checks"
        names = [f"cuda:{index}" for index in range(self.gpus)] or ["cuda", "cpu"]
        return {
            **{f"step on {name}": partial(self.run, module, "step", name, needs_gpu="cuda" in name) for name in names},
            **{f"precision {name}": partial(self.precision, name) for name in ("bf16-mixed", "16-mixed", "float8")},
            f"all-reduce ({'nccl' if self.gpus else 'gloo'})": lambda: self.run(
                module, "all-reduce", str(self.count), ranks=self.count
            ),
            **({} if self.gpus else {"all-reduce (nccl)": partial(self.run, needs_gpu=True)}),
            **{name: partial(self.compare, name) for name in ("ddp", "fsdp2")},
            "asynchronous save": lambda: self.trained("asynchronous", "checkpoint_io.asynchronous=true"),
            "checkpoint on the CPU": self.evaluate_on_cpu,
            "kill and resume": self.kill_and_resume,
            "compile": lambda: self.trained("compile", "task.compile=true"),
            "cuda-graph": self.capture_steps,
        }

    def rows(self) -> Iterator[Row]:
        """Run the checks."""
        for name, check in self.checks().items():
            try:
                yield Row(name, "works", check())
            except NotTriedError as error:
                yield Row(name, "not tried", str(error))
            except (CheckError, OSError, ValueError) as error:
                yield Row(name, "fails", str(error))

    def run(self, *command: str, needs_gpu: bool = False, ranks: int = 0) -> str:
        """Run a module, with its arguments, and return the last line that it prints.

        Raises:
            NotTriedError: There is no GPU, only one device, or no time left.
            CheckError: It failed, or did not end in time.
        """
        if needs_gpu and not self.gpus:
            raise NotTriedError(NO_GPU)
        if ranks == 1:
            raise NotTriedError("needs a second GPU")
        process, repeat = self.start(*command), f"; to repeat: {shlex.join(['python', '-m', *command])}"
        try:
            output, _ = process.communicate(timeout=min(self.check_time, max(1.0, self.end - time.monotonic())))
        except subprocess.TimeoutExpired:
            kill(process)
            process.communicate()
            if time.monotonic() >= self.end:
                raise NotTriedError("the time for all checks is over") from None
            raise CheckError(f"did not end in time{repeat}") from None
        lines = output.strip().splitlines() or [""]
        if process.returncode:
            shown = next((line for line in lines if line.startswith("error")), lines[-1])
            raise CheckError(f"{shown or f'exit status {process.returncode}'}{repeat}")
        return lines[-1]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a module in a session of its own, which ends with this process."""
        if time.monotonic() > self.end:
            raise NotTriedError("the time for all checks is over")
        variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**variables, PARENT_PID: str(os.getpid()), "PYTHONWARNINGS": FALLBACK},
            cwd=self.folder,
            start_new_session=True,
        )

    def train(self, name: str, *overrides: str, devices: int = 1) -> dict[str, Tensor]:
        """Train for an epoch, and return the weights."""
        folder = self.folder / name
        epochs = [] if any(text.startswith("trainer.max_epochs=") for text in overrides) else ["trainer.max_epochs=1"]
        where = [f"trainer.devices={devices}", f"folder={folder}"]
        self.run("boltcutter", "train", *self.common, *epochs, *overrides, *where)
        return dict(load_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"])

    def trained(self, name: str, *overrides: str) -> str:
        """Train for an epoch, and report that the weights are finite."""
        weights = self.train(name, *overrides)
        if not all(bool(value.isfinite().all()) for value in weights.values()):
            raise CheckError("the weights are not finite")
        return "one epoch"

    def precision(self, name: str) -> str:
        """Train in a precision."""
        if name == "float8" and (not self.gpus or torch.cuda.get_device_capability() < (8, 9)):
            raise NotTriedError("needs a GPU of compute capability 8.9 or higher, such as an L4 or H100")
        return self.trained(name, f"trainer.precision={name}")

    def compare(self, strategy: str) -> str:
        """Compare the weights of a strategy on all devices, which may be one, with those without it."""
        expected = self.reference()
        found = self.train(strategy, f"trainer={strategy}", devices=self.count)
        difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
        if not difference < TOLERANCE:
            raise CheckError(f"weights differ from those of one device by {difference:.1e}")
        devices = f"{self.count} {'processes' if not self.gpus else 'GPUs' if self.gpus > 1 else 'GPU'}"
        return f"{devices}: weights differ from those of one device by {difference:.1e}"

    def capture_steps(self) -> str:
        """Compare the weights of captured steps, with accumulated gradients and dropout, with those of other steps."""
        if not self.gpus:
            raise NotTriedError(NO_GPU)
        common = ["trainer.max_epochs=5", "trainer.accumulate_grad_batches=2", "model.dropout=0.1"]
        expected = self.train("not captured", *common)
        found = self.train("captured", *common, f"task.compile={CUDA_GRAPH}")  # a fallback is an error: FALLBACK
        difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
        if not difference < TOLERANCE:
            raise CheckError(f"weights differ from those of steps that are not captured by {difference:.1e}")
        return f"weights differ from those of steps that are not captured by {difference:.1e}"

    def evaluate_on_cpu(self) -> str:
        """Evaluate a checkpoint of the device on the CPU."""
        self.reference()
        where = [f"run={self.folder / 'reference'}", "trainer.accelerator=cpu", "trainer.devices=1"]
        self.run("boltcutter", "evaluate", *where)
        return "evaluated"

    def kill_and_resume(self) -> str:
        """Compare a run that is killed and resumed with an uninterrupted one, in deterministic mode."""
        overrides = ["trainer.deterministic=true", "trainer.max_epochs=10"]
        expected = self.train("uninterrupted", *overrides)
        folder = self.folder / "killed"
        process = self.start("boltcutter", "train", *self.common, *overrides, "trainer.devices=1", f"folder={folder}")
        end, checkpoint = time.monotonic() + self.check_time, folder / "checkpoints" / "last.ckpt"
        while not checkpoint.is_file() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        kill(process)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            raise CheckError(f"the run ended with status {process.returncode} before it was killed")
        self.run("boltcutter", "train", f"resume={folder}")
        found = load_checkpoint(checkpoint)["state_dict"]
        if not all(torch.equal(found[name], value) for name, value in expected.items()):
            raise CheckError("the weights of a resumed run are not those of an uninterrupted one")
        return "bitwise identical to an uninterrupted run"


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
