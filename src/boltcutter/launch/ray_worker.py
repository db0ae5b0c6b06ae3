"""What Ray executes on each node of a run: it starts a training process for each rank there, as torchrun does.

Ray sends this module to its workers by value, so it imports only Ray and the standard library.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import ray


class Node:
    """The ranks of one node; an actor, which reserves their CPUs and GPUs, all of which each rank can see."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def address(self) -> tuple[str, int]:
        """Return the address of this node, and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def start(
        self, command: Sequence[str], variables: Sequence[Mapping[str, str]], cwd: str | None, log: str | None
    ) -> None:
        """Start a process for each rank.

        Args:
            command: Program and arguments.
            variables: Environment variables of each rank.
            cwd: Working directory; None: that of Ray.
            log: File for the output; None: that of this actor, which Ray sends to the driver.
        """
        with ExitStack() as stack:
            out = stack.enter_context(open(log, "ab")) if log else None
            # Ray blocks SIGINT in its processes; a child process inherits the mask of the thread that starts it.
            before = signal.pthread_sigmask(signal.SIG_SETMASK, [])
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            for each in variables:
                env = {**os.environ, **each, "BOLTCUTTER_PARENT_PID": str(os.getpid())}
                options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True}
                self._children.append(subprocess.Popen(command, env=env, cwd=cwd, **options))  # type: ignore[call-overload]

    def poll(self) -> list[int | None]:
        """Return the exit code of each rank, negative if a signal killed it; None while it runs."""
        return [child.poll() for child in self._children]

    def send(self, number: int) -> None:
        """Send a signal to each rank that runs."""
        for child in self._children:
            child.send_signal(number)
