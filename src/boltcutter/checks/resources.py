"""Cores and memory that a run shares with its ranks, with loader workers and with other programs."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import lightning as L
import torch

from boltcutter.environment import threads
from boltcutter.environment.this_process import this_process
from boltcutter.topology import Topology

SHARED_MEMORY = "/dev/shm"  # noqa: S108
MIB_PER_WORKER = 256  # some batches of images; a container has 64 MiB in all by default


class ResourceNotes(L.Callback):
    """Prints a line if the machine has fewer free cores, or less shared memory, than training will use."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the lines."""
        if trainer.is_global_zero:
            on_cpu = pl_module.device.type == "cpu"
            lines = [describe_contention(trainer) if on_cpu else None, describe_shared_memory(trainer)]
            print("".join(f"{line}\n" for line in lines if line), end="")


def available_memory() -> int:
    """Available memory of the host, in bytes; all of it where this is unknown."""
    with suppress(OSError):
        line = re.search(r"MemAvailable: *([0-9]+)", Path("/proc/meminfo").read_text())
        if line:
            return int(line[1]) * 2**10
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def describe_contention(trainer: L.Trainer) -> str | None:
    """Return a line for the user if a run has more threads than cores were free when this process started."""
    own, ranks, free = torch.get_num_threads(), Topology.of(trainer).num_processes, this_process.free_cores
    if free is None or own == 1 or own * ranks <= free:
        return None
    per_rank = getattr(trainer.datamodule, "num_workers", 0)  # type: ignore[attr-defined]
    workers = per_rank * ranks if isinstance(per_rank, int) else 0
    others = f" and {workers} loader workers" if workers else ""
    fewer = max(1, int(free - workers) // ranks)
    return (
        f"threads: {own * ranks}{others}, but about {free:.0f} of {threads.available_cores()} cores are free, so a "
        f"small model may train several times slower; try OMP_NUM_THREADS={fewer}"
    )


def describe_shared_memory(trainer: L.Trainer) -> str | None:
    """Return a line for the user if the shared memory of this node may be too small for its DataLoader workers."""
    per_rank = getattr(trainer.datamodule, "num_workers", 0)  # type: ignore[attr-defined]
    workers = per_rank * Topology.of(trainer).num_devices if isinstance(per_rank, int) else 0
    try:
        size = shutil.disk_usage(SHARED_MEMORY).total / 2**20
    except OSError:  # not on Linux
        return None
    if size >= workers * MIB_PER_WORKER:
        return None
    return (
        f"shared memory: {SHARED_MEMORY} has {size:.0f} MiB, through which {workers} loader workers pass batches; if "
        "one dies with a bus error, try data.num_workers=0, or enlarge it (launch.shm_size, docker run --shm-size)"
    )
