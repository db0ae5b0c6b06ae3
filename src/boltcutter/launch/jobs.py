"""Status, logs and cancellation of launched runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.config.instantiate import build, checked
from boltcutter.config.locate import locate
from boltcutter.config.settings import Settings
from boltcutter.environment import lease, user_key
from boltcutter.environment.output import LenientFile
from boltcutter.launch import slurm_queue
from boltcutter.launch.job import Launcher
from boltcutter.launch.stored_runs import find_stored
from boltcutter.project import display_path
from boltcutter.run import trust
from boltcutter.run.folder import is_own, read_record


def remember(runs: str, folder: Path) -> None:
    """Let ``list`` show a launched run, or the runs of an array, whose folder is not in that of all runs."""
    if "://" not in runs and not folder.resolve().is_relative_to(Path(runs).resolve()):
        with suppress(OSError):  # of a folder that this user cannot write, in which list finds no other runs either
            Path(runs).mkdir(parents=True, exist_ok=True)
            with open(Path(runs) / run_files.FOLDERS, "a", opener=files.opener(runs)) as file:
                file.write(f"{folder.resolve()}\n")


@dataclass
class LaunchSettings:
    """Configuration of the launch command besides that of training.

    Args:
        launch: The launcher.
    """

    launch: Launcher


def find_launcher(folder: Path, *, cancels: bool = False) -> tuple[Launcher, str] | None:
    """Return the launcher of a run and its job id; None for a run that was not launched.

    Args:
        folder: Folder of the run.
        cancels: Whether the job will be cancelled, which may be another one of this user if somebody else names it.

    Raises:
        ConfigError: The settings or the id are damaged, or not trusted.
    """
    if not (facts := read_launch(folder, "run")):
        return None
    if not isinstance(facts.get("id"), str):
        raise ConfigError(f"run={folder}: its record.json has no id of a job; launch the run again")
    if cancels and not (trust.is_granted() or user_key.is_signed(job_of(facts), facts.get("id_signature"))):
        raise ConfigError(f"run={folder}: you have not signed the id of its job; {trust.REMEDY}")
    try:
        settings = checked(Settings({"launch": facts["settings"]}), LaunchSettings)
        kind = locate(str(facts["settings"].get("_target_")))
        if not all(hasattr(kind, name) for name in ("submit", "status", "cancel", "logs")):
            raise ConfigError(f"launch._target_={facts['settings']['_target_']}: no launcher")
    except ConfigError as error:
        raise ConfigError(f"run={folder}: its record.json: {error.mistakes[0]}; launch the run again") from None
    return build(settings.get("launch"), "launch"), facts["id"]


def job_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the signature of a job's id is of."""
    return {"id": facts["id"], "settings": facts["settings"]}


def read_launch(folder: Path, setting: str, *, runs: bool = False) -> dict[str, Any] | None:
    """Read how a run was launched; None if it was not.

    Args:
        folder: Folder of the run.
        setting: Key of the override that names the folder, for error messages.
        runs: Whether the settings will be used to launch it again.

    Raises:
        ConfigError: The settings are damaged, or not trusted.
    """
    facts: dict[str, Any] = read_record(folder).get("launch") or {}
    if facts and not isinstance(facts.get("settings"), dict):
        raise ConfigError(f"{setting}={folder}: its record.json has no launch settings; launch the run again")
    if facts:
        trust.check_record(
            facts["settings"], f"{setting}={folder}", folder, signature=facts.get("signature"), runs=runs, walks=True
        )
    return facts or None


def run_verb(verb: str, place: Path, *, follow: bool) -> None:
    """Print the status or logs of runs, or cancel them.

    Args:
        verb: ``status``, ``logs``, ``cancel`` or ``fetch``.
        place: Folder of a run or of an array.
        follow: Whether to follow logs until the runs have ended.
    """
    folders = [file.parent for file in sorted(place.glob("*/record.json"))]
    is_run = (place / run_files.RECORD).is_file()
    for folder in [place] if is_run or not folders else folders:
        if not (launched := find_launcher(folder, cancels=verb == "cancel")):
            raise ConfigError(f"run={folder}: this run was not launched; use the process or job that started it")
        launcher, job_id = launched
        if verb == "logs":
            show_logs(launcher, job_id, folder, follow=follow)
        elif verb == "fetch":
            if not (stored := find_stored(launcher)):
                raise ValueError(f"run={display_path(folder)}: nothing to fetch; the run is in this folder")
            names = stored.fetch(folder)
            print(f"{display_path(folder)}: {len(names)} files downloaded from {stored.remote_folder(folder)}")
        else:
            if verb == "cancel":  # the run saves a checkpoint first
                if is_run and launcher.is_inseparable(job_id):
                    raise ValueError(f"run={place}: its array can be cancelled only as a whole; use run={place.parent}")
                launcher.cancel(job_id)
            print(printable(f"{display_path(folder)}: {launcher.status(job_id).text}"))
        if verb == "status":
            refresh(launcher, folder)
            for attempt in read_record(folder).get("attempts") or ():
                print(printable(f"  {attempt.get('start')}  {attempt.get('reason')}"))


def show_logs(launcher: Launcher, job_id: str, folder: Path, *, follow: bool) -> None:
    """Print the output of the run."""
    is_raw = is_own(folder)
    for text in launcher.logs(job_id, folder, follow=follow):
        print(text if is_raw else printable(text), end="", flush=True)
        if LenientFile.is_lost:  # as after | head
            return


def refresh(launcher: Launcher, *folders: Path) -> None:
    """Update the records of runs that are on the storage of their platform; a note if that cannot be reached."""
    if not (stored := find_stored(launcher)):
        return
    for folder in folders:
        try:
            stored.refresh(folder)
        except ValueError as error:
            print(printable(f"note: {one_line(error)}"), file=sys.stderr)


def list_runs(runs: Path) -> None:
    """Print a line for each run of the project, the newest last, then one for each other job of the user."""
    found = [file for depth in ("*/*", "*/*/*") for file in runs.glob(f"{depth}/record.json")]
    for folder in map(Path, trust.read_own_lines(runs / run_files.FOLDERS)):
        found += [*folder.glob(run_files.RECORD), *folder.glob("*/record.json")]
    faults = dict[str, None]()
    for file in sorted(found, key=lambda file: file.stat().st_mtime):
        try:
            print(printable(f"{display_path(file.parent)}: {_state(file.parent)}"))
        except OSError as error:  # as of a folder in place of the lease
            print(printable(f"{display_path(file.parent)}: unknown"))
            faults[f"{display_path(file.parent)}: {error.strerror}; restore it from a copy"] = None
        except (ValueError, ConfigError) as error:
            print(printable(f"{display_path(file.parent)}: unknown"))
            faults[str(error)] = None
    known = {folder.resolve() for file in found for folder in (file.parent, file.parent.parent)}  # also those of arrays
    try:
        others = [job for job in slurm_queue.jobs() if not job.file or job.file.parent.resolve() not in known]
    except ValueError as error:
        others, faults = [], faults | {str(error): None}
    for job in others:
        print(f"job {job.number}, {job.state}: {job.file or job.name}")
    if faults:
        raise ConfigError(*faults)


def _state(folder: Path) -> str:
    """Describe a run: the status by its launcher, the number of attempts, and how the last one ended.

    Raises:
        ValueError: Its launcher does not respond.
        ConfigError: Its record cannot be read, or is not trusted.
    """
    record = read_record(folder)
    attempts = record.get("attempts") or []
    ended = str(attempts[-1].get("reason")) if attempts else "never started"
    if ended == "running":  # or killed before it could record that
        holder = lease.read_holder(folder)
        ended = "killed" if holder is None or holder.is_alive() is False else ended
    state = [] if record.get("launch") else ["not launched"]
    if ended != "completed" and (launched := find_launcher(folder)):
        status = launched[0].status(launched[1])
        state = [status.text]
        if not attempts and status.state == "ended":
            ended = "failed at its start, see launch logs"
    return ", ".join([*state, f"{len(attempts)} attempt{'' if len(attempts) == 1 else 's'}", ended])


def has_completed(folder: Path) -> bool:
    """Whether the last attempt of a run has completed."""
    if attempts := read_record(folder).get("attempts"):
        return str(attempts[-1].get("reason")).startswith("completed")
    launched = find_launcher(folder)
    return launched is not None and launched[0].status(launched[1]).succeeded
