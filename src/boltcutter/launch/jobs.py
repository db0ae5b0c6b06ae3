"""How launched runs stand, what they print, and how to end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from boltcutter import build, run, trust
from boltcutter.config import ConfigError, DictConfig
from boltcutter.environment import lease
from boltcutter.launch import queue
from boltcutter.launch.job import Launcher


def launched(folder: Path) -> Iterator[tuple[Launcher, str]]:
    """The launcher that has a run, and the job's id there; nothing for a run that was started by hand."""
    facts = run.read_record(folder).get("launch")
    if facts:
        trust.check(facts["settings"], f"run={folder}", folder, signature=facts.get("signature"))
        yield build.build(DictConfig(facts["settings"]), "launch"), facts["id"]


def ask(verb: str, place: Path, *, follow: bool) -> None:
    """Show how runs stand or what they print, or end them.

    Raises:
        ConfigError: There is no such run, or no launcher has it.
    """
    folders = [file.parent for file in sorted(place.glob("*/record.json"))]
    answers: dict[str, Callable[..., None]] = {"status": show_status, "logs": show_logs, "cancel": cancel}
    for folder in [place] if (place / "record.json").is_file() or not folders else folders:
        for launcher, job_id in launched(folder) or ():
            answers[verb](launcher, job_id, folder, follow=follow)
            break
        else:
            raise ConfigError(f"{folder}: no launcher has this run; it was started by hand")


def show_status(launcher: Launcher, job_id: str, folder: Path, **_: bool) -> None:
    """What the launcher says, and each attempt with its reason."""
    print(f"{shown(folder)}: {launcher.status(job_id).text}")
    for attempt in run.read_record(folder)["attempts"]:
        print(f"  {attempt['start']}  {attempt['reason']}")


def show_logs(launcher: Launcher, job_id: str, folder: Path, *, follow: bool) -> None:
    """What the run has printed."""
    for text in launcher.logs(job_id, folder, follow=follow):
        print(text, end="", flush=True)


def cancel(launcher: Launcher, job_id: str, folder: Path, **_: bool) -> None:
    """End a run, which saves before."""
    launcher.cancel(job_id)
    print(f"{shown(folder)}: {launcher.status(job_id).text}")


def list_runs(runs: Path) -> None:
    """A line for each run of the project, the newest last, then one for each other job of the user.

    Args:
        runs: Folder that holds those of runs.

    Raises:
        ConfigError: Of some of them nothing can be told; all others are shown.
    """
    found = [file for depth in ("*/*", "*/*/*") for file in runs.glob(f"{depth}/record.json")]
    faults = dict[str, None]()
    for file in sorted(found, key=lambda file: file.stat().st_mtime):
        try:
            print(f"{shown(file.parent)}: {_state(file.parent)}")
        except (ValueError, ConfigError) as error:
            print(f"{shown(file.parent)}: not known")
            faults[str(error)] = None
    folders = {file.parent.resolve() for file in found}
    try:
        others = [job for job in queue.jobs() if not job.file or not _is_known(job.file, folders)]
    except ValueError as error:
        others, faults = [], faults | {str(error): None}
    for job in others:
        print(f"job {job.number}, {job.state}: {job.file or job.name}")
    if faults:
        raise ConfigError("\n".join(faults))


def _state(folder: Path) -> str:
    """How a run stands: what its launcher says, its attempts, and how the last one ended.

    Raises:
        ValueError: Its launcher does not answer.
        ConfigError: Its record cannot be read, or is not to be trusted.
    """
    record = run.read_record(folder)
    attempts = record.get("attempts") or []
    ended = attempts[-1]["reason"] if attempts else "never started"
    if ended == "running":  # or killed before it could record that
        holder = lease.read_holder(folder)
        ended = "killed" if holder is None or holder.is_alive() is False else ended
    state = [] if record.get("launch") else ["by hand"]
    if not state and ended != "completed":
        state = [launcher.status(job_id).text for launcher, job_id in launched(folder)]
    return ", ".join([*state, f"{len(attempts)} attempt{'' if len(attempts) == 1 else 's'}", ended])


def _is_known(file: Path, folders: set[Path]) -> bool:
    """Whether a job's file lies in one of the folders, or in that of an array of them."""
    home = file.parent.resolve()
    return any(home in (folder, folder.parent) for folder in folders)


def reason(folder: Path) -> str:
    """How the last attempt ended."""
    attempts = run.read_record(folder)["attempts"]
    return str(attempts[-1]["reason"]) if attempts else "never started"


def shown(folder: Path) -> str:
    """A path as short as it can be written here."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
