"""The job to run, and the interface of launchers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import jinja2
import yaml

from boltcutter.config.redaction import SECRET_TEXT, find_secrets, secret_variables
from boltcutter.run import trust

State = Literal["pending", "running", "ended", "unknown"]
FINAL = ("ended", "unknown")  # states that do not change
POLL_SECONDS = 1.0  # between two reads of a log that is followed
TIME = re.compile(r"(?:([0-9]+)-([0-9]+)(?::([0-9][0-9]))?(?::([0-9][0-9]))?|([0-9]+):([0-9][0-9])(?::([0-9][0-9]))?)")
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")  # some start a new line in a job script
JOB_VARIABLE = re.compile(r"\$(?:\{SLURM_\w+\}|SLURM_\w+)")  # variables that are set only in the job
Range = tuple[float | str, float | str | None]


@dataclass(frozen=True)
class Job:
    """A run with a saved configuration, or an array of runs, and the resources of each.

    Args:
        name: Name of the job in the queue.
        folder: Folder of the run; for an array the parent folder of its runs.
        script: The project's ``train.py``, which every process calls with ``resume=<folder of the run>``; None: the
            module ``boltcutter`` is called instead, and finds the project by its environment variable.
        array_size: Number of runs in an array; 0 for a single run.
        nodes: Nodes for each run.
        devices: Processes on each node.
        gpus: Whether each process has a GPU.
        num_workers: Dataloader workers of each process.
        environment: Environment variables of the run.
        progress: File or folder in the run folder that changes with each checkpoint.
        root: Root of the project; None: derived from ``script``.
        digests: Of the configurations that the user composed, now or earlier, or trusts: the job trusts no others.
        code: Snapshot of the project's code, imported in preference to installed packages.
        search: Whether the runs of the array are workers of the search in ``folder``, each of one process.
    """

    name: str
    folder: Path
    script: Path | None
    array_size: int = 0
    nodes: int = 1
    devices: int = 1
    gpus: bool = False
    num_workers: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: str = "checkpoints"
    root: Path | None = None
    code: Path | None = None
    digests: tuple[str, ...] = ()
    search: bool = False

    def __post_init__(self) -> None:
        for name, value in (("name", self.name), ("folder", str(self.folder)), ("script", str(self.script))):
            check_control_characters(name, value)  # such as a line end, after which a job file would run the rest

    @property
    def trust(self) -> list[str]:
        """Further arguments of the training."""
        return [f"trust={trust.DIGESTS}{','.join(self.digests)}"] if self.digests else []

    @property
    def program(self) -> list[str]:
        """Arguments of the Python interpreter before those of the training."""
        return [str(self.script)] if self.script else ["-m", "boltcutter", "search" if self.search else "train"]

    @property
    def mounts(self) -> list[str]:
        """Folders that every process needs: the project and the run."""
        root = self.root or (self.script.parents[1] if self.script else None)
        return [str(place) for place in (root, self.folder) if place]

    def run_folder(self, task: int | str) -> str:
        """Return the folder of one run of an array; its name is unique in the project."""
        return f"{self.folder}/{self.folder.name}-{task}"

    @property
    def run_folders(self) -> list[Path]:
        """The folder of each run."""
        return [Path(self.run_folder(task)) for task in range(self.array_size)] or [self.folder]


@dataclass(frozen=True)
class Status:
    """Status of a job.

    Args:
        state: State that all launchers have in common.
        text: Description by the launcher.
        succeeded: Whether the job has succeeded, according to a launcher without access to the run's record.
    """

    state: State
    text: str
    succeeded: bool = False


class UnreachableError(ValueError):
    """The scheduler does not respond, so the state of its jobs is unknown."""


class NoAnswerError(UnreachableError):
    """A request may have had an effect, although it was not answered, or with an error of the server."""


class ForbiddenError(ValueError):
    """The credentials do not permit a request."""


class UnclearSubmissionError(ValueError):
    """The scheduler did not confirm a submission, which may have been accepted."""


class Launcher(Protocol):
    """Interface of launchers. Invalid settings raise a ``ValueError`` with a message of one line.

    ``check``, ``render``, ``submit``, ``status``, ``cancel`` and ``logs`` are required; all else is optional.

    Attributes:
        environment: Environment variables of the run.
        snapshot: Whether the job runs a copy of the code made at submission.
        job_file: Name of the rendered file in the folder of the run.
        array: Overrides in which the runs of an array differ; None for a single run.
        index_variable: Environment variable with the index of a run in its array; None: the launcher has no arrays.
        spot: Whether the job runs on machines that may be lost without notice, so that the run saves regularly.
        notices: Cloud whose metadata server announces interruptions to the run itself; None: no cloud does.
    """

    environment: dict[str, str]
    snapshot: bool = True
    job_file: str = "job.sh"
    array: str | list[str] | None = None
    index_variable: ClassVar[str | None] = None
    spot: bool = False
    notices: str | None = None

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that cannot run, as far as can be known before submission."""

    def render(self, job: Job) -> str:
        """Render the job script; a pure function."""

    def submit(self, job: Job, file: Path) -> list[str]:
        """Submit the rendered script; returns a job id for each run."""

    def is_inseparable(self, job_id: str) -> bool:
        """Whether the job is one of an array that can be cancelled only as a whole."""
        return False

    def status(self, job_id: str) -> Status:
        """Return the status of a job; raises ``UnreachableError`` if the scheduler does not respond."""

    def cancel(self, job_id: str) -> None:
        """Cancel the job; it saves a checkpoint and is not requeued."""

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of the run; with ``follow`` until it has ended."""


def run(*command: str, timeout: float, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without input; one that does not end in time, in seconds, has failed.

    Raises:
        FileNotFoundError: It is not installed.
    """
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        return subprocess.run(command, env=env, timeout=timeout, **options)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no response in {timeout} seconds")


def _template(file: Path, finalize: Callable[[Any], str] | None = None) -> jinja2.Template:
    environment = jinja2.Environment(  # noqa: S701 - of shell scripts and manifests
        loader=jinja2.FileSystemLoader(file.parent),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(file.name)


def render_template(file: Path, **values: object) -> str:
    """Render a template."""
    return _template(file).render(values)


def render_yaml(file: Path, **values: object) -> Any:
    """Render a template of YAML, in which each value is inserted as JSON, and return its content."""

    def insert(value: object) -> str:  # without characters that YAML takes for line ends, or refuses
        return re.sub(r"[^ -~]", lambda char: f"\\U{ord(char[0]):08x}", json.dumps(value, ensure_ascii=False))

    return yaml.safe_load(_template(file, insert).render(values))


def assignments(environment: Mapping[str, str]) -> list[str]:
    """Return shell lines that export the variables."""
    return [f"export {name}={quote(str(value))}" for name, value in environment.items()]


def code_path(job: Job) -> list[str]:
    """Return a shell line that puts the snapshot first on PYTHONPATH; empty without a snapshot."""
    return [f"export PYTHONPATH={shlex.quote(f'{job.code}/src')}${{PYTHONPATH:+:$PYTHONPATH}}"] if job.code else []


def quote(text: str) -> str:
    """Quote a value for the shell, which expands only variables of the job, such as $SLURM_TMPDIR."""
    if not JOB_VARIABLE.search(text):
        return shlex.quote(text)
    literals = [re.sub(r'(["\\$`])', r"\\\1", part) for part in JOB_VARIABLE.split(text)]
    variables = [*JOB_VARIABLE.findall(text), ""]
    return '"' + "".join(literal + variable for literal, variable in zip(literals, variables, strict=True)) + '"'


def check_control_characters(name: str, value: object) -> None:
    """Raise ValueError for control characters in a string, or in the items of a list or mapping."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (found := CONTROL.search(text)):
            raise ValueError(f"{name}={text!r} has the control character {found[0]!r}; remove it")


def check_settings(settings: Mapping[str, Any], ranges: Mapping[str, Range] = MappingProxyType({})) -> None:
    """Raise ValueError for settings with invalid environment variables, control characters or numbers out of range.

    Lines of shell in ``setup`` may have line ends.

    Args:
        settings: Value of each setting.
        ranges: Least and largest value of numbers, and of times as they are written.
    """
    remedy = "export it before launching, and the job inherits it"
    if "secrets" in settings:
        remedy = "put it into a secret of the platform, and give its address in launch.secrets"
    for setting in ("environment", "secrets", "pass_environment"):
        for name in settings.get(setting, ()):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
                raise ValueError(f"launch.{setting}.{name!r} is not a valid variable name; use letters, digits and _")
    for place, _ in find_secrets({"launch": dict(settings)}):
        raise ValueError(f"{place}: secrets must not be written to the job script; {remedy}")
    for name, value in settings.items():
        if name == "setup":
            value = [str(line).replace("\n", "") for line in value]
        check_control_characters(f"launch.{name}", value)
        if found := find_secret_text(str(value)):
            raise ValueError(f"launch.{name}: holds {found}; secrets must not be written to the job script; {remedy}")
    for name, limits in ranges.items():
        value = settings[name]
        for limit, word, sign in zip(limits, ("less", "more"), (1, -1), strict=True):
            if value is not None and limit is not None:
                size, bound = (
                    seconds(text, f"launch.{name}") if isinstance(text, str) else text for text in (value, limit)
                )
                if not sign * size >= sign * bound:  # also NaN
                    raise ValueError(f"launch.{name}={value} is {word} than {limit}; try launch.{name}={limit}")


def seconds(time: str, setting: str = "launch.time") -> int:
    """Convert a time limit to seconds.

    Args:
        time: The limit, as SLURM writes it.
        setting: Its name, for messages.

    Raises:
        ValueError: Invalid syntax. A plain number is refused too, since YAML reads an unquoted 2:00:00 as one.
    """
    found = TIME.fullmatch(time)
    if not found:
        raise ValueError(f"{setting}={time} is not a time limit; write H:MM:SS or D-HH:MM:SS, quoted in YAML")
    days, hours, minutes, rest, first, second, third = (int(part or 0) for part in found.groups())
    if found[1]:
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    return (first * 60 + second) * 60 + third if found[7] else first * 60 + second


def match_job_id(pattern: str, job_id: str, expected: str) -> re.Match[str]:
    """Match the job id in the record of a run.

    Raises:
        ValueError: It is malformed; a command could take it for an option, and a request for another address.
    """
    if not (found := re.fullmatch(pattern, job_id)):
        raise ValueError(f"record.json has the job id {job_id}: expected {expected}; correct it")
    return found


def follow(
    read: Callable[[], Iterator[str]], is_over: Callable[[], bool] | None, interval: float, late: float = 0
) -> Iterator[str]:
    """Yield output again and again until a job has ended; one that does not respond meanwhile is a note.

    Args:
        read: Yields what is new since its last call.
        is_over: Whether the job has ended; None: read once.
        interval: Seconds between two reads.
        late: Seconds after the end of the job by which its last output may be late.

    Raises:
        UnreachableError: The last read has failed.
    """
    is_reachable = True
    while True:
        last, fault = is_over is None, None
        try:
            if is_over and (last := is_over()):
                time.sleep(late)
        except UnreachableError as error:  # the run itself may still be running
            fault = error
        try:
            yield from read()
        except UnreachableError as error:
            if last:
                raise
            fault = error
        if fault and is_reachable:
            print(f"note: {fault}", file=sys.stderr)
        is_reachable = fault is None
        if last:
            return
        time.sleep(interval)


def first_output(*sources: Iterator[str]) -> Iterator[str]:
    """Yield the output of the first source that has any."""
    for source in sources:
        for text in source:
            yield text
            yield from source
            return


def follow_log(file: Path, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yield the content of a file, and what is appended until ``is_over``."""
    position = 0

    def read() -> Iterator[str]:
        nonlocal position
        if file.is_file():
            with file.open(errors="replace", newline="") as log:
                log.seek(position)
                while block := log.read(1 << 20):
                    yield block
                position = log.tell()

    return follow(read, is_over, POLL_SECONDS)


def find_secret_text(text: str) -> str | None:
    """Say which secret a text holds: the value of an environment variable, or a key; None if there is none."""
    if SECRET_TEXT.search(text):
        return "a secret key"
    return next((f"the value of {name}" for name, _ in secret_variables(text)), None)
