"""What the launchers of clouds and of Kubernetes have in common: storage, and the command of each node."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.storage import error_text, is_url, resolve_filesystem
from boltcutter.launch.bundle import BUNDLE, RECORD, check_size, pack
from boltcutter.launch.job import (
    POLL_SECONDS,
    Job,
    Status,
    UnreachableError,
    check_control_characters,
    check_environment,
)
from boltcutter.run import folder as run
from boltcutter.run.remote import fetch, publish

FINAL = ("ended", "unknown")


class CloudLauncher:
    """Base class of launchers whose nodes do not share the disk of this machine.

    A subclass renders the job file of its platform, in which each node runs ``command(job)``, and submits it.

    Args:
        storage: Parent URL of the runs, such as s3://bucket/runs, that all nodes can write.
        image: Container image with Python, the library and the project's dependencies.
        python: Python interpreter on the nodes.
        environment: Environment variables of the run.
        max_restarts: How often the run is started again after a failure or a preemption.
        max_code_mb: Limit of the size of the project's files, which are sent with each job.
    """

    array: str | list[str] | None = None
    snapshot = True
    job_file = "job.yaml"
    protocols: tuple[str, ...] = ("s3", "gs", "az")  # of the storage
    platform = ""  # option of launch=, for messages

    def __init__(
        self,
        *,
        storage: str | None = None,
        image: str | None = None,
        python: str = "python",
        environment: dict[str, str] | None = None,
        max_restarts: int = 10,
        max_code_mb: float = 50,
    ) -> None:
        self.storage, self.image, self.python = storage, image, python
        self.environment, self.max_restarts, self.max_code_mb = environment or {}, max_restarts, max_code_mb
        check_environment(self.environment)
        for name, value in vars(self).items():
            check_control_characters(f"launch.{name}", value)
        if max_restarts < 0:
            raise ValueError(f"launch.max_restarts={max_restarts} is less than 0; try launch.max_restarts=0")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that the platform cannot run, as far as can be known before submission."""
        if not self.storage:
            example = f"{self.protocols[0]}://<bucket>/runs"
            raise ValueError(f"launch.storage: not set; give the parent URL of the runs, launch.storage={example}")
        if is_url(self.storage) and self.storage.partition("://")[0] not in self.protocols:
            expected = " or ".join(f"{protocol}://" for protocol in self.protocols)
            raise ValueError(f"launch.storage={self.storage}: the nodes cannot write there; use {expected}")
        if not job.code or not job.root:
            raise ValueError(f"launch={self.platform}: only files tracked by git are sent; git init, then git add them")
        check_size(job.root, job.folder, self.max_code_mb)

    def remote_folder(self, folder: Path) -> str:
        """Return the URL of a run, or its path on the nodes, from its folder on this machine."""
        return f"{str(self.storage).rstrip('/')}/{folder.parent.name}/{folder.name}"

    def command(self, job: Job) -> list[str]:
        """Return the command that each node runs."""
        return [self.python, "-m", "boltcutter.launch.node", self.remote_folder(job.folder), *job.trust]

    def variables(self, job: Job) -> dict[str, str]:
        """Return the environment variables of the run."""
        return {name: str(value) for name, value in {**job.environment, **self.environment}.items()}

    def render(self, job: Job) -> str:
        """Render the platform's job file; a pure function."""
        raise NotImplementedError

    def submit(self, job: Job, file: Path) -> list[str]:
        """Send the code and the record to the storage, and submit the job; returns its id."""
        self.check_credentials()
        pack(job.folder)
        if is_url(str(self.storage)):
            names = [BUNDLE, file.name, *(name for name in RECORD if (job.folder / name).is_file())]
            publish(job.folder, self.remote_folder(job.folder), names)
        return [self.create(job, file)]

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no credentials."""

    def create(self, job: Job, file: Path) -> str:
        """Submit the job file; returns the id of the job."""
        raise NotImplementedError

    def status(self, job_id: str) -> Status:
        """Return the status of a job; raises ``UnreachableError`` if the platform does not respond."""
        raise NotImplementedError

    def cancel(self, job_id: str) -> None:
        """Cancel the job, which saves a checkpoint."""
        raise NotImplementedError

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of rank 0 from the storage; with ``follow`` until the job has ended."""
        place, position, is_reachable = f"{self.remote_folder(folder)}/logs/rank-0.log", 0, True
        while True:
            last = not follow
            try:
                last = last or self.status(job_id).state in FINAL
                if content := read(place, position):
                    position += len(content)
                    yield content.decode(errors="replace")
                is_reachable = True
            except UnreachableError as error:  # the run itself may still be running
                if last:
                    raise
                if is_reachable:
                    print(f"note: {error}", file=sys.stderr)
                is_reachable = False
            if last:
                return
            time.sleep(5 * POLL_SECONDS)

    def fetch(self, folder: Path) -> list[str]:
        """Download the run into its folder on this machine; returns the names of new and changed files."""
        if not is_url(str(self.storage)):
            raise ValueError(f"launch.storage={self.storage} is a path on the nodes; copy the run from there")
        return fetch(self.remote_folder(folder), folder)

    def refresh(self, folder: Path) -> None:
        """Update the record of a run on this machine from the storage, if it is there and can be reached."""
        if not is_url(str(self.storage)) or not (content := read(f"{self.remote_folder(folder)}/{RECORD[0]}")):
            return
        found: dict[str, Any] = json.loads(content)
        known = run.read_record(folder)
        if len(found.get("attempts", ())) >= len(known.get("attempts", ())):
            write_text(folder / RECORD[0], json.dumps(found | {"launch": known.get("launch")}, indent=2) + "\n")


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
        raise UnreachableError(f"{place}: cannot be read ({error_text(error)}); check the credentials") from error


def job_name(job: Job, *, limit: int = 63, pattern: str = r"[^a-z0-9-]+") -> str:
    """Return a name for the platform, unique to the run: lower-case letters, digits and hyphens.

    Args:
        job: The job.
        limit: Largest number of characters.
        pattern: What is replaced by a hyphen.
    """
    name = re.sub(pattern, "-", f"{job.name}-{job.folder.name}".lower()).strip("-")
    return name[-limit:].strip("-")  # the end is what is unique
