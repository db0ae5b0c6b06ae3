"""Compare an export with the original, in a process that has never imported the code of the model."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from boltcutter.export import runner
from boltcutter.export.program import Inputs, Program
from boltcutter.export.settings import ExportError

MAX_ELEMENTS = 1 << 24  # of an output that is compared at once
LATENCY_BATCHES = (1, 32)
MAX_CACHED = 64  # tokens for which a cache is checked
MAX_CACHE_ERROR = 0.1  # of logits, relative; rounding errors of int8 are below 0.02


@dataclass
class Result:
    """How an export, or the original, performs on a split."""

    size: int  # of its files, in bytes
    metric: str  # accuracy, rmse, loss, or relative error of the outputs
    value: float
    drop: float = 0.0  # how much worse than the original: percentage points of accuracy, else percent
    max_difference: float = 0.0  # largest absolute difference of an output from the original
    latency: dict[int, float] | None = None  # median, in milliseconds, by batch size
    throughput: float | None = None  # samples per second over the split


class Metric:
    """Accumulates the metric of outputs over batches."""

    def __init__(self, kind: str) -> None:
        self.kind, self.total, self.count = kind, 0.0, 0.0

    def update(self, output: Tensor, target: Tensor | None, reference: Tensor) -> None:
        """Add a batch."""
        self.kind = self.kind or infer_kind(output, target)
        if self.kind == "classification" and target is not None:
            self.total += float((output.argmax(-1) == target).sum())
            self.count += len(target)
        elif self.kind == "regression" and target is not None:
            self.total += float((output.double() - target.view_as(output)).square().sum())
            self.count += output.numel()
        elif self.kind == "language_modeling" and target is not None:
            logits = output.flatten(0, -2)
            self.total += float(F.cross_entropy(logits, target.long().flatten(), reduction="sum"))
            self.count += len(logits)
        else:
            self.kind = "outputs"
            self.total += float((output.double() - reference).square().sum())
            self.count += float(reference.double().square().sum())

    @property
    def name(self) -> str:
        """Name of the metric."""
        names = {"classification": "accuracy", "regression": "rmse", "language_modeling": "loss"}
        return names.get(self.kind, "relative error")

    @property
    def value(self) -> float:
        """Value over all batches."""
        mean = self.total / self.count if self.count else float("nan")
        return float(mean**0.5) if self.kind in ("regression", "outputs") else mean

    def drop(self, reference: float) -> float:
        """How much worse this is than a reference: percentage points of accuracy, else percent."""
        if self.kind == "classification":
            return 100 * (reference - self.value)
        if self.kind == "outputs":
            return 100 * self.value
        if reference == 0:  # of which nothing is a percentage
            return 0.0 if self.value == 0 else math.inf
        return 100 * (self.value / reference - 1)


def infer_kind(output: Tensor, target: Tensor | None) -> str:
    """Infer what targets of any module are, as for the tables of an evaluation."""
    if target is None or target.ndim == 0 or len(target) != len(output):
        return "outputs"
    if not target.is_floating_point() and target.ndim == 1 and output.ndim == 2 and output.is_floating_point():
        return "classification"
    return "regression" if target.is_floating_point() and target.numel() == output.numel() else "outputs"


class Reference:
    """The original on a split."""

    def __init__(self, program: Program, batches: Callable[[], Iterable[Any]]) -> None:
        self.program, self.batches = program, batches

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor | None, list[Tensor], float]]:
        """Yield raw inputs, targets, outputs and seconds of each batch, in chunks whose outputs are not too large."""
        rows = 0
        for batch in self.batches():
            whole, targets = self.program.split(batch)
            count = self.program.count(whole)
            if not rows:
                one = self.call(*self.program.select([0], whole))
                rows = max(1, MAX_ELEMENTS // max(1, *(tensor.numel() for tensor in one)))
            for at in range(0, count, rows):
                chosen = [*range(at, min(at + rows, count))]
                inputs = whole if len(chosen) == count else self.program.select(chosen, whole)
                begin = time.perf_counter()
                outputs = self.call(*inputs)
                yield inputs, None if targets is None else targets[at : at + rows], outputs, time.perf_counter() - begin

    def call(self, *inputs: Tensor) -> list[Tensor]:
        """Outputs of the original."""
        with torch.inference_mode():
            return list(self.program(*inputs))

    def result(self, size: int) -> Result:
        """Measure the original."""
        metric, seconds, count = Metric(self.program.kind), 0.0, 0
        for inputs, targets, outputs, took in self:
            metric.update(outputs[0], targets, outputs[0])
            seconds, count = seconds + took, count + self.program.count(inputs)
        latency = {rows: runner.measure(partial(self.call, *inputs)) for rows, inputs in self.latency_inputs().items()}
        return Result(size, metric.name, metric.value, latency=latency, throughput=count / seconds)

    def latency_inputs(self) -> dict[int, Inputs]:
        """Inputs of the batch sizes whose latency is measured."""
        example = self.program.example
        count = self.program.count(example)
        return {
            size: self.program.select([sample % count for sample in range(size)], example) for size in LATENCY_BATCHES
        }


def verify(reference: Reference, original: Result, folder: Path, own: Collection[str]) -> Result:
    """Load an export in a new process, and compare it with the original on the whole split.

    Args:
        reference: The original and the split.
        original: Result of the original.
        folder: Folder of the export.
        own: Packages that the process must not have imported, such as the project's.

    Raises:
        ExportError: The process fails, has imported such a package, or returns NaN where the original does not.
    """
    if (weights := folder / "model.safetensors").is_file():  # without a program that could need something else
        return compare_weights(reference.program, weights, original)
    metric, difference, seconds, count = Metric(reference.program.kind), 0.0, 0.0, 0
    with closing(Process(folder, torch.get_num_threads())) as process:
        if imported := sorted(set(own) & {name.partition(".")[0] for name in process.modules}):
            raise ExportError(f"export: the new process has imported {imported[0]}; remove it from site-packages/*.pth")
        for inputs, targets, expected, _ in reference:
            outputs, took = process.run(inputs)
            for output, wanted in zip(outputs, expected, strict=True):
                difference = max(difference, largest_difference(output, wanted))
            metric.update(outputs[0], targets, expected[0])
            seconds, count = seconds + took, count + reference.program.count(inputs)
        latency = {rows: process.measure(inputs) for rows, inputs in reference.latency_inputs().items()}
        if reference.program.cache:
            check_cache(reference.program, process)
    drop = metric.drop(original.value)
    size = folder_size(folder)
    return Result(size, metric.name, metric.value, drop, difference, latency, count / seconds)


def check_cache(program: Program, process: Process) -> None:
    """Check that an export of a language model returns the same logits with its cache as without."""
    tokens = program.example[0][:1, : min(MAX_CACHED, program.max_length or 2)]
    (whole, *_), _ = process.run((tokens,))
    if not (error := float((process.generate(tokens) - whole).norm() / whole.norm())) <= MAX_CACHE_ERROR:
        name = type(program.core).__name__
        raise ExportError(
            f"export: {name} returns other logits with its cache (by {error:.1%}); set {name}.supports_cache = False"
        )


def largest_difference(output: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference of an output from that of the original; both may be infinite or NaN.

    Raises:
        ExportError: Only one of them is NaN.
    """
    is_equal = (output == wanted) | (output.isnan() & wanted.isnan())
    errors = (output.double() - wanted.double()).abs().masked_fill(is_equal, 0)
    if errors.isnan().any():
        raise ExportError("export: an output is NaN where that of the original is not; use another format")
    return float(errors.max()) if errors.numel() else 0.0


def compare_weights(program: Program, path: Path, original: Result) -> Result:
    """Compare plain weights with those of the original, bit by bit."""
    from safetensors.torch import load_file

    state = program.core.state_dict()
    for name, weight in load_file(path).items():
        ours, theirs = (tensor.detach().contiguous().flatten() for tensor in (weight, state[name]))
        if ours.dtype != theirs.dtype or not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise ExportError(f"export=safetensors: {name} differs from the checkpoint; export it again")
    return Result(folder_size(path.parent), original.metric, original.value)


def folder_size(folder: Path) -> int:
    """Size in bytes of the files that a program needs to run the export."""
    return sum(path.stat().st_size for path in folder.glob("model.*"))


class Process:
    """The runner in a process of its own, with which arrays are exchanged.

    Attributes:
        modules: Modules that the process has imported.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads could fill up)
        self.connection, theirs = Pipe()
        arguments = [runner.__file__, str(folder.absolute()), str(threads), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        try:
            self.modules: list[str] = self._receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait()
        self.errors.close()

    def run(self, inputs: Inputs) -> tuple[list[Tensor], float]:
        """Outputs for a batch, and the time that they took in seconds."""
        outputs, seconds = self._ask("run", inputs)
        return [torch.from_numpy(output) for output in outputs], seconds

    def generate(self, tokens: Tensor) -> Tensor:
        """Logits of tokens, of which the second half is given one at a time."""
        return torch.from_numpy(self._ask("generate", (tokens,)))

    def measure(self, inputs: Inputs) -> float:
        """Median latency of a batch in milliseconds."""
        milliseconds: float = self._ask("measure", inputs)
        return milliseconds

    def _ask(self, what: str, inputs: Inputs) -> Any:
        with suppress(ConnectionError):  # the process has ended, for a reason that follows
            self.connection.send((what, [tensor.numpy() for tensor in inputs]))
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            status = self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().split("\n")[-1] or f"exit status {status}"
            raise ExportError(
                f"export: the file fails in a new process: {last}; report this with your versions"
            ) from None
