"""What the launchers of clouds and of Kubernetes have in common: storage, and the command of each node."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.storage import is_url, resolve_filesystem
from boltcutter.config.errors import one_line
from boltcutter.run import trust
from boltcutter.run.folder import read_record
from boltcutter_launch import secret_reference
from boltcutter_launch.bundle import BUNDLE, RECORD, check_size, pack
from boltcutter_launch.job import (
    FINAL,
    POLL_SECONDS,
    ForbiddenError,
    Job,
    Launcher,
    NoAnswerError,
    Range,
    UnclearSubmissionError,
    UnreachableError,
    check_settings,
    first_output,
    follow,
    match_job_id,
    render_yaml,
    seconds,
)
from boltcutter_remote.store import fetch, publish
from boltcutter_remote.transfer import reason, remedy_for

LOG = "logs/rank-0.log"  # in the folder of a run
DELAY = 5.0  # seconds after the end of a job by which its last events are in the log
LATE = 60.0  # seconds by which the events of one node may appear later than those of another


class StoredRuns(Launcher):
    """Base class of launchers whose runs may be on object storage, to which the code is sent, and read by each node.

    Attributes:
        storage: Parent URL of the runs; None: they are on a disk that the nodes share with this machine.
    """

    option = ""  # of launch=, for messages
    pause: ClassVar[int] = 5  # multiple of POLL_SECONDS between two reads of a log
    protocols: ClassVar[tuple[str, ...]] = ("s3", "gs", "az")  # of the storage
    takes_path = False  # as storage, on a volume of the nodes
    storage: str | None
    python: str | None
    max_code_mb: float

    def check_storage(self, job: Job) -> None:
        """Raise ValueError for storage that the nodes cannot write, or code that cannot be sent."""
        storage, example = str(self.storage), f"{self.protocols[0]}://<bucket>/runs"
        if not is_url(storage) and not self.takes_path:
            raise ValueError(f"launch.storage={storage}: the nodes share no disk; use {example}")
        if is_url(storage) and storage.partition("://")[0] not in self.protocols:
            expected = " or ".join(f"{protocol}://" for protocol in self.protocols)
            raise ValueError(f"launch.storage={storage}: the nodes cannot write there; use {expected}")
        if not job.code or not job.root:
            raise ValueError(f"launch={self.option}: only files tracked by git are sent; git init, then git add them")
        check_size(job.root, job.folder, self.max_code_mb)

    def remote_folder(self, folder: Path) -> str:
        """Return the URL of a run, or its path on the nodes, from its folder on this machine."""
        is_in_array = re.fullmatch(rf"{re.escape(folder.parent.name)}-[0-9]*", folder.name)
        return "/".join([str(self.storage).rstrip("/"), *folder.parts[-3 if is_in_array else -2 :]])

    def command(self, job: Job) -> list[str]:
        """Return the command that each node runs."""
        place, options = self.remote_folder(job.folder), []
        if job.array_size:
            options = [f"--index={self.index_variable}", f"--bundle={place}/{BUNDLE}"]
            options += ["--search"] if job.search else []
            place = place if job.search else self.remote_folder(Path(job.run_folder("")))
        return [str(self.python), "-m", "boltcutter_launch.node", place, *options, *job.trust]

    def send(self, job: Job, file: Path) -> None:
        """Send the code, the record and the job file to the storage."""
        pack(job.folder, job.run_folders)
        if is_url(str(self.storage)):
            for folder in job.run_folders:
                self.check_unused(folder)
            publish(job.folder, self.remote_folder(job.folder), [BUNDLE, file.name])
            for folder in job.run_folders:
                names = [name for name in RECORD if (folder / name).is_file()]
                publish(folder, self.remote_folder(folder), names)

    def check_unused(self, folder: Path) -> None:
        """Raise ValueError if the storage has another run in the place of this one, or attempts that are not here."""
        there, here = self.stored_record(folder), read_record(folder)
        if len(there.get("attempts") or ()) > len(here.get("attempts") or ()):
            place = self.remote_folder(folder)
            raise ValueError(f"folder={folder}: {place} holds another run; choose another folder, or remove that run")

    def stored_record(self, folder: Path) -> dict[str, Any]:
        """Return the record of a run in the storage; empty if it is not there."""
        place = f"{self.remote_folder(folder)}/{RECORD[0]}"
        content = read(place) or b"{}"
        try:
            return trust.parse_json(content)
        except ValueError as error:
            raise ValueError(f"{place}: damaged ({one_line(error)}); remove it, or choose another folder") from error

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of rank 0 from the storage; with ``follow`` until the job has ended."""
        return self.follow(self.stored_output(folder), job_id if follow else None)

    def stored_output(self, folder: Path) -> Callable[[], Iterator[str]]:
        """Return a function that yields what rank 0 has written to the storage since its last call."""
        place, position = f"{self.remote_folder(folder)}/{LOG}", 0

        def new() -> Iterator[str]:
            nonlocal position
            if content := read(place, position):
                position += len(content)
                yield content.decode(errors="replace")

        return new

    def follow(self, read: Callable[[], Iterator[str]], job_id: str | None, late: float = 0) -> Iterator[str]:
        """Yield output until a job has ended, or what there is now if the job is None; see ``job.follow``.

        Notes tell why a job waits.
        """
        noted = ""

        def is_over() -> bool:
            nonlocal noted
            status = self.status(str(job_id))
            if status.state == "pending" and status.text != noted:
                print(f"note: {(noted := status.text)}", file=sys.stderr)
            return status.state in FINAL

        return follow(read, is_over if job_id else None, self.pause * POLL_SECONDS, late)

    def fetch(self, folder: Path) -> list[str]:
        """Download the run into its folder on this machine; returns the names of new and changed files."""
        if not is_url(str(self.storage)):
            raise ValueError(f"launch.storage={self.storage} is a path on the nodes; copy the run from there")
        return fetch(self.remote_folder(folder), folder)

    def refresh(self, folder: Path) -> None:
        """Update the record of a run on this machine from the storage, if it is there and can be reached."""
        if not is_url(str(self.storage)) or not (found := self.stored_record(folder)):
            return
        known = read_record(folder)
        if len(found.get("attempts", ())) >= len(known.get("attempts", ())):
            write_text(folder / RECORD[0], json.dumps(found | {"launch": known.get("launch")}, indent=2) + "\n")


def find_stored(launcher: Launcher) -> StoredRuns | None:
    """Return the launcher if its runs are on object storage or on a volume of its nodes; else None."""
    return launcher if isinstance(launcher, StoredRuns) and launcher.storage else None


@dataclass(kw_only=True, eq=False)
class CloudLauncher(StoredRuns):
    """Base class of launchers whose nodes do not share the disk of this machine.

    A subclass renders the job file of its platform, in which each node runs ``command(job)``, and submits it.

    Args:
        storage: Parent URL of the runs, such as s3://bucket/runs, that all nodes can write.
        time: Time limit of the job, H:MM:SS or D-HH:MM:SS.
        tags: Tags of the job, which also appear in the bill.
        environment: Environment variables of the run.
        secrets: Environment variables that hold secrets, and from which secret of a cloud each node reads the value by
            its own identity, such as {"WANDB_API_KEY": "arn:aws:secretsmanager:…"}.
        python: Python interpreter in the image.
        max_code_mb: Limit of the size of the project's files, which are sent with each job.
        price_per_hour: What one node costs in an hour, in any currency, for the estimate of the costs.
        max_cost: Limit of price_per_hour times nodes times ``time``, above which a job is refused.
    """

    job_file = "job.yaml"
    forms: ClassVar[Mapping[str, tuple[str, str]]] = {}  # of settings, and what they are
    ranges: ClassVar[Mapping[str, Range]] = {}
    defaults: ClassVar[Mapping[str, str]] = {}  # environment variables of settings that are required
    id_form: ClassVar[tuple[str, str]]  # pattern of a job id, whose groups are its parts, and how messages describe it
    own_secret: ClassVar[str | None] = None  # form of the references that the platform itself resolves
    secret_example: ClassVar[str] = secret_reference.EXAMPLE
    search_hint: ClassVar[str] = "look for {name} there"  # for a job whose submission was not confirmed
    storage: str | None = None
    time: str = "1-00:00:00"
    tags: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    python: str = "python"
    max_code_mb: float = 50
    price_per_hour: float | None = None
    max_cost: float | None = None
    # Settings of some platforms
    extra: dict[str, Any] = field(default_factory=dict, init=False)
    max_restarts: int | None = field(default=None, init=False)
    max_wait: str | None = field(default=None, init=False)
    jupyter: bool = field(default=False, init=False)
    idle_minutes: float | None = field(default=None, init=False)  # None: the platform has a JupyterLab of its own

    def __post_init__(self) -> None:
        self.tags = as_text(self.tags)
        for name, variable in self.defaults.items():
            setattr(self, name, getattr(self, name) or os.environ.get(variable))
        settings = {"max_restarts": None, "max_wait": None, "idle_minutes": None, **vars(self)}
        ranges: dict[str, Range] = dict.fromkeys(("time", "max_wait"), ("0:00:01", None))
        ranges |= dict.fromkeys(("max_restarts", "price_per_hour", "max_cost"), (0, None))
        check_settings(settings, {**ranges, "idle_minutes": (1, None), **self.ranges})
        for name, (form, what) in self.forms.items():
            value = getattr(self, name)
            for text in value if isinstance(value, list) else [value]:
                if text is not None and not re.fullmatch(form, text, re.ASCII):
                    zone = re.fullmatch(rf"({form})-?[a-z]", text) if name == "region" else None
                    what = f"a zone, not a region; try launch.region={zone[1]}" if zone else f"not {what}"
                    raise ValueError(f"launch.{name}={text} is {what}")
        for name, reference in self.secrets.items():
            if not secret_reference.find_reader(reference) and not re.fullmatch(self.own_secret or "", reference):
                example = f"launch.secrets='{{{name}: {self.secret_example}}}'"  # the value may be the secret itself
                raise ValueError(f"launch.secrets.{name}: not a reference to a secret; try {example}")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that the platform cannot run, as far as can be known before submission."""
        for name, variable in self.defaults.items():
            self.check_set(name, f"give launch.{name}=…, or export {variable}=…")
        self.check_set(
            "storage", f"give the parent URL of the runs, launch.storage={self.protocols[0]}://<bucket>/runs"
        )
        self.check_storage(job)
        if job.array_size and job.nodes > 1:
            raise ValueError(f"trainer.num_nodes={job.nodes}: each run of an array has one node; try launch=slurm")
        if job.search and is_url(str(self.storage)):
            raise ValueError(
                f"launch.storage={self.storage}: the workers of a search need a folder that they share; use "
                "launch=slurm, or launch=kubernetes with a path on a volume"
            )
        if self.jupyter and job.nodes > 1:
            raise ValueError(
                f"trainer.num_nodes={job.nodes}: launch.jupyter=true uses one machine; set trainer.num_nodes=1"
            )
        self._check_cost(job)

    def _check_cost(self, job: Job) -> None:
        """Print the largest cost, if the price is known; raises ValueError if it exceeds the limit."""
        if self.price_per_hour is None or not self.time:
            if self.max_cost is not None:
                missing = "time" if self.price_per_hour is not None else "price_per_hour"
                raise ValueError(f"launch.max_cost={self.max_cost:g}: needs launch.{missing}; set it too")
            return
        nodes, hours = job.nodes * max(1, job.array_size), seconds(self.time) / 3600
        cost = nodes * hours * self.price_per_hour
        text = f"{cost:.2f}: {nodes} node{'s' * (nodes > 1)}, launch.time={self.time}"
        text += f", launch.price_per_hour={self.price_per_hour:g}"
        if self.max_cost is not None and cost > self.max_cost:
            raise ValueError(f"launch.max_cost={self.max_cost:g} is less than {text}; reduce launch.time, or raise it")
        print(f"note: costs at most {text}", file=sys.stderr)

    def check_set(self, name: str, remedy: str) -> None:
        """Raise ValueError if a setting is not set."""
        if not getattr(self, name):
            raise ValueError(f"launch.{name}: not set; {remedy}")

    def command(self, job: Job) -> list[str]:
        """Return the command that each node runs."""
        command = super().command(job) + secret_reference.arguments(self.secrets)
        if self.jupyter:
            command += ["--unpack"] if self.idle_minutes is None else ["--jupyter", f"{self.idle_minutes:g}"]
        return command

    def variables(self, job: Job) -> dict[str, str]:
        """Return the environment variables of the run."""
        return {name: str(value) for name, value in {**job.environment, **self.environment}.items()}

    def fill(self, template: Path, job: Job, **values: object) -> dict[str, Any]:
        """Return the fields of the job file that have a value: those of its template, and those of ``extra``."""
        variables = self.variables(job)
        values |= {"own": self, "job": job, "name": next_name(job), "folder": self.remote_folder(job.folder)}
        values |= {"command": self.command(job), "variables": variables, "seconds": seconds}
        values["pairs"] = [{"name": name, "value": value} for name, value in variables.items()]
        return merged(render_yaml(template, **values), self.extra)

    def job_yaml(self, content: Mapping[str, Any], job: Job, submit: str) -> str:
        """Return a job file in YAML, which begins with the command that submits it by hand."""
        code = f"The nodes read the code from {self.remote_folder(job.folder)}, to which launch.py sends it."
        return to_yaml(content, "To submit it by hand:", "", f"  {submit}", "", code)

    def submit(self, job: Job, file: Path) -> list[str]:
        """Send the code and the record to the storage, and submit the job; returns its id."""
        self.check_credentials()
        self.send(job, file)
        try:
            job_id = self.create(job, file)
        except (NoAnswerError, KeyboardInterrupt) as error:
            fault = str(error) or f"launch={self.option}: interrupted"
            hint = self.search_hint.format(name=next_name(job), own=self)
            raise UnclearSubmissionError(
                f"{fault}; the job may have been submitted: before you launch again, {hint}"
            ) from None
        return [self.array_id(job_id, task) for task in range(job.array_size)] or [job_id]

    def array_id(self, job_id: str, index: int) -> str:
        """Return the id of a run of an array from that of the array."""
        return f"{job_id}:{index}"

    def split_id(self, job_id: str) -> tuple[str, ...]:
        """Return the parts of a recorded job id; raises ValueError if it is malformed."""
        return match_job_id(self.id_form[0], job_id, self.id_form[1]).groups()

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no credentials."""

    def create(self, job: Job, file: Path) -> str:
        """Submit the job file; returns the id of the job.

        Raises:
            NoAnswerError: The job may have been submitted.
        """
        raise NotImplementedError

    def follow_events(
        self, read: Callable[[float], Iterator[tuple[str, float, str]]], job_id: str, folder: Path, *, follow: bool
    ) -> Iterator[str]:
        """Yield the events of the platform's log service, each once; without any, the output of rank 0.

        ``read`` yields id, time in seconds and text of the events since a time.
        """
        events = self._events(read, job_id if follow else None)
        return first_output(events, StoredRuns.logs(self, job_id, folder, follow=follow))

    def _events(self, read: Callable[[float], Iterator[tuple[str, float, str]]], job_id: str | None) -> Iterator[str]:
        seen: dict[str, float] = {}

        def new() -> Iterator[str]:
            since = max([0.0, *seen.values()]) - LATE
            for old in [event for event, at in seen.items() if at < since]:
                del seen[old]
            for event, at, text in read(since):
                if event not in seen:
                    seen[event] = at
                    yield text

        try:
            yield from self.follow(new, job_id, DELAY)
        except ForbiddenError as error:
            print(f"note: {error}; this is the log of rank 0", file=sys.stderr)


def read(place: str, start: int = 0) -> bytes:
    """Read an object from a position on; empty if it does not exist.

    Raises:
        UnreachableError: The storage cannot be reached.
    """
    try:
        store, path = resolve_filesystem(place)
        size = store.size(path)
        return bytes(store.cat_file(path, start=start)) if size and size > start else b""
    except FileNotFoundError:
        return b""
    except Exception as error:  # each storage raises its own exceptions
        raise UnreachableError(f"{place}: cannot be read ({reason(error)}); {remedy_for(place)}") from error


def earlier_id(job: Job) -> str:
    """Return the id of the previous job of a run; empty if there was none."""
    known = read_record(job.folder) if (job.folder / RECORD[0]).is_file() else {}
    return str((known.get("launch") or {}).get("id", ""))


class Dumper(yaml.SafeDumper):
    """Writes repeated values in full, and scripts line by line."""

    def ignore_aliases(self, data: Any) -> bool:
        """No value is an alias."""
        return True


Dumper.add_representer(
    str, lambda out, text: out.represent_scalar("tag:yaml.org,2002:str", text, style="|" if text[-1:] == "\n" else None)
)


def to_yaml(content: Any, *comments: str) -> str:
    """Return a job file in YAML, after lines of comments."""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return lines + yaml.dump(content, Dumper=Dumper, sort_keys=False, width=1000)


def as_text(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Convert values to text, as platforms expect: YAML reads an unquoted true or 1 as something else."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in (values or {}).items()
    }


def merged(values: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a job that have a value, with further ones, which are merged at every depth."""
    found = {name: value for name, value in values.items() if value not in (None, "", [], {})}
    for name, value in extra.items():
        is_nested = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value) if is_nested else value
    return found


def job_name(job: Job, *, limit: int = 63) -> str:
    """Return a name for the platform, unique to the run: lower-case letters, digits and single hyphens.

    Args:
        job: The job.
        limit: Largest number of characters.
    """
    name = re.sub("[^a-z0-9]+", "-", f"{job.name}-{job.folder.name}".lower()).strip("-")
    return name[-limit:].strip("-")  # the end is what is unique


def next_name(job: Job, limit: int = 60) -> str:
    """Return a name for the job that differs from that of the run's previous job, if it had one.

    Args:
        job: The job.
        limit: Largest number of characters, without the number that a resumed run gets.
    """
    name = job_name(job, limit=limit)
    found = re.search(rf"/{re.escape(name)}(?:-([0-9]+))?(?:@|$)", earlier_id(job))
    return f"{name}-{int(found[1] or 1) + 1}" if found else name
