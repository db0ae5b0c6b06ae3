"""What is to run, and what every launcher can do with it."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from boltcutter.redaction import looks_secret

State = Literal["waiting", "running", "ended", "unknown"]
SECONDS = 1.0  # between two looks at a log that is followed
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")  # which could begin a line of their own in a job's file
JOB_VARIABLE = re.compile(r"\$(?:\{SLURM_\w+\}|SLURM_\w+)")  # variables that have a value only where the job runs


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
        root: Of the project; None: that of ``script``.
        trusted: Whether the user has composed the configuration, now or before, or trusts the record that it is from.
        code: Snapshot of the project's code, which is imported before what is installed.
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
    root: Path | None = None
    code: Path | None = None
    trusted: bool = False

    @property
    def trust(self) -> list[str]:
        """What ``train.py`` takes besides the folder."""
        return ["trust=true"] if self.trusted else []

    @property
    def places(self) -> list[str]:
        """Folders that every process needs: those of the project and of the run."""
        return [str(self.root or self.script.parents[1]), str(self.folder)]

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


class UnreachableError(ValueError):
    """What has the jobs does not answer now: nothing is known of them."""


class UnclearSubmissionError(ValueError):
    """It is not known whether a job was accepted."""


class Launcher(Protocol):
    """Gives jobs to one kind of place. Values that it refuses are a ``ValueError`` of one line.

    Attributes:
        array: What the runs of an array differ in, where there are such.
        snapshot: Whether the job runs a copy of the code as it is at submission.
        environment: Variables of the run.
    """

    array: str | list[str] | None
    environment: dict[str, str]
    snapshot: bool

    def check(self, job: Job) -> None:
        """Refuse what cannot work, as far as it can be known before submission."""

    def render(self, job: Job) -> str:
        """The text of the job's file; depends on nothing but the arguments."""

    def submit(self, job: Job, file: Path) -> list[str]:
        """Hand the rendered file over; an id for each of the job's runs."""

    def status(self, job_id: str) -> Status:
        """How the job stands; raises ``UnreachableError`` where nobody answers."""

    def cancel(self, job_id: str) -> None:
        """End the job; it saves, and does not come back."""

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What the run has printed; with ``follow`` until it has ended."""


def assignments(environment: Mapping[str, str]) -> list[str]:
    """Lines that set variables in a shell."""
    return [f"export {name}={quote(str(value))}" for name, value in environment.items()]


def code_path(job: Job) -> list[str]:
    """A line that has the snapshot's packages imported before those that are installed."""
    return [f"export PYTHONPATH={shlex.quote(f'{job.code}/src')}${{PYTHONPATH:+:$PYTHONPATH}}"] if job.code else []


def quote(text: str) -> str:
    """A value for the shell as it is; only variables of the job, as $SLURM_TMPDIR, are replaced there."""
    if not JOB_VARIABLE.search(text):
        return shlex.quote(text)
    kept = [re.sub(r'(["\\$`])', r"\\\1", part) for part in JOB_VARIABLE.split(text)]
    variables = [*JOB_VARIABLE.findall(text), ""]
    return '"' + "".join(part + variable for part, variable in zip(kept, variables, strict=True)) + '"'


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse variables that a job's file cannot or must not set.

    Raises:
        ValueError: There is one.
    """
    for name in environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"launch.environment.{name!r} is no name of a variable; use letters, digits and _")
        if looks_secret(name):
            raise ValueError(
                f"launch.environment.{name}: a secret must not stand in the job's file; "
                "export it before launching, the job inherits it"
            )


def check_text(name: str, value: object) -> None:
    """Refuse control characters, in a text or in what a list or map holds.

    Raises:
        ValueError: There is one.
    """
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (found := CONTROL.search(text)):
            raise ValueError(f"{name}={text!r} has the control character {found[0]!r}; leave it out")


def read_log(file: Path, over: Callable[[], bool]) -> Iterator[str]:
    """What stands in a file, and what is added to it until ``over``."""
    at = 0
    answers = True
    while True:
        try:
            last = over()
            answers = True
        except UnreachableError as error:  # the run itself may well go on
            if answers:
                print(f"note: {error}", file=sys.stderr)
            last = answers = False
        if file.is_file():
            with file.open(errors="replace", newline="") as log:
                log.seek(at)
                yield log.read()
                at = log.tell()
        if last:
            return
        time.sleep(SECONDS)
