"""The info command: which run, code and settings a checkpoint is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.load import read_metadata
from boltcutter.checkpoint.storage import CheckpointError
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
    if unknown := [override for override in overrides if override.partition("=")[0] not in ("run", "ckpt")]:
        raise ConfigError(f"{unknown[0]}: not an argument of info; give run=<folder> or ckpt=<file>")
    if "run" in given:
        cfg = read_run_config(project, Path(given["run"]), instantiates=False, shows=True)
        file = find_checkpoint(cfg.place, given.get("ckpt", "best"))
    elif "ckpt" in given:
        file = given["ckpt"]
    else:
        raise ConfigError("info: no checkpoint is given; give run=<folder> or ckpt=<file>")
    try:
        facts = describe(file)
    except CheckpointError as error:
        raise ConfigError(f"ckpt={file}: {one_line(error).removeprefix(f'{file}: ')}") from error
    print(printable("\n".join(aligned([[name, str(value)] for name, value in facts.items() if value is not None]))))
    return facts


def describe(file: str) -> dict[str, Any]:
    """What a checkpoint says of its origin, and the record of the run in whose folder it is, if it is of that run."""
    content = read_metadata(file)
    origin = content.get("boltcutter") or {}
    record: dict[str, Any] = {}
    for folder in list(Path(file).absolute().parents)[:2]:
        if (folder / run_files.RECORD).is_file() and read_record(folder).get("id") == origin.get("run"):
            record = read_record(folder)
    library = record.get("library") or {}
    changes = " with uncommitted changes, in code.patch of the run" if origin.get("dirty") else ""
    commit = origin.get("commit")
    return {
        "checkpoint": file,
        "run": origin.get("run"),
        "code": f"commit {commit}{changes}" if commit else "unknown: no repository, or not saved by a run",
        "library": f"commit {library['commit']}" if library.get("commit") else library.get("version"),
        "attempt": origin.get("attempt"),
        "epoch": content.get("epoch"),
        "steps": content.get("global_step"),
        "lightning": content.get("pytorch-lightning_version"),
        "task": ((record.get("config") or {}).get("task") or {}).get("_target_"),
        "command": record.get("command"),
    }
