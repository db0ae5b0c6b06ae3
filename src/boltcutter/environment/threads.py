"""CPU threads of a process that shares the cores with its ranks, with loader workers and with other programs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from boltcutter.environment.this_process import this_process

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # variables of OpenMP for how threads wait
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds per period
LOAD = Path("/proc/loadavg")  # mean load of 1, 5 and 15 minutes, running/all threads, and the last process ID


def available_cores() -> int:
    """Number of cores that this process may use: by its affinity, and by the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def count_free_cores() -> float:
    """Number of available cores that no other program uses, by the load of the last minute and of this moment."""
    cores, busy = available_cores(), 0.0
    with suppress(OSError, ValueError):
        load, _, _, running, _ = LOAD.read_text().split()
        busy = min(float(load), int(running.partition("/")[0]) - 1)
    return max(0.0, min(cores, (os.cpu_count() or 1) - busy))


def prepare() -> None:
    """Let threads sleep rather than spin while they wait for one another, if others use the machine as well.

    A spinning thread occupies the core that the thread needs for which it waits. Unlike the number of threads, waiting
    does not change results. OpenMP reads the variable when torch is imported.
    """
    this_process.free_cores = free = count_free_cores()
    if available_cores() - free >= 1 and "torch" not in sys.modules and not os.environ.keys() & {*WAITING}:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def limit_threads(num_processes: int) -> None:
    """Use no more threads than this process has cores, unless ``OMP_NUM_THREADS`` is set.

    Args:
        num_processes: Ranks on this machine, which share its cores.
    """
    import torch

    threads = max(1, available_cores() // max(1, num_processes))
    if "OMP_NUM_THREADS" not in os.environ and threads < torch.get_num_threads():
        torch.set_num_threads(threads)
