"""Launchers whose runs may be on object storage: the code is sent there, and output and records are read from there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.storage import is_url, resolve_filesystem
from boltcutter.config.errors import one_line
from boltcutter.launch.bundle import RECORD, check_size, pack
from boltcutter.launch.job import FINAL, POLL_SECONDS, Job, Launcher, UnreachableError, follow
from boltcutter.run import trust
from boltcutter.run.folder import read_record
from boltcutter.run.remote.store import fetch, publish
from boltcutter.run.remote.transfer import reason, remedy_for

LOG = "logs/rank-0.log"  # in the folder of a run


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
            options = [f"--index={self.index_variable}", f"--bundle={place}/{run_files.BUNDLE}"]
            options += ["--search"] if job.search else []
            place = place if job.search else self.remote_folder(Path(job.run_folder("")))
        return [str(self.python), "-m", "boltcutter.launch.node", place, *options, *job.trust]

    def send(self, job: Job, file: Path) -> None:
        """Send the code, the record and the job file to the storage."""
        pack(job.folder, job.run_folders)
        if is_url(str(self.storage)):
            for folder in job.run_folders:
                self.check_unused(folder)
            publish(job.folder, self.remote_folder(job.folder), [run_files.BUNDLE, file.name])
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
        content = read_object(place) or b"{}"
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
            if content := read_object(place, position):
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


def read_object(place: str, start: int = 0) -> bytes:
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
