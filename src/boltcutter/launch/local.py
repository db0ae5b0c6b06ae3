"""This machine: a run of its own, which outlives the terminal."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from boltcutter.launch.job import Job, Status, assignments, check_environment, check_text, code_path, read_log


class LocalLauncher:
    """Start the run here, in the background.

    Args:
        torchrun: Whether torchrun starts the processes; otherwise Lightning does.
        python: Interpreter; null: the one that launches.
        environment: Variables for the run.
        snapshot: Whether the run uses a copy of the code as it is now.
    """

    array: str | list[str] | None = None

    def __init__(
        self,
        *,
        torchrun: bool = False,
        python: str | None = None,
        environment: dict[str, str] | None = None,
        snapshot: bool = True,
    ) -> None:
        self.torchrun, self.python, self.environment = torchrun, python or sys.executable, environment or {}
        self.snapshot = snapshot
        check_environment(self.environment)
        check_text("launch.environment", self.environment)

    def check(self, job: Job) -> None:
        """Refuse more than this machine."""
        if job.nodes != 1:
            raise ValueError(f"trainer.num_nodes={job.nodes}: this is one machine; try launch=slurm")

    def render(self, job: Job) -> str:
        """A shell script."""
        words = [self.python]
        if self.torchrun:
            words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.devices)]
        words += [str(job.script), f"resume={job.folder}", *job.trust]
        variables = assignments({**job.environment, **self.environment})
        lines = ["#!/bin/bash", *variables, *code_path(job), f"exec {shlex.join(words)}"]
        return "\n".join(lines) + "\n"

    def submit(self, job: Job, file: Path) -> list[str]:
        """Start it; the id is number and start of its first process."""
        with open(_log(job.folder), "ab") as log:
            process = subprocess.Popen(
                ["bash", str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # whoever launches does not wait for it
        return [f"{process.pid} on {socket.gethostname()} since {_started(process.pid)}"]

    def status(self, job_id: str) -> Status:
        """Running or ended; only the machine itself can tell."""
        found = re.fullmatch(r"(\d+) on (\S+) since (.*)", job_id)
        if not found or found[2] != socket.gethostname():
            return Status("unknown", f"process {job_id}")
        alive = bool(found[3]) and _started(int(found[1])) == found[3]
        return Status("running" if alive else "ended", f"process {found[1]}")

    def cancel(self, job_id: str) -> None:
        """Ask all of its processes to save and leave.

        Raises:
            ValueError: It runs elsewhere.
        """
        status = self.status(job_id)
        if status.state == "unknown":
            raise ValueError(f"run: {status.text} can be ended only there")
        if status.state == "running":
            os.killpg(int(job_id.split()[0]), signal.SIGTERM)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What it has printed."""
        return read_log(_log(folder), lambda: not follow or self.status(job_id).state != "running")


def _log(folder: Path) -> Path:
    return folder / "logs" / "local.log"


def _started(pid: int) -> str:
    """When a process began, which tells it from another that is given its number; nothing when it has ended."""
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if fields[0] == "Z" else fields[19]
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, start = told.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else " ".join(start.split())
