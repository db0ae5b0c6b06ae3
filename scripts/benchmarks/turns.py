"""Processes that run in alternating turns: the coordinator, and the timer in each process."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from benchmarks.harness import SECONDS, BenchmarkError, Process

CHECKED = 5  # number of first steps whose losses are compared


class Coordinator:
    """Lets groups of processes run in turns: while one group runs, the others wait.

    Slow phases of the machine then affect all groups equally, and not the ratios of their times.

    Args:
        folder: Folder of the socket.
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
        """End all processes."""
        self._socket.close()
        for connection in (connection for _, connections in self._groups.values() for connection in connections):
            connection.close()
        for process in (process for processes, _ in self._groups.values() for process in processes):
            with suppress(BenchmarkError) if kind else nullcontext():
                process.wait(60)

    def register(self, name: str, *processes: Process, ranks: int = 1) -> list[dict[str, Any]]:
        """Add a group, and wait until each of its ranks has finished its first steps.

        Returns:
            The message of each rank, with the losses and seeds of these steps.

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
                self._raise_failure(name)
        return self._receive(name)

    def turn(self, name: str) -> list[dict[str, Any]]:
        """Let a group run its next steps, and return the measurements of each rank.

        Raises:
            BenchmarkError: A process has ended.
        """
        with suppress(ConnectionError):  # reported below
            for connection in self._groups[name][1]:
                connection.send(None)
        return self._receive(name)

    def _receive(self, name: str) -> list[dict[str, Any]]:
        found = []
        for connection in self._groups[name][1]:
            if not connection.poll(SECONDS):
                self._raise_failure(name)
            try:
                found.append(connection.recv())
            except (EOFError, ConnectionError):
                self._raise_failure(name)
        return found

    def _raise_failure(self, name: str) -> NoReturn:
        for process in self._groups[name][0]:
            process.wait(10)
        raise BenchmarkError("steps: training ended before all steps were done; use fewer")


class StepTimer:
    """Measures the steps of this process, and waits for its turn.

    Args:
        address: Socket of the coordinator.
        warm: Number of steps before the first turn.
        lead: Number of steps at the start of each turn that are not timed.
        steps: Number of timed steps of each turn.
        counts: Whether to count bytecode instructions too, which makes the steps several times slower.
    """

    def __init__(self, address: str, *, warm: int, lead: int, steps: int, counts: bool = False) -> None:
        self.address, self.warm, self.lead, self.steps = address, warm, lead, steps
        self._counter = BytecodeCounter() if counts else None
        self._first: list[tuple[float, int]] = []  # losses and seeds of the first steps
        self._done = 0
        self._connection: Connection | None = None
        self._cpu = 0.0
        self._laps: list[float] = []

    def end_step(self, loss: Any, least: float | None = None) -> None:
        """Record a step; at the end of a turn, wait, and exit the process when all turns are over.

        Args:
            loss: Loss of the step.
            least: Seconds of the step at the peak performance of the devices, if known.
        """
        self._done += 1
        place = (self._done - self.warm) % (self.lead + self.steps)
        if torch.cuda.is_initialized() and place in (0, self.lead):  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # not at each step, which would slow it down
        self._laps.append(time.perf_counter())
        if self._done <= CHECKED:
            self._first.append((float(loss), torch.initial_seed()))
        if self._done >= self.warm and place == 0:
            self._report(least)
        if self._done >= self.warm and place == self.lead % (self.lead + self.steps):
            self._cpu, self._laps = time.process_time(), [time.perf_counter()]
            if self._counter:
                self._counter.start()

    def _report(self, least: float | None) -> None:
        """Send the measurements, in seconds per step and MiB, and wait for the next turn."""
        if self._connection is None:
            self._connection = Client(self.address, "AF_UNIX")
        each = [b - a for a, b in pairwise(self._laps)]
        found = {"wall": sum(each) / self.steps, "cpu": (time.process_time() - self._cpu) / self.steps, "each": each}
        if self._counter:
            by_package = {name: number / self.steps for name, number in self._counter.stop().items()}
            found |= {"bytecode": sum(by_package.values()), "by_package": by_package}
        losses, seeds = zip(*self._first, strict=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found |= {"losses": losses, "seeds": seeds, "mib": peak, "least": least}
        self._connection.send(found)
        try:
            self._connection.recv()
        except EOFError:
            os._exit(0)  # without cleaning up: destroying a process group may wait for ranks that have exited


class BytecodeCounter:
    """Counts the bytecode instructions that this thread executes, which do not depend on the load, by package."""

    def __init__(self) -> None:
        self._by_file: Counter[str] = Counter()

    def start(self) -> None:
        """Count from here on, also in the functions that have called this one."""
        self._by_file.clear()
        if sys.version_info >= (3, 12):  # where a function's first call is not traced by instruction
            own, thread, counts = sys.monitoring, threading.get_ident(), self._by_file

            def count(code: CodeType, offset: int) -> None:
                if threading.get_ident() == thread:
                    counts[code.co_filename] += 1

            own.use_tool_id(own.PROFILER_ID, "benchmark")
            own.register_callback(own.PROFILER_ID, own.events.INSTRUCTION, count)
            own.set_events(own.PROFILER_ID, own.events.INSTRUCTION)
            return
        self._trace_callers(self._count)
        sys.settrace(self._count)

    def stop(self) -> Counter[str]:
        """Return the number of instructions since the start, by package."""
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
        else:
            sys.settrace(None)
            self._trace_callers(None)
        found: Counter[str] = Counter()
        for file, number in self._by_file.items():
            if __file__ != file:
                found[package_of(Path(file))] += number
        return found

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._by_file[frame.f_code.co_filename] += 1
        return self._count

    def _trace_callers(self, function: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame:
            frame.f_trace, frame.f_trace_opcodes = function, function is not None
            frame = frame.f_back


def package_of(file: Path) -> str:
    """The package that a file belongs to: ``lightning.pytorch.loops``, ``boltcutter.task``, ``torch``, ``python``."""
    parts = list(file.with_suffix("").parts)
    for root, depth in (("site-packages", 1), ("src", 2), ("scripts", 1)):
        if root in parts:
            names = parts[parts.index(root) + 1 : -1] or [parts[-1]]
            return ".".join(names[: 3 if names[0] == "lightning" else depth])
    return "python"
