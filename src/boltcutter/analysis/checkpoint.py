"""The info command: which run, code and settings a checkpoint is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.references import runs_folder
from boltcutter.checkpoint.load import read_metadata
from boltcutter.checkpoint.storage import CheckpointError, is_url
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.formatting import aligned
from boltcutter.project import Project
from boltcutter.run.best import find_checkpoint
from boltcutter.run.folder import read_record, read_run_config


def info_command(project: Project, overrides: Sequence[str]) -> dict[str, Any]:
    """Print what a checkpoint is of: ``run=<folder> ckpt=best|last|<path>``, or ``ckpt=<path>`` alone.

    Returns:
        What is printed.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    if unknown := [override for override in overrides if override.partition("=")[0] not in ("run", "ckpt", "runs")]:
        raise ConfigError(f"{unknown[0]}: not an argument of info; give run=<folder> or ckpt=<file>")
    if "run" in given:
        cfg = read_run_config(project, Path(given["run"]), instantiates=False, shows=True)
        file = find_checkpoint(cfg.place, given.get("ckpt", "best"))
    elif "ckpt" in given:
        file = given["ckpt"]
    else:
        raise ConfigError("info: no checkpoint is given; give run=<folder> or ckpt=<file>")
    try:
        facts = describe(file, runs_folder(project, overrides))
    except CheckpointError as error:
        raise ConfigError(f"ckpt={file}: {one_line(error).removeprefix(f'{file}: ')}") from error
    print(printable("\n".join(aligned([[name, str(value)] for name, value in facts.items() if value is not None]))))
    return facts


def describe(file: str, runs: str | None = None) -> dict[str, Any]:
    """What a checkpoint says of its origin, and what the record of its run does.

    Args:
        file: A checkpoint.
        runs: Folder of all runs, in which that of the checkpoint is looked for if the file is not in it.
    """
    content = read_metadata(file)
    origin = content.get("boltcutter") or {}
    place, record = _find_run(str(origin.get("run")), file, runs)
    library = record.get("library") or {}
    patch = f"{place}/code.patch" if place else "code.patch of the run"
    changes = f" with uncommitted changes, in {patch}" if origin.get("dirty") else ""
    commit = origin.get("commit")
    data = (record.get("config") or {}).get("data") or {}
    return {
        "checkpoint": file,
        "run": origin.get("run"),
        "folder": place,
        "code": f"commit {commit}{changes}" if commit else "unknown: no repository, or not saved by a run",
        "library": f"commit {library['commit']}" if library.get("commit") else library.get("version"),
        "attempt": origin.get("attempt"),
        "epoch": content.get("epoch"),
        "steps": content.get("global_step"),
        "lightning": content.get("pytorch-lightning_version"),
        "task": ((record.get("config") or {}).get("task") or {}).get("_target_"),
        "data": " ".join(filter(None, [data.get("_target_"), record.get("data") or origin.get("data")])) or None,
        "command": record.get("command") or origin.get("command"),
    }


def _find_run(identity: str, file: str, runs: str | None) -> tuple[str | None, dict[str, Any]]:
    """Folder and record of a run: one above the file, or else the one with its id among all runs."""
    near = [str(folder) for folder in list(Path(file).absolute().parents)[:2]]
    for folder in near:
        if (Path(folder) / run_files.RECORD).is_file() and read_record(Path(folder)).get("id") == identity:
            return folder, read_record(Path(folder))
    others = [run.folder for run in find_runs(runs)] if runs and not is_url(runs) else []
    found = next((folder for folder in others if Path(folder).name == identity), None)
    return found, read_record(Path(found)) if found else {}
