"""The rank of this process, known before Lightning is set up, and its shutdown together with the other ranks."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from boltcutter.environment.this_process import this_process
from boltcutter.protocols import PlannedExit

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MAX_MMAP_THRESHOLD = 32 << 20  # bytes; glibc accepts no larger value
CHILD_TIMEOUT = 8.0  # seconds that a child process has to exit by itself


def is_rank_zero(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this is global rank 0, or the only process: the one that prints and writes files.

    Where no launcher has set the rank, ``LOCAL_RANK`` and ``NODE_RANK`` say it: Lightning sets them for its child
    processes, or a user does for each node.
    """
    rank = launched_rank(env)
    if rank is not None:
        return not _is_above_zero(rank)
    return not any(_is_above_zero(env.get(name, "0")) for name in ("LOCAL_RANK", "NODE_RANK"))


def launched_rank(env: Mapping[str, str] = os.environ) -> str | None:
    """The global rank that a launcher has set, as text; None if there is none, as where Lightning starts the ranks.

    ``RANK`` is set by torchrun and Kubeflow, ``SLURM_PROCID`` by srun (in an sbatch script it is meaningless),
    ``OMPI_COMM_WORLD_RANK`` and ``PMI_RANK`` by mpirun, ``HOROVOD_RANK`` by horovodrun.
    """
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK"]
    if in_slurm_step(env):
        names.append("SLURM_PROCID")
    return next((env[name] for name in names if name in env), None)


def _is_above_zero(rank: str) -> bool:
    """Whether a rank is not 0; what is no number, which ``variables`` refuses, is reported by each process."""
    return rank.isascii() and rank.strip().isdecimal() and int(rank) > 0


def external_world_size(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """World size and local world size of processes started by torchrun, or manually with its variables; else None."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys():
        return None
    return int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))


@contextmanager
def distributed_shutdown(*, at_exit: bool = False) -> Iterator[None]:
    """Wait for the other ranks after the block, and destroy the process group.

    An interpreter that exits while gloo's threads are running is occasionally aborted, so that a completed run would
    return a failure.

    Args:
        at_exit: Whether to do so only when the process ends, if the block succeeds: a program may go on with Lightning,
            and torch waits for ever for a second group of ranks that torchrun has started.
    """
    try:
        yield
    except SystemExit as error:
        is_collective = not isinstance(error, PlannedExit) or error.is_collective
        _destroy_process_group(wait=is_collective)
        if not is_collective:
            _end_children()
        raise
    except BaseException:
        _destroy_process_group(wait=False)  # closes the connections, which notifies the other ranks
        _end_children()
        raise
    if at_exit:
        _note_rank()
        atexit.register(_destroy_process_group, wait=False)  # what follows is the program's, whose ranks may end apart
    else:
        _destroy_process_group()


def retain_freed_memory() -> bool:
    """Configure glibc to keep freed memory for the tensors of the next step.

    By default it returns freed memory to the operating system, so that each page is allocated and zeroed again,
    thousands of times a step. Settings of glibc's allocator in the environment take precedence; other platforms are
    not changed. Returns whether glibc keeps freed memory.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    limits = ((M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, 2**31 - 1))
    return all(call_glibc("mallopt", *limit) for limit in limits)


def call_glibc(name: str, *args: int) -> bool:
    """Call a function of the C library; return whether it exists and returned a non-zero value."""
    import ctypes

    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return bool(function and function(*args))


def c_handler(number: int) -> int:
    """The address of the function that the system calls at a signal; 0: the default action, or unknown."""
    import ctypes

    if sys.platform != "linux":
        return 0
    action = (ctypes.c_void_p * 64)()  # larger than the structure, whose first field is the function
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or 0


def distributed_rank() -> int | None:
    """The rank that this process had in a process group of several ranks; None if there was no such group."""
    return this_process.distributed_rank


def track_children(launcher: Any) -> None:
    """Register a launcher whose processes, ``procs``, must not outlive this one.

    Not the list: Lightning binds another one when it starts them.
    """
    this_process.launcher = launcher


def _end_children() -> None:
    """Give the children time to notice and report that this process failed, then kill them."""
    end = time.monotonic() + CHILD_TIMEOUT
    for child in getattr(this_process.launcher, "procs", []):
        is_running = child.is_alive if hasattr(child, "is_alive") else lambda child=child: child.poll() is None
        while is_running() and time.monotonic() < end:
            time.sleep(0.05)
        if is_running():
            child.kill()
            (child.join if hasattr(child, "join") else child.wait)()


def _note_rank() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        this_process.distributed_rank = dist.get_rank()


def _destroy_process_group(*, wait: bool = True) -> None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    _note_rank()
    if not wait:
        if "nccl" in dist.get_backend_config():  # whose destruction waits for kernels, which wait for the other ranks
            _abort_process_group()
        else:
            dist.destroy_process_group()
        return
    with suppress(RuntimeError):  # raised if a rank has died
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=60))
        else:
            dist.barrier()
    dist.destroy_process_group()


def _abort_process_group() -> None:
    """End the collectives of this rank, also those that wait for another; if that fails, end the process."""
    import torch.distributed as dist

    def end_process() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    watchdog = threading.Timer(CHILD_TIMEOUT, end_process)
    watchdog.daemon = True
    watchdog.start()
    dist.distributed_c10d._abort_process_group()
    watchdog.cancel()


def in_slurm_step(env: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process, rather than an interactive shell in an allocation."""
    return "SLURM_STEP_ID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def pid_namespace() -> str:
    """Boot ID and PID namespace, within which a process ID identifies one process; empty if unknown."""
    if sys.platform != "linux":
        return sys.platform
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


LOCAL_JOB = re.compile(r"([0-9]+) on (\S+) since (.*)")  # pid, host and start time of a process, as the id of a job


def start_time(pid: int) -> str | None:
    """Start time of a process; empty if it has exited, None if it is running and its start time is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # exited, hidden because another user owns it, or no /proc
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return None
    return "" if fields[0] in "ZX" else fields[19]
