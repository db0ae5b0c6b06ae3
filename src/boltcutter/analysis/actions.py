"""Tags, notes, removal and archives of runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.analysis.facts import read_labels
from boltcutter.analysis.record import Run
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError, printable
from boltcutter.config.redaction import holds_value
from boltcutter.environment import lease
from boltcutter.formatting import to_json
from boltcutter.project import command

ARCHIVE = ".archive"  # in the folder of all runs, with the folders of runs that were archived
REMOVED = ".removed-"  # prefix of a folder that is being deleted


def tag(runs: Sequence[Run], tags: Sequence[str], *, removes: bool = False) -> None:
    """Add tags to runs, or remove them; those of the configuration are only hidden, as the record is not changed."""
    for run in runs:
        with _changed_labels(Path(run.folder)) as labels:
            own = [name for name in labels["tags"] if name not in tags]
            hidden = [name for name in labels["untagged"] if name not in tags]
            labels["tags"], labels["untagged"] = (own, [*hidden, *tags]) if removes else ([*own, *tags], hidden)


def note(runs: Sequence[Run], text: str) -> None:
    """Set the note of runs.

    Raises:
        ConfigError: It has the value of a secret variable.
    """
    if holds_value(text):
        raise ConfigError("note: has the value of a secret variable, which is not stored with a run; leave it out")
    for run in runs:
        with _changed_labels(Path(run.folder)) as labels:
            labels["note"] = text


@contextmanager
def _changed_labels(folder: Path) -> Iterator[dict[str, Any]]:
    """Labels that are written after the block, in which other processes wait for them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        labels = read_labels(folder)
        yield labels
        write_text(folder / run_files.LABELS, to_json(labels, indent=1) + "\n")
    finally:
        os.close(descriptor)


def remove(runs: Sequence[Run], *, is_confirmed: bool, ask: Callable[[str], str] = input) -> list[Run]:
    """Delete the folders of runs, after asking unless the user has agreed already."""
    if not (is_confirmed or ask is not input or sys.stdin.isatty()):
        raise ConfigError("remove: asks first, but the input is no terminal; add --yes")
    with ExitStack() as stack:
        _hold(runs, "remove", stack)
        if not is_confirmed and not _agrees(runs, ask):
            return []
        for run in runs:
            folder = Path(run.folder)
            draft = folder.with_name(f"{REMOVED}{folder.name}")  # so that no half of a run is left under its name
            folder.rename(draft)
            with writing(f"remove {run.id}: {draft} is left", "delete it yourself"):
                shutil.rmtree(draft)
            with suppress(OSError):
                folder.parent.rmdir()  # unless it holds other runs
    return list(runs)


def _agrees(runs: Sequence[Run], ask: Callable[[str], str]) -> bool:
    for run in runs:
        print(printable(f"{run.id}  {run.name}  {run.status}  {run.folder}"))
    count = "this run" if len(runs) == 1 else f"these {len(runs)} runs"
    text = f"Delete the folder of {count}, with checkpoints? This cannot be undone. Type yes: "
    return ask(text).strip().lower() in ("y", "yes")


def archive(root: Path, runs: Sequence[Run], *, restores: bool = False) -> list[Path]:
    """Move the folders of runs to the archive of the folder of all runs, or back."""
    verb, home = ("restore", root / ARCHIVE) if restores else ("archive", root)
    moves = []
    for run in runs:
        folder = Path(run.folder)
        if not folder.is_relative_to(home):
            raise ConfigError(f"{verb} {run.id}: {folder} is not in {home}; move it yourself")
        place = (root if restores else root / ARCHIVE) / folder.relative_to(home)
        if place.exists():
            raise ConfigError(f"{verb} {run.id}: {place} exists; move one of the two")
        if link := files.foreign_link(place):
            raise ConfigError(f"{verb} {run.id}: {link} is a link of another user; remove it")
        moves.append((folder, place))
    with ExitStack() as stack:
        _hold(runs, verb, stack)
        for folder, place in moves:
            place.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(place)
            (place / lease.FILE).unlink()  # of this process
    return [place for _, place in moves]


def _hold(runs: Sequence[Run], verb: str, stack: ExitStack) -> None:
    """Hold the leases of runs, and of the trials of searches, so that no process can start in their folders."""
    for run in runs:
        if run.parent:
            raise ConfigError(f"{verb} {run.id}: part of the search {run.parent}; {verb} the search")
        if run.status == "submitted":
            cancel = command("launch", "cancel", f"run={run.folder}")
            raise ConfigError(f"{verb} {run.id}: its job has not started; {cancel}")
        if link := files.foreign_link(run.folder):
            raise ConfigError(f"{verb} {run.id}: {link} is a link of another user; {verb} the folder that it leads to")
        if Path(run.folder).is_symlink():
            raise ConfigError(f"{verb} {run.id}: {run.folder} is a link; {verb} the folder that it leads to")
        trials = sorted(Path(run.folder).glob(f"trials/*/{lease.FILE}"))  # that a process may hold
        for folder in (Path(run.folder), *(file.parent for file in trials)):
            held = lease.Lease(folder)
            try:
                held.acquire()
            except lease.LeaseHeldError as error:
                text = str(error).replace(", stop it, or choose another folder", ", or stop it")
                raise ConfigError(f"{verb} {run.id}: {text}") from None
            except OSError as error:
                raise ConfigError(f"{verb} {run.id}: {folder} cannot be written ({error.strerror})") from None
            stack.callback(held.release)


@contextmanager
def writing(what: str, remedy: str) -> Iterator[None]:
    """Report in one line that files cannot be changed, such as those of another user."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename} " if error.filename and not what.startswith("--") else ""
        raise ConfigError(f"{what}: {where}cannot be written ({error.strerror}); {remedy}") from error
