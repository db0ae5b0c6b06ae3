"""The largest batch that fits into memory, found by trying."""

from __future__ import annotations

import math
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from boltcutter.project import Project

TRIAL = ["trainer.limit_train_batches=3", "trainer.max_epochs=1", "trainer.limit_val_batches=2"]
TRIAL += ["trainer.log_every_n_steps=1", "logger=null", "test=false", "report=false"]
NO_MEMORY = re.compile(r"out of memory")
TOO_FEW = re.compile(r"samples are too few|no batch")
CLOSE = 1.1  # so near the next larger one that fails that the search ends


class TrialError(RuntimeError):
    """A trial failed for another reason than memory."""

    hide_traceback = True


def main(project: Project, words: list[str]) -> None:
    """Double ``data.batch_size`` until three steps fail, then halve the gap; each trial in fresh processes.

    Args:
        project: Whose configuration is used.
        words: Those of training, and ``limit_gib=…``: memory that each process on a CPU may take; by default nine
            tenths of what is free.
    """
    limits = [word.partition("=")[2] for word in words if word.startswith("limit_gib=")]
    words = [word for word in words if not word.startswith("limit_gib=")]
    try:
        limit = float(limits[-1]) if limits else 0.9 * free_gib()
    except ValueError:
        limit = 0.0
    if limit <= 0:
        raise TrialError(f"limit_gib={limits[-1]} is not a number of GiB; try 4")
    script = project.root / "scripts" / "train.py"
    printed = _run([sys.executable, str(script), "--print", *words])
    if printed.returncode:
        raise TrialError(printed.stderr.strip().removeprefix("error: "))
    cfg = yaml.safe_load(printed.stdout)
    start, ranks = cfg["data"]["batch_size"], [cfg["trainer"].get(key, 1) for key in ("devices", "num_nodes")]
    unit = math.prod(number for number in ranks if isinstance(number, int) and number > 0)
    with tempfile.TemporaryDirectory() as scratch:
        fits = partial(trial, script, words, limit, Path(scratch))
        best = search(start, unit, fits)
    if best is None:
        raise TrialError(f"data.batch_size={unit} does not fit; take a smaller model, or trainer.precision=bf16-mixed")
    print(f"data.batch_size={best}")


def search(start: int, unit: int, fits: Callable[[int], bool | None]) -> int | None:
    """The largest size, within a tenth, for which ``fits`` is true; None if there is none.

    Args:
        start: The first size to try.
        unit: What every size is a multiple of.
        fits: Whether a size fits; None where there are too few samples for it.
    """
    low, high, size = 0, None, start
    while low < size != high:
        good = fits(size)
        print(f"{size:10,} {'fits' if good else 'too few samples' if good is None else 'does not fit'}", flush=True)
        low, high = (size, high) if good else (low, size)
        if high is None:
            size = 2 * low
        elif high <= low * CLOSE:
            break
        else:
            size = (low + high) // 2 // unit * unit
    return low or None


def trial(script: Path, words: list[str], limit: float, scratch: Path, size: int) -> bool | None:
    """Whether three steps with batches of ``size`` go through.

    Raises:
        TrialError: They fail for another reason than memory.
    """
    folder = scratch / str(size)
    command = [sys.executable, str(script), *words, *TRIAL, f"folder={folder}", f"data.batch_size={size}"]
    done = _run(command, limit)
    if done.returncode == 0:
        return True
    if done.returncode == -9 or NO_MEMORY.search(done.stderr):  # the system kills what takes all of its memory
        return False
    if TOO_FEW.search(done.stderr):
        return None
    raise TrialError(f"data.batch_size={size}: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")


def free_gib() -> float:
    """Memory that the machine can give."""
    found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20 if found else 1.0


def _run(command: list[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 2**30),) * 2)

    return subprocess.run(command, capture_output=True, text=True, timeout=900, preexec_fn=limited)
