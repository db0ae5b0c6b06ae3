"""What Ray's workers execute: each starts the training of one rank as a child process, as torchrun does.

Ray sends this module to its workers by value, so it imports only Ray and the standard library.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import BackendConfig, get_context
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero

POLL_SECONDS = 0.5  # between two checks of the child process
FAILURE_GRACE = 60.0  # seconds that ranks have to exit after another one has failed
FIRST_SIGNAL_STATUS = 128  # a process that handles a signal exits with this number plus that of the signal


class Control:
    """What the driver and the workers know of each other; an actor on the node of the driver."""

    def __init__(self) -> None:
        self._attempt = -1
        self._codes: dict[int, int] = {}
        self._signals: list[int] = []
        self._events: list[str] = []
        self._failed_at: float | None = None

    def start(self) -> int:
        """Begin an attempt, and return its number; -1 if the run was cancelled."""
        if self._signals:
            return -1
        self._attempt += 1
        self._codes, self._failed_at = {}, None
        return self._attempt

    def poll(self, attempt: int) -> tuple[list[int], bool]:
        """Signals to forward to the child process, and whether to kill it."""
        late = self._failed_at is not None and time.monotonic() - self._failed_at > FAILURE_GRACE
        return self._signals, late or attempt != self._attempt

    def send(self, number: int) -> None:
        """Send a signal to all ranks, after which nothing is restarted."""
        self._signals.append(number)

    def end(self, attempt: int, rank: int, code: int, event: str) -> bool:
        """Record the exit code of a rank, negative if a signal killed it; returns whether the run was cancelled."""
        if attempt == self._attempt:
            self._codes[rank] = code
            if code:
                self._failed_at = self._failed_at or time.monotonic()
                self._events.append(event)
        return bool(self._signals)

    def state(self) -> tuple[int, list[int], list[str]]:
        """The attempt, its exit codes in the order in which ranks ended, and the events since the last call."""
        events, self._events = self._events, []
        return self._attempt, list(self._codes.values()), events


class SharedDevices(BackendConfig):
    """No process group in the workers; the GPUs of all workers on a node are visible to each, as for torchrun."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that Ray Train sets up."""
        return _SharedDevices


class _SharedDevices(Backend):
    share_cuda_visible_devices = True


class RankKilledError(RuntimeError):
    """A child process was killed, so Ray Train restarts all workers."""


def train(config: dict[str, Any]) -> None:
    """Start the training of this rank, and wait for it.

    Args:
        config: ``control``, ``command``, ``environment``, ``cwd``, ``log``, ``run_id``, ``devices``, ``gpus``.

    Raises:
        RankKilledError: The child process was killed or preempted, and the run was not cancelled.
    """
    context, control = get_context(), config["control"]
    rank, world_size, devices = context.get_world_rank(), context.get_world_size(), config["devices"]
    address = ray.util.get_node_ip_address() if world_size > devices else "127.0.0.1"  # type: ignore[no-untyped-call]
    found = (ray.get(control.start.remote()), address, _free_port()) if rank == 0 else None
    attempt, address, port = broadcast_from_rank_zero(found)
    if attempt < 0:
        return
    if config["gpus"] and context.get_local_world_size() != devices:
        event = f"trainer.devices={devices}: Ray placed {context.get_local_world_size()} workers on a node with GPUs"
        ray.get(control.end.remote(attempt, rank, 2, f"{event}; try trainer.devices=1"))
        return
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank % devices,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": devices,
        "GROUP_RANK": rank // devices,
        "GROUP_WORLD_SIZE": world_size // devices,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": config["run_id"],
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "BOLTCUTTER_PARENT_PID": os.getpid(),
    }
    environment = {**os.environ, **config["environment"], **{name: str(value) for name, value in variables.items()}}
    code = _run(config, environment, attempt)
    killed = code < 0 or code > FIRST_SIGNAL_STATUS
    number = -code if code < 0 else code - FIRST_SIGNAL_STATUS
    event = f"rank {rank} was killed by {_name(number)}" if killed else f"rank {rank} exited with status {code}"
    cancelled = ray.get(control.end.remote(attempt, rank, code, event))
    if killed and not cancelled:
        raise RankKilledError(event)


def _run(config: dict[str, Any], environment: dict[str, str], attempt: int) -> int:
    """Run the child process, forward signals to it, and return its exit code."""
    control, forwarded = config["control"], 0
    with Path(config["log"]).open("ab") as log:
        # Ray blocks SIGINT in its processes; a child process inherits the mask of the thread that starts it.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, [])
        child = subprocess.Popen(
            config["command"],
            env=environment,
            cwd=config["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while True:
            try:
                return child.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                signals, kill = ray.get(control.poll.remote(attempt))
            for number in signals[forwarded:]:
                child.send_signal(number)
            forwarded = len(signals)
            if kill:
                child.kill()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
