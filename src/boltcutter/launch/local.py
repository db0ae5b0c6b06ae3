"""Launch runs on this machine, in the background."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from boltcutter import files
from boltcutter.environment.process import LOCAL_JOB, start_time
from boltcutter.launch.job import Job, Launcher, Range, Status, assignments, check_settings, code_path, follow_log


@dataclass(kw_only=True, eq=False)
class LocalLauncher(Launcher):
    """Start the run on this machine in a background process that survives the terminal.

    Args:
        torchrun: Whether torchrun starts the processes; otherwise Lightning does.
        python: Python interpreter; null: the one that runs the launcher.
        environment: Environment variables of the run.
        snapshot: Whether the run uses a copy of the code made at submission.
    """

    option = "local"  # of launch=, for messages
    log_name = "local.log"
    ranges: ClassVar[Mapping[str, Range]] = {}  # of numbers

    kill = staticmethod(os.killpg)  # by which a run is cancelled

    torchrun: bool = False
    python: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    snapshot: bool = True

    def __post_init__(self) -> None:
        self.python = self.python or sys.executable
        check_settings(vars(self), self.ranges)

    def check(self, job: Job) -> None:
        """Raise ValueError for more than one node."""
        if job.nodes != 1:
            raise ValueError(f"trainer.num_nodes={job.nodes}: launch={self.option} uses one machine; try launch=slurm")

    def command(self, job: Job) -> list[str]:
        """Return the command that trains."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.devices)]
        return [
            str(self.python),
            *(torchrun if self.torchrun else []),
            *job.program,
            f"resume={job.folder}",
            *job.trust,
        ]

    def render(self, job: Job) -> str:
        """Render a shell script."""
        variables = assignments({**job.environment, **self.environment})
        lines = ["#!/bin/bash", *variables, *code_path(job), f"exec {shlex.join(self.command(job))}"]
        return "\n".join(lines) + "\n"

    def submit(self, job: Job, file: Path) -> list[str]:
        """Start the run; its id has the pid, host and start time of its first process."""
        with open(job.folder / "logs" / self.log_name, "ab", opener=files.opener(job.folder)) as log:
            process = subprocess.Popen(
                ["bash", str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # detached: do not wait for it
        return [f"{process.pid} on {socket.gethostname()} since {start_time(process.pid)}"]

    def status(self, job_id: str) -> Status:
        """Return whether the process runs; unknown on another host."""
        found = LOCAL_JOB.fullmatch(job_id)
        if not found or found[2] != socket.gethostname():
            return Status("unknown", f"process {job_id}")
        alive = bool(found[3]) and str(start_time(int(found[1]))) == found[3]
        return Status("running" if alive else "ended", f"process {found[1]}")

    def cancel(self, job_id: str) -> None:
        """Send SIGTERM to the process group, on which the run saves and ends."""
        status = self.status(job_id)
        if status.state == "unknown":
            raise ValueError(f"run: {status.text} can be cancelled only on that host")
        if status.state == "running":
            self.kill(int(job_id.split()[0]), signal.SIGTERM)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of the run."""
        return follow_log(folder / "logs" / self.log_name, lambda: not follow or self.status(job_id).state != "running")
