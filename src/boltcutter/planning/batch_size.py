"""Search for the largest batch size that fits into memory."""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from boltcutter.config.errors import ConfigError
from boltcutter.config.values import last_of_each, split_overrides
from boltcutter.project import Project
from boltcutter.topology import count_devices

TRIAL = ["trainer.limit_train_batches=3", "trainer.max_epochs=1", "trainer.limit_val_batches=2"]
TRIAL += ["trainer.log_every_n_steps=1", "logger=null", "test=false", "report=false"]
NO_MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED", re.I)
TOO_FEW = re.compile(r"samples are too few|no batch")
CLOSE = 1.1  # the search ends if the smallest failing size is at most this factor larger


class TrialError(RuntimeError):
    """A trial failed for another reason than lack of memory."""

    hide_traceback = True


def find_batch_size_command(project: Project, overrides: list[str]) -> None:
    """Double ``data.batch_size`` until three steps fail, then bisect; each trial runs in new processes.

    Args:
        project: Project whose configuration is used.
        overrides: Overrides of training, and ``limit_gib=…``: memory limit of each process on a CPU, by default
            90% of the free memory.

    Raises:
        ConfigError: An override is wrong.
        TrialError: No batch size fits, or a trial failed for another reason.
    """
    special, overrides = split_overrides(overrides, "limit_gib")
    try:
        limit = float(special.get("limit_gib", "1"))
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ConfigError(f"limit_gib={special['limit_gib']} is not a number of GiB; try 4")
    os.environ.update(project.environment)
    train = [sys.executable, *project.train_command]
    printed = _run([*train, "--print", *overrides])
    if printed.returncode:
        raise ConfigError(*_messages(printed.stderr))
    if "limit_gib" not in special:
        from boltcutter.checks.resources import available_memory  # imports torch, which mistakes need not wait for

        limit = 0.9 * available_memory() / 2**30
    start, unit = first_size(yaml.safe_load(printed.stdout))
    with tempfile.TemporaryDirectory() as scratch:
        best = search(start, unit, partial(trial, train, overrides, limit, Path(scratch)))
    if best is None:
        raise TrialError(f"data.batch_size={unit} does not fit; use a smaller model, or trainer.precision=bf16-mixed")
    print(f"data.batch_size={best}")


def first_size(cfg: dict[str, Any]) -> tuple[int, int]:
    """Return the batch size to start with, and the unit of which all sizes are multiples."""
    size, unit = cfg["data"].get("batch_size"), batch_unit(cfg["trainer"])
    if type(size) is not int or size < 1:
        raise ConfigError(f"data.batch_size={size} is not a number of samples to start with; try data.batch_size=64")
    return max(unit, size // unit * unit), unit


def batch_unit(trainer: dict[str, Any]) -> int:
    """Return the number of devices in settings of the trainer, over which a global batch divides."""
    import torch

    here = 1 if trainer.get("accelerator") == "cpu" else max(1, torch.cuda.device_count())
    return (count_devices(trainer) or here) * int(trainer.get("num_nodes", 1))


def search(start: int, unit: int, fits: Callable[[int], bool | None]) -> int | None:
    """Return the largest multiple of ``unit``, within 10%, for which ``fits`` is true; None if there is none."""
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
            # The geometric mean, as the size to start with may be far from the result.
            size = min(-(-math.isqrt(max(low, unit) * high) // unit) * unit, high - unit)
    return low or None


def trial(train: list[str], overrides: list[str], limit: float, scratch: Path, size: int) -> bool | None:
    """Return whether three steps with batches of ``size`` succeed; None if there are too few samples.

    Raises:
        ConfigError: The configuration has mistakes.
        TrialError: They fail for another reason than lack of memory.
    """
    folder = scratch / str(size)
    command = [*train, *last_of_each([*overrides, *TRIAL, f"folder={folder}", f"data.batch_size={size}"])]
    done = _run(command, limit)
    if done.returncode == 0:
        return True
    if done.returncode == -9 or NO_MEMORY.search(done.stderr):  # killed by the system for lack of memory
        return False
    if TOO_FEW.search(done.stderr):
        return None
    if done.returncode == 2:
        raise ConfigError(*_messages(done.stderr))
    raise TrialError(f"data.batch_size={size}: {_messages(done.stderr)[-1]}")


def _messages(stderr: str) -> list[str]:
    """Return the lines of an error without their prefix, and without notes, as on settings of a record."""
    lines = stderr.strip().splitlines()
    return [line.removeprefix("error: ") for line in lines if not line.startswith("note: ")] or lines


def _run(command: list[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 2**30),) * 2)

    return subprocess.run(command, capture_output=True, text=True, timeout=900, preexec_fn=limited)
