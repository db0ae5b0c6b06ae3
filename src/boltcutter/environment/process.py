"""Which of the run's processes this is, before Lightning knows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_KEPT = 32 << 20  # bytes of one block; glibc takes no more
CHILD_SECONDS = 8.0  # in which a process that was started from here may end by itself

_rank_of_many: int | None = None
_children: list[Any] = []


def is_rank_zero(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the run's first process, or the only one: the one that speaks and writes.

    ``RANK`` is torchrun's and Kubeflow's, ``SLURM_PROCID`` that of srun (in an sbatch script it tells nothing),
    ``OMPI_COMM_WORLD_RANK`` and ``PMI_RANK`` are mpirun's, ``HOROVOD_RANK`` horovodrun's, ``LOCAL_RANK`` and
    ``NODE_RANK`` those of Lightning's children and of hand-started nodes.
    """
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK"]
    if in_slurm_step(env):
        names.append("SLURM_PROCID")
    told = next((env[name] for name in names if name in env), None)
    if told is not None:
        return int(told) == 0
    return int(env.get("LOCAL_RANK", 0)) == int(env.get("NODE_RANK", 0)) == 0


def external_world_size(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Processes that torchrun, or a person with its variables, has started: in all, and on this node; else None."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys():
        return None
    return int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))


@contextmanager
def distributed_shutdown() -> Iterator[None]:
    """After the block, wait for the other ranks and take the connection to them down.

    An interpreter that ends while gloo's threads still run is aborted now and then, and a finished run looks failed.
    """
    try:
        yield
    except SystemExit as error:
        together = getattr(error, "together", True)
        _disconnect(wait=together)
        if not together:
            _end_children()
        raise
    except BaseException:
        _disconnect(wait=False)  # the others learn of it now
        _end_children()
        raise
    _disconnect()


def retain_freed_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep what tensors give back, for those of the next step.

    Else it returns it to the system, and each page of it is asked for and filled with zeros again, thousands of times a
    step. Whoever sets variables of glibc's allocator decides that for himself, and other systems have their own.

    Returns:
        Whether it does.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        return False
    limits = ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, 2**31 - 1))
    return all(call_glibc("mallopt", *limit) for limit in limits)


def release_freed_memory() -> None:
    """Return to the system what is free, once."""
    call_glibc("malloc_trim", 0)


def call_glibc(name: str, *numbers: int) -> bool:
    """Whether a function of the C library is there and did what it is for."""
    import ctypes

    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return bool(function and function(*numbers))


def distributed_rank() -> int | None:
    """This process's rank among several that knew each other; None where there was one alone."""
    return _rank_of_many


def track_children(children: list[Any]) -> None:
    """Do not leave these processes (``subprocess.Popen``) behind when this one fails; the list may yet be empty."""
    global _children
    _children = children


def _end_children() -> None:
    """Wait for a while until they have seen for themselves, and told, that this process is gone."""
    end = time.monotonic() + CHILD_SECONDS
    for child in _children:
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if child.poll() is None:
            child.kill()
            child.wait()


def _disconnect(*, wait: bool = True) -> None:
    global _rank_of_many
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_world_size() > 1:
        _rank_of_many = dist.get_rank()
    if not wait:
        if dist.get_backend() != "nccl":  # to take that down can wait for the others
            dist.destroy_process_group()
        return
    with suppress(RuntimeError):  # a rank that has died is not waited for
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=60))
        else:
            dist.barrier()
    dist.destroy_process_group()


def in_slurm_step(env: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process, and not a person's shell in an allocation."""
    return "SLURM_STEP_ID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")
