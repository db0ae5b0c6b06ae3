"""What the launchers of clouds and of Kubernetes have in common: storage, and the command of each node."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from boltcutter.checkpoint.storage import is_url
from boltcutter.launch import secret_reference
from boltcutter.launch.bundle import RECORD
from boltcutter.launch.job import (
    ForbiddenError,
    Job,
    NoAnswerError,
    Range,
    UnclearSubmissionError,
    check_settings,
    first_output,
    match_job_id,
    render_yaml,
    seconds,
)
from boltcutter.launch.stored_runs import StoredRuns
from boltcutter.run.folder import read_record

DELAY = 5.0  # seconds after the end of a job by which its last events are in the log
LATE = 60.0  # seconds by which the events of one node may appear later than those of another


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

    def __post_init__(self) -> None:
        self.tags = as_text(self.tags)
        for name, variable in self.defaults.items():
            setattr(self, name, getattr(self, name) or os.environ.get(variable))
        settings = {"max_restarts": None, "max_wait": None, **vars(self)}
        ranges: dict[str, Range] = dict.fromkeys(("time", "max_wait"), ("0:00:01", None))
        ranges |= dict.fromkeys(("max_restarts", "price_per_hour", "max_cost"), (0, None))
        check_settings(settings, {**ranges, **self.ranges})
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
        return super().command(job) + secret_reference.arguments(self.secrets)

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
