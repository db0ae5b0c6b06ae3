"""Speed and memory as metrics of a try, from what each training has measured itself, and what else the machine did.

They differ between runs of the same training, so that runs of the baseline are never reused, who runs first is drawn,
and the CPUs and GPUs that other processes use meanwhile are reported.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.analysis.scale import Scale
from boltcutter.run.metrics import read_rows

TIME, MEMORY = "time/step", "memory/peak"
SCALES = {TIME: Scale(1000.0, " ms"), MEMORY: Scale(1.0, " GiB")}  # of each of these metrics; smaller is better
RATES = ("throughput/samples_per_second_epoch", "throughput/batches_per_second_epoch")
REMEDY = {
    TIME: "keep callback.throughput, and train for an epoch at least",
    MEMORY: "keep callback.throughput, and set trainer.log_every_n_steps to less than the steps of the training",
}
BUSY_SHARE = 0.1  # of all CPUs: from there on, what other processes use is reported
GPU_SHARE = 5  # percent of the time of a GPU


def is_measured(metric: str) -> bool:
    """Whether a metric is one of speed or memory."""
    return metric in SCALES


def measure(folder: Path, settings: Mapping[str, Any], metric: str) -> float | None:
    """What a training has measured; None if it has not.

    The time of an optimizer step, in seconds without validation, is the median over epochs, of which the first is left
    out if there are others, as it compiles and warms up. Memory is the peak in GiB, of the device if it is a CUDA
    device, else of the process.

    Args:
        folder: Folder of the run.
        settings: Settings of the run by dotted key.
        metric: ``time/step`` or ``memory/peak``.
    """
    rows = [values for _, values in read_rows(folder / run_files.METRICS)]
    if metric == MEMORY:
        return max((row["throughput/memory_gib"] for row in rows if "throughput/memory_gib" in row), default=None)
    batches = settings.get("trainer.accumulate_grad_batches") or 1
    for name, units in zip(RATES, (settings.get("data.batch_size"), 1), strict=True):
        rates = [row[name] for row in rows if row.get(name)]
        if rates and isinstance(units, int) and isinstance(batches, int):
            return batches * units / statistics.median(rates[1:] or rates)
    return None


class OtherLoad:
    """The CPUs that other processes use while a run trains; it begins when it is created."""

    def __init__(self) -> None:
        self._begin = (time.monotonic(), *_cpu_seconds())
        self._gpu = gpu_share()

    def end(self) -> tuple[float, float]:
        """The mean number of CPUs, and the percentage of the time of a GPU before the run."""
        seconds, used, own = (
            now - then for now, then in zip((time.monotonic(), *_cpu_seconds()), self._begin, strict=True)
        )
        return (max(used - own, 0.0) / seconds if seconds else 0.0), self._gpu


def _cpu_seconds() -> tuple[float, float]:
    """CPU time of all processes of this machine, and of this process with its children; equal where it is unknown."""
    own = sum(os.times()[:4])
    with suppress(OSError, ValueError, IndexError):
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        return sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK"), own
    return own, own


def gpu_share() -> float:
    """The percentage of the time in which the busiest GPU computes, as no run of the try does; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0.0
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    found = list[float]()
    for wait in (1.5, 0.0):  # the first look may still see the run before
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            found.append(max(map(float, text.split()), default=0.0))
        if not found or found[-1] <= GPU_SHARE:
            break
        time.sleep(wait)
    return found[-1] if found else 0.0


def format_value(metric: str, value: float) -> str:
    """A value of a metric, with its unit if it is one of speed or memory."""
    scale = SCALES.get(metric)
    return f"{value * scale.factor:.4g}{scale.unit}" if scale else f"{value:.4g}"


def describe_load(cpus: float, gpu: float) -> str:
    """What other processes use; empty if it is little."""
    parts = [f"{cpus:.1f} of {os.cpu_count()} CPUs"] * (cpus > BUSY_SHARE * (os.cpu_count() or 1))
    parts += [f"{gpu:.0f}% of a GPU"] * (gpu > GPU_SHARE)
    return f"other processes used {' and '.join(parts)}" if parts else ""
