"""One run, one name: the same in all of its processes, and again after a requeue.

No clock is shared. The name comes from the first of these that is there:

1. ``BOLTCUTTER_RUN_ID``, set by a launcher, or by the first process for those that Lightning starts;
2. the job and step that ``srun`` started, and what it trains (the same after ``scontrol requeue``);
3. the job of a cloud's platform, and what it trains (the same when the platform starts the job again);
4. the ``--rdzv-id`` of ``torchrun`` (the same after an elastic restart);
5. what the first process to reach the ``MASTER_ADDR`` store wrote there;
6. the time and four random bytes.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from boltcutter.environment import platform, startup
from boltcutter.environment.process import in_slurm_step, is_rank_zero

VARIABLE = "BOLTCUTTER_RUN_ID"
SECONDS = 30.0  # that a process which has failed stays for the others
PATIENCE = 300.0  # seconds to wait for the first process, whose machine may still be starting
_stores: list[Any] = []


class RendezvousError(RuntimeError):
    """The first process cannot be reached."""

    hide_traceback = True  # needs no traceback


@contextmanager
def run_id(words: Sequence[str] = ()) -> Iterator[str]:
    """This run's name; inside the block, processes started from here have the same.

    Args:
        words: What the run is to do, by which it differs from others of the same job.

    Raises:
        RendezvousError: The first process is not where it is said to be.
    """
    given = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = (
        given or _slurm(words) or platform.job_run_id(words) or _torchrun() or _agreed() or new_run_id()
    )
    try:
        with startup.starting_ranks():
            yield os.environ[VARIABLE]
    except BaseException as error:
        if getattr(error, "together", True):
            _wait_for_the_others()
        raise
    finally:
        if not given:
            del os.environ[VARIABLE]


def job_id(env: Mapping[str, str] = os.environ) -> str | None:
    """The job of SLURM or torchrun that this process belongs to, whichever command it runs; None outside of one."""
    if "SLURM_JOB_ID" in env:
        return "slurm-" + _slurm_job(env)
    return _torchrun(env)


def is_restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM or torchrun has started the job of this process before."""
    return any(int(env.get(name, 0)) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def digest(words: Sequence[str]) -> str:
    """Eight digits by which one command differs from another."""
    return f"{zlib.crc32(' '.join(words).encode()):08x}"


def new_run_id() -> str:
    """A name that nobody has: the second, and four random bytes."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _slurm(words: Sequence[str], env: Mapping[str, str] = os.environ) -> str | None:
    if not in_slurm_step(env):
        return None
    # All commands of a shell that srun started belong to one step.
    return f"slurm-{_slurm_job(env)}.{env['SLURM_STEP_ID']}-{digest(words)}"


def _slurm_job(env: Mapping[str, str]) -> str:
    array = "SLURM_ARRAY_JOB_ID" in env
    return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}" if array else env["SLURM_JOB_ID"]


def _torchrun(env: Mapping[str, str] = os.environ) -> str | None:
    name = env.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def _agreed() -> str | None:
    env = os.environ
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = is_rank_zero() and not agent_serves
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    try:
        store = TCPStore(
            address,
            port,
            is_master=serves,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=PATIENCE),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160]
        fault = "the port cannot be used" if serves else f"the first process did not answer in {PATIENCE:.0f} s"
        raise RendezvousError(f"MASTER_ADDR={address}, MASTER_PORT={port}: {fault} ({reason}); correct them") from None
    store.add("arrived", 1)
    if serves:
        _stores.append(store)  # it serves the others until this process ends
    return store.compare_set("run_id", "", new_run_id()).decode()


def _wait_for_the_others() -> None:
    """Serve the store until all have been there; one that came later would wait for it for minutes."""
    env, end = os.environ, time.monotonic() + SECONDS
    # One process on each node has been started, or all of them, of which each has its rank.
    others = env.get("WORLD_SIZE", 1) if "RANK" in env else env.get(platform.NODES, env.get("WORLD_SIZE", 1))
    for store in _stores:
        while store.add("arrived", 0) < int(others) and time.monotonic() < end:
            time.sleep(0.05)
