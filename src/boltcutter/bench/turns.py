"""Processes that take turns: who lets them, and their own part in it."""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from boltcutter.bench.harness import SECONDS, BenchmarkError, Process

CHECKED = 5  # first steps, whose losses are compared


class Coordinator:
    """Where processes take turns: while one group of them works, the others wait.

    What slows a machine down for seconds slows down all of them then, and not their ratio.

    Args:
        folder: For the socket on which they meet.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "turns")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen()
        self._socket.settimeout(0.2)
        self._groups: dict[str, tuple[list[Process], list[Connection]]] = {}

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Let all processes end."""
        self._socket.close()
        for connection in (connection for _, connections in self._groups.values() for connection in connections):
            connection.close()
        for process in (process for processes, _ in self._groups.values() for process in processes):
            with suppress(BenchmarkError) if kind else nullcontext():
                process.wait(60)

    def register(self, name: str, *processes: Process, ranks: int = 1) -> list[dict[str, Any]]:
        """Wait until each rank of a group has done its first steps, and give what it says.

        Raises:
            BenchmarkError: A process has ended.
        """
        connections: list[Connection] = []
        self._groups[name] = (list(processes), connections)
        until = time.monotonic() + SECONDS
        while len(connections) < ranks:
            with suppress(TimeoutError):
                connections.append(Connection(self._socket.accept()[0].detach()))
            if time.monotonic() > until or not all(process.running for process in processes):
                self._lost(name)
        return self._heard(name)

    def turn(self, name: str) -> list[dict[str, Any]]:
        """Let a group work, and give what each of its ranks has measured.

        Raises:
            BenchmarkError: A process has ended.
        """
        with suppress(ConnectionError):  # which is told below
            for connection in self._groups[name][1]:
                connection.send(None)
        return self._heard(name)

    def _heard(self, name: str) -> list[dict[str, Any]]:
        found = []
        for connection in self._groups[name][1]:
            if not connection.poll(SECONDS):
                self._lost(name)
            try:
                found.append(connection.recv())
            except (EOFError, ConnectionError):
                self._lost(name)
        return found

    def _lost(self, name: str) -> NoReturn:
        for process in self._groups[name][0]:
            process.wait(10)
        raise BenchmarkError("steps: training was over before all of them were done; give fewer")


class StepTimer:
    """This process's part in a measurement: it waits until it may go on, and tells how long its steps took.

    Args:
        address: Socket of who measures.
        warm: Steps before the first turn.
        lead: At the begin of each turn, before the clock starts.
        steps: That are timed, at each turn.
    """

    def __init__(self, address: str, *, warm: int, lead: int, steps: int) -> None:
        self.address, self.warm, self.lead, self.steps = address, warm, lead, steps
        self._first: list[tuple[float, int]] = []  # losses, and what these steps were seeded with
        self._done = 0
        self._connection: Connection | None = None
        self._cpu = 0.0
        self._laps: list[float] = []

    def end_step(self, loss: Any, least: float | None = None) -> None:
        """After each step: wait where a turn ends, and leave the process when all turns are over.

        Args:
            loss: Of the step.
            least: Seconds that it would take if the devices did what they can at best, where that is known.
        """
        self._done += 1
        place = (self._done - self.warm) % (self.lead + self.steps)
        if torch.cuda.is_initialized() and place in (0, self.lead):  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # not at each step, which nobody would do
        self._laps.append(time.perf_counter())
        if self._done <= CHECKED:
            self._first.append((float(loss), torch.initial_seed()))
        if self._done >= self.warm and place == 0:
            self._tell(least)
        if self._done >= self.warm and place == self.lead % (self.lead + self.steps):
            self._cpu, self._laps = time.process_time(), [time.perf_counter()]

    def _tell(self, least: float | None) -> None:
        """Say what has been measured, in seconds a step and MiB, and wait."""
        if self._connection is None:
            self._connection = Client(self.address, "AF_UNIX")
        each = [b - a for a, b in pairwise(self._laps)]
        found = {"wall": sum(each) / self.steps, "cpu": (time.process_time() - self._cpu) / self.steps, "each": each}
        losses, seeds = zip(*self._first, strict=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found |= {"losses": losses, "seeds": seeds, "mib": peak, "least": least}
        self._connection.send(found)
        try:
            self._connection.recv()
        except EOFError:
            os._exit(0)  # without tidying up, as taking a group down may wait for a rank that has left
