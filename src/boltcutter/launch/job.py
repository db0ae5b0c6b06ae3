"""What is to run, and what every launcher can do with it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

State = Literal["waiting", "running", "ended", "unknown"]
SECONDS = 1.0  # between two looks at a log that is followed


@dataclass(frozen=True)
class Job:
    """A frozen run, or an array of them, and what each needs.

    Args:
        name: Shown in queues.
        folder: Of the run; of an array the folder that holds its runs'.
        script: ``train.py``, which every process is to call with ``resume=<folder of the run>``.
        tasks: Runs of an array; 0 for a single run.
        nodes: Machines for each run.
        devices: Processes on each node.
        gpus: Whether each process has a GPU.
        workers: Processes that load data for each of them.
        environment: Variables of the run.
        progress: Of the run's folder, what changes with each checkpoint.
    """

    name: str
    folder: Path
    script: Path
    tasks: int = 0
    nodes: int = 1
    devices: int = 1
    gpus: bool = False
    workers: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: str = "checkpoints"

    def run(self, task: int | str) -> str:
        """The folder of one run of an array, whose name no other run of the project has."""
        return f"{self.folder}/{self.folder.name}-{task}"

    @property
    def runs(self) -> list[Path]:
        """The folder of each run."""
        return [Path(self.run(task)) for task in range(self.tasks)] or [self.folder]


@dataclass(frozen=True)
class Status:
    """How a job stands.

    Args:
        state: What all launchers can tell.
        text: What this one says of it.
    """

    state: State
    text: str


class Launcher(Protocol):
    """Gives jobs to one kind of place. Values that it refuses are a ``ValueError`` of one line.

    Attributes:
        array: What the runs of an array differ in, where there are such.
    """

    array: str | list[str] | None

    def check(self, job: Job) -> None:
        """Refuse what cannot work, as far as it can be known before submission."""

    def render(self, job: Job) -> str:
        """The text of the job's file; depends on nothing but the arguments."""

    def submit(self, job: Job, file: Path) -> list[str]:
        """Hand the rendered file over; an id for each of the job's runs."""

    def status(self, job_id: str) -> Status:
        """How the job stands."""

    def cancel(self, job_id: str) -> None:
        """End the job; it saves, and does not come back."""

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What the run has printed; with ``follow`` until it has ended."""


def assignments(environment: Mapping[str, str]) -> list[str]:
    """Lines that set variables in a shell."""
    return [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()]


def read_log(file: Path, over: Callable[[], bool]) -> Iterator[str]:
    """What stands in a file, and what is added to it until ``over``."""
    at = 0
    while True:
        last = over()
        if file.is_file():
            with file.open(errors="replace", newline="") as log:
                log.seek(at)
                yield log.read()
                at = log.tell()
        if last:
            return
        time.sleep(SECONDS)
