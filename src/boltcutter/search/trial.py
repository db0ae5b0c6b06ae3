"""A trial: an ordinary training in a child process, which reports its validations over a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import format_value
from boltcutter.environment import lease
from boltcutter.environment.startup import TRIAL_FD
from boltcutter.project import Project
from boltcutter.run.folder import read_record
from boltcutter.run.metrics import read_rows

SAVE_TIMEOUT = 120.0  # seconds for a checkpoint to be written after SIGTERM
# Variables by which a trial in a job would take itself for one of the job's processes, or ask to be requeued.
NOT_INHERITED = (
    *("SLURM_JOB", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP", "SLURM_ARRAY"),
    *("SLURM_RESTART", "SLURM_TASKS", "SLURM_NNODES", "BOLTCUTTER_REQUEUE"),
)
MAX_RESTARTS = 3  # of a trial whose process was killed
EXIT_TIMEOUT = 600.0  # seconds for a process that has closed its connection to upload and exit
POLL = 0.05  # seconds between two looks at a lease
PROCESS_POLL = 1.0  # seconds between two looks at a process that sends nothing


@dataclass(frozen=True)
class Sampled:
    """A trial with its values."""

    number: int
    values: dict[str, Any]


@dataclass
class Report:
    """What a trial reports after a validation."""

    step: int  # number of optimizer steps
    metrics: dict[str, float]


@dataclass
class Trial:
    """The process of a trial, and its folder.

    Attributes:
        reports: All validations so far, over all attempts.
    """

    number: int
    folder: Path  # of its run
    overrides: Sequence[str]  # of training, with the sampled values
    metric: str  # that each validation logs
    project: Project
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables
    changes: Sequence[str] = ()  # overrides for a run that exists already, which is resumed

    def __post_init__(self) -> None:
        self.reports = read_reports(self.folder, self.metric)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self._is_waiting = self._was_stopped = self._was_interrupted = False
        self._restarts = 0

    @property
    def log(self) -> Path:
        """File with the output of the process."""
        return self.folder / "logs" / "trial.log"

    def fileno(self) -> int:
        """Descriptor that becomes readable when the trial reports or ends."""
        assert self._connection
        return self._connection.fileno()

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> bool:
        """Start training, or resume it, once an earlier process of the trial has ended; False if it is complete."""
        deadline = time.monotonic() + SAVE_TIMEOUT
        while (holder := lease.read_holder(self.folder)) and holder.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL)  # it has noticed that its search ended, and saves
        if is_completed(self.folder) and not self.changes:
            self.reports = read_reports(self.folder, self.metric)
            return False
        exists = (self.folder / run_files.RECORD).is_file()
        where = [f"resume={self.folder}", *self.changes] if exists else [*self.overrides, f"folder={self.folder}"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(PROCESS_POLL)
        self._buffer, self._is_waiting = b"", False  # an earlier process may have been killed while it wrote
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        variables = {**inherited, **self.project.environment, **self.environment, TRIAL_FD: str(theirs.fileno())}
        with theirs, open(self.log, "ab", opener=files.opener(self.log.parents[1])) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "boltcutter", "train", *where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return True

    def receive(self) -> Report | None:
        """Wait for the next validation, after which training waits for ``answer``; None if the process has ended."""
        message = self._receive()
        if message is None:
            return None
        report = Report(message["step"], message["metrics"])
        # A resumed run repeats validations after its checkpoint.
        self.reports = [*(earlier for earlier in self.reports if earlier.step < report.step), report]
        return report

    def answer(self, text: str) -> None:
        """Answer the last message: ``continue``, ``stop`` or ``save``."""
        self._was_stopped = self._was_stopped or text == "stop"
        if self._is_waiting and self._connection:
            self._is_waiting = False
            with suppress(OSError):  # it was killed, which the next receive shows
                self._connection.sendall(f"{text}\n".encode())

    def save(self) -> Path | None:
        """Let the trial save before its next batch, and return the path; None if training has ended instead."""
        self.answer("save")
        message = self._receive()
        return Path(message["saved"]) if message else None

    def finish(self) -> tuple[str, str]:
        """Wait for the end of the process, and return the state of the trial and its error.

        The state is ``running`` if the trial was interrupted, and can be resumed.
        """
        status = self._wait(EXIT_TIMEOUT)
        if is_completed(self.folder):
            return ("pruned" if self._was_stopped else "complete"), ""
        if self._was_interrupted:
            return "running", ""
        if status < 0 or status - 128 in set(signal.Signals):
            number = -status if status < 0 else status - 128
            return "running", f"killed by {signal.Signals(number).name}"
        return "failed", last_error(self.folder, self.log)

    def restart(self) -> bool:
        """Start again after a kill, at most ``MAX_RESTARTS`` times."""
        self._restarts += 1
        return self._restarts <= MAX_RESTARTS and self.start()

    def interrupt(self) -> None:
        """Ask the process to save a checkpoint and exit; does not wait."""
        self._was_interrupted = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.answer("continue")

    def end(self) -> None:
        """Interrupt the process and wait; kill it if it does not end in time."""
        self.interrupt()
        self._wait(SAVE_TIMEOUT)

    def _wait(self, timeout: float) -> int:
        """Wait for the end of the process, and return its exit status; kill it after the timeout."""
        if self._connection:
            self._connection.close()
            self._connection = None
        if not self._process:
            return 0
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def _receive(self) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            data = b""
            try:
                data = self._connection.recv(1 << 16) if self._connection else b""
            except TimeoutError:
                if self.is_alive():
                    continue
                # It has ended, but a process that it left behind, such as a worker of the data loader, has not.
            except OSError:
                pass  # it was killed with an answer that it had not read
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        self._is_waiting = True
        message: dict[str, Any] = json.loads(line)
        return message


def trial_overrides(values: Mapping[str, Any]) -> list[str]:
    """The overrides that set sampled values; text is passed as it was written."""
    return [f"{key}={value if isinstance(value, str) else format_value(value)}" for key, value in values.items()]


def attempts(folder: Path) -> list[dict[str, Any]]:
    """What the record of a run has about its attempts."""
    with suppress(ConfigError):
        return read_record(folder).get("attempts") or []
    return []


def is_completed(folder: Path) -> bool:
    """Whether the last attempt of a run ended by itself."""
    return any(str(attempt.get("reason")).startswith("completed") for attempt in attempts(folder)[-1:])


def seconds(folder: Path) -> float:
    """Duration of all attempts of a run."""
    return float(sum(attempt.get("seconds") or 0 for attempt in attempts(folder)))


def read_reports(folder: Path, metric: str) -> list[Report]:
    """The validations of a run so far, by its ``metrics.csv``.

    Args:
        folder: Folder of the run.
        metric: A metric that each validation logs.
    """
    return [Report(step + 1, values) for step, values in read_rows(folder / run_files.METRICS) if metric in values]


def last_error(folder: Path, log: Path) -> str:
    """The error by which a run ended, from its record or its output."""
    lines: list[str] = []
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error"):
            return line.partition(": ")[2]
    reasons = [str(attempt["reason"]) for attempt in attempts(folder)[-1:] if attempt.get("reason")]
    return (reasons or lines[-1:] or ["ended without a message"])[0]
