"""Shared by all benchmarks: processes pinned to cores, ratios, and reports."""

from __future__ import annotations

import itertools
import json
import os
import platform
import pty
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "scripts" / "train.py"
COUNTED = ("rounds", "turns", "steps", "batches", "epochs", "asks", "seconds")
SECONDS = 900  # timeout for the start of a process, and for a turn


class BenchmarkError(RuntimeError):
    """A measured process failed, its results differ from those of the other, or an option is invalid."""

    hide_traceback = True


@dataclass
class Ratio:
    """The ratio of two measurements.

    Args:
        what: Name of the numerator.
        over: Name of the denominator.
        value: Ratio of the medians.
        spread: Smallest and largest ratio of the rounds, or the 95% interval of the median.
        target: Upper bound of the ratio; with ``least``, lower bound.
        least: Whether ``target`` is a lower bound.
    """

    what: str
    over: str
    value: float
    spread: tuple[float, float]
    target: float | None = None
    least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        if self.target is None:
            return True
        return self.value >= self.target if self.least else self.value <= self.target


def ratio(
    what: str, mine: list[float], over: str, theirs: list[float], target: float | None = None, *, least: bool = False
) -> Ratio:
    """Return the ratio of the medians over rounds, with the spread of each round's ratio."""
    each = [a / b for a, b in zip(mine, theirs, strict=True)]
    value = statistics.median(mine) / statistics.median(theirs)
    return Ratio(what, over, value, (min(each), max(each)), target, least)


def ratio_of_turns(
    what: str,
    mine: list[list[float]],
    over: str,
    theirs: list[list[float]],
    target: float | None = None,
    *,
    least: bool = False,
) -> Ratio:
    """Return the median ratio of consecutive turns, with the spread of each round's median."""
    rounds = [[a / b for a, b in zip(*turns, strict=True)] for turns in zip(mine, theirs, strict=True)]
    each = [statistics.median(turns) for turns in rounds]
    value = statistics.median(itertools.chain(*rounds))
    return Ratio(what, over, value, (min(each), max(each)), target, least)


class Process:
    """A Python process that is pinned to cores, with one thread per core.

    Args:
        command: Arguments of ``python``.
        cores: Indices of the cores.
        terminal: Whether output goes to a pseudo-terminal, so that the progress bar is drawn.
        threads: Number of threads; by default one per core.
    """

    def __init__(
        self, command: Sequence[str], cores: Sequence[int], *, terminal: bool = False, threads: int | None = None
    ) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads or len(cores)), "TERM": "xterm", "COLUMNS": "120"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TRAIN.parent), env.get("PYTHONPATH")]))  # this package
        self.output = b""
        self._read, write = pty.openpty() if terminal else os.pipe()
        self._process = subprocess.Popen(
            [*_pinned(cores), sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            cwd=ROOT,
            env=env,
        )
        os.close(write)
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def wait(self, seconds: float = SECONDS) -> None:
        """Wait until the process ends.

        Raises:
            BenchmarkError: It failed or timed out.
        """
        try:
            code = self._process.wait(seconds)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise BenchmarkError(f"a measured process did not end in {seconds:.0f} s") from None
        self._drain.join(5)
        if code:
            lines = self.output.decode(errors="replace").strip().splitlines()
            raise BenchmarkError(f"a measured process ended with {code}: {lines[-1] if lines else 'no output'}")

    def _read_output(self) -> None:
        with suppress(OSError):  # raised at the end of a terminal's output
            while chunk := os.read(self._read, 1 << 16):
                self.output = (self.output + chunk)[-10_000:]
        os.close(self._read)


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration of ``train.py`` with these overrides.

    Raises:
        BenchmarkError: An override is invalid.
    """
    done = subprocess.run([sys.executable, str(TRAIN), "--print", *overrides], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise BenchmarkError(done.stderr.strip().removeprefix("error: "))
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


def parse_options(overrides: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """Parse ``key=value`` overrides of the default options.

    Raises:
        BenchmarkError: An option is unknown, or its value is invalid.
    """
    given = {name: value for name, _, value in (override.partition("=") for override in overrides)}
    for name, value in given.items():
        if name not in known:
            raise BenchmarkError(f"{name}: unknown option; choose from: {', '.join(known)}")
        counts = value.split(",") if name == "threads" else [value] * (name in COUNTED)
        if not all(count.isdecimal() and int(count) for count in counts):
            raise BenchmarkError(f"{name}={value}: not a positive integer; try {known[name] or 2}")
    return known | given


def cores(count: int | None = None) -> list[int]:
    """Return the first ``count`` cores available to this process, or all.

    Raises:
        BenchmarkError: There are fewer cores.
    """
    have = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if count is not None and count > len(have):
        raise BenchmarkError(f"threads={count}, but there are {len(have)} cores; use fewer")
    return have[:count]


def machine() -> str:
    """Describe the CPU, the number of cores, and the versions of Python, torch and Lightning."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        name = found.group(1).strip() if found else name
    made_of = ", ".join(f"{package} {version(package)}" for package in ("torch", "lightning"))
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {made_of}"


def report(name: str, folder: Path, ratios: Sequence[Ratio], details: Any) -> None:
    """Print a table of ratios, and write it as JSON, with ``details``, and as a bar chart."""
    print(f"{name}: {machine()}")
    width = max(len(r.what) for r in ratios)
    beside = max(len(r.over) for r in ratios)
    for r in ratios:
        target = "" if r.target is None else f"  {'≥' if r.least else '≤'} {r.target:.2f} {'' if r.met else 'missed'}"
        spread = f"({r.spread[0]:.3f}–{r.spread[1]:.3f})"
        print(f"{r.what:{width}}  / {r.over:{beside}}  {r.value:6.3f}  {spread}{target}".rstrip())
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "ratios": [{**asdict(r), "met": r.met} for r in ratios], "details": details}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    draw(folder / f"{name}.png", name, ratios)


def draw(file: Path, title: str, ratios: Sequence[Ratio]) -> None:
    """Draw a bar for each ratio, with its spread and its target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(ratios)), layout="constrained")
    for row, r in enumerate(ratios):
        axes.barh(row, r.value, color="tab:blue" if r.met else "tab:red")
        axes.plot(r.spread, [row, row], color="black", linewidth=1)
        if r.target is not None:
            axes.plot([r.target, r.target], [row - 0.4, row + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(ratios)), [f"{r.what} / {r.over}" for r in ratios])
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linestyle=":")
    axes.set_xlabel("ratio of medians; thin: spread over rounds, thick: target")
    axes.set_title(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _pinned(cores: Sequence[int]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores))] if which("taskset") else []
