"""The run ID: identical in all processes of a run, and after the scheduler restarts it.

It does not rely on synchronized clocks. The ID is the first of these that is available:

1. ``BOLTCUTTER_RUN_ID``, set by a launcher, or by rank 0 for the processes that Lightning starts;
2. the SLURM job and step, and the overrides (unchanged by ``scontrol requeue``);
3. the job of a cloud platform, and the overrides (unchanged when the platform restarts the job);
4. the ``--rdzv-id`` of ``torchrun`` (unchanged by an elastic restart);
5. the ID that the first process to reach the ``MASTER_ADDR`` store writes there;
6. the current time and four random bytes.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from boltcutter.environment import platform_facts as platform
from boltcutter.environment import startup
from boltcutter.environment.process import in_slurm_step, is_rank_zero
from boltcutter.environment.this_process import this_process
from boltcutter.protocols import PlannedExit

RUN_ID_VARIABLE = "BOLTCUTTER_RUN_ID"
EXIT_TIMEOUT = 30.0  # seconds that a failed process keeps serving the store
RENDEZVOUS_TIMEOUT = 300.0  # seconds to wait for rank 0, whose node may still be booting
LATE = "rank 0 did not respond within {:.0f} s"
NOTE_AFTER = 10.0  # seconds after which it is said what is waited for
SILENCE = 30.0  # seconds after that for which a server of this machine that has accepted a connection may say nothing


class RendezvousError(RuntimeError):
    """Rank 0 cannot be reached at ``MASTER_ADDR`` and ``MASTER_PORT``."""

    hide_traceback = True


@contextmanager
def run_id(overrides: Sequence[str] = ()) -> Iterator[str]:
    """Determine the ID of this run, and pass it on to processes that are started inside the block.

    Args:
        overrides: Overrides of this run, which distinguish it from other runs of the same job.

    Raises:
        RendezvousError: Rank 0 cannot be reached.
    """
    given = os.environ.get(RUN_ID_VARIABLE)
    found = given or _slurm(overrides) or platform.job_run_id(overrides) or _torchrun() or _agree() or new_run_id()
    os.environ[RUN_ID_VARIABLE] = found
    try:
        with startup.announce_launcher():
            yield found
    except BaseException as error:
        if not isinstance(error, PlannedExit) or error.is_collective:
            _wait_for_ranks()
        raise
    finally:
        if not given:
            del os.environ[RUN_ID_VARIABLE]


def job_id() -> str | None:
    """The SLURM or torchrun job that this process belongs to; None outside of one."""
    return f"slurm-{_slurm_job()}" if "SLURM_JOB_ID" in os.environ else _torchrun()


def is_restarted() -> bool:
    """Whether SLURM or torchrun has restarted the job of this process."""
    return any(int(os.environ.get(name, 0)) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def isolate_attempts() -> None:
    """Give each torchrun restart its own key prefix in the agent's rendezvous store.

    On several nodes the agents count attempts independently, so nothing is changed there, and torchrun needs
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in its environment.
    """
    env = os.environ
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("GROUP_WORLD_SIZE") != "1" or attempt == "0":
        return
    from boltcutter.internals import prefix_rendezvous  # imports torch

    prefix_rendezvous(f"attempt-{attempt}")


def new_run_id() -> str:
    """A unique ID: the current time in seconds, and four random bytes."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _slurm(overrides: Sequence[str]) -> str | None:
    if not in_slurm_step():
        return None
    # The step alone is not unique: all commands of a shell that srun started belong to one step.
    return f"slurm-{_slurm_job()}.{os.environ['SLURM_STEP_ID']}-{platform.digest(overrides)}"


def _slurm_job() -> str:
    env = os.environ
    array = "SLURM_ARRAY_JOB_ID" in env
    return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}" if array else env["SLURM_JOB_ID"]


def _torchrun() -> str | None:
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def _agree() -> str | None:
    """Agree on an ID with the other processes through the store at ``MASTER_ADDR``."""
    env = os.environ
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent_is_server = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = is_rank_zero() and not agent_is_server
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    _reach(address, port, connects=not is_server)
    place, timeout = f"MASTER_ADDR={address}, MASTER_PORT={port}", timedelta(seconds=RENDEZVOUS_TIMEOUT)
    make = partial(TCPStore, address, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True)
    store = _answer_of(make, place, SILENCE if _is_here(address) else RENDEZVOUS_TIMEOUT)
    if isinstance(store, RuntimeError):
        reason = str(store).splitlines()[0][:160]
        fault = "the port cannot be used" if is_server else LATE.format(RENDEZVOUS_TIMEOUT)
        raise RendezvousError(f"{place}: {fault} ({reason}); correct them")
    if isinstance(store, Exception):
        raise store
    store.add("arrived", 1)
    if is_server:
        this_process.rendezvous_stores.append(store)  # keeps the server running until this process ends
    agreed: str = store.compare_set("run_id", "", new_run_id()).decode()
    return agreed


def _reach(address: str, port: int, *, connects: bool) -> None:
    """Wait until an address is known and, if ``connects``, answers; torch would print its own stack at each attempt.

    Raises:
        RendezvousError: It is not, within ``RENDEZVOUS_TIMEOUT`` seconds.
    """
    begin, is_said, place = time.monotonic(), False, f"MASTER_ADDR={address}, MASTER_PORT={port}"
    while True:
        try:
            if connects:
                socket.create_connection((address, port), timeout=5).close()
            else:
                socket.getaddrinfo(address, port)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if time.monotonic() - begin > RENDEZVOUS_TIMEOUT:
            raise RendezvousError(f"{place}: {LATE.format(RENDEZVOUS_TIMEOUT)} ({reason}); correct them")
        if not is_said and time.monotonic() - begin > NOTE_AFTER:
            _say_waiting(place, reason, RENDEZVOUS_TIMEOUT)
            is_said = True
        time.sleep(0.2)


def _is_here(address: str) -> bool:
    """Whether an address is of this machine, so that it is the server itself that has accepted a connection.

    On the way to another one, a proxy may accept it before rank 0 has started.
    """
    with suppress(OSError), socket.create_server((socket.gethostbyname(address), 0)):
        return True
    return False


def _answer_of(connect: Callable[[], Any], place: str, timeout: float) -> Any:
    """What ``connect`` returns, or its exception; it may wait for an answer of another program for ever.

    Raises:
        RendezvousError: There is no answer within ``timeout`` seconds.
    """
    answers = SimpleQueue[Any]()

    def wait() -> None:
        try:
            answers.put(connect())
        except Exception as error:  # raised in the thread that waits
            answers.put(error)

    Thread(target=wait, daemon=True).start()
    with suppress(Empty):
        return answers.get(timeout=NOTE_AFTER)
    _say_waiting(place, "there is no answer yet", timeout)
    with suppress(Empty):
        return answers.get(timeout=timeout)
    raise RendezvousError(f"{place}: {LATE.format(timeout)} (it may be the port of another program); correct them")


def _say_waiting(place: str, reason: str, timeout: float) -> None:
    print(f"note: {place}: {reason}; waiting for rank 0 for {timeout:.0f} s", file=sys.stderr)


def _wait_for_ranks() -> None:
    """Keep serving the store until all processes have connected; a later one would wait for minutes."""
    env, end = os.environ, time.monotonic() + EXIT_TIMEOUT
    # Either every rank was started externally, and RANK is set, or one process for each node.
    expected = env.get("WORLD_SIZE", 1) if "RANK" in env else env.get(platform.NODES, env.get("WORLD_SIZE", 1))
    for store in this_process.rendezvous_stores:
        while store.add("arrived", 0) < int(expected) and time.monotonic() < end:
            time.sleep(0.05)
