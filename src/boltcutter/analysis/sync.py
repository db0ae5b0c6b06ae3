"""Upload runs that were logged offline to W&B, each step once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import wandb

from boltcutter import run_files
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.logger.wandb import base_url, is_reachable, logged_in
from boltcutter.project import Project
from boltcutter.run.destinations import logged_id
from boltcutter.run.folder import is_own, read_record, read_run_config
from boltcutter.run.metrics import read_rows

# What the logger in a record may set; others, as save_code, would upload files of this machine.
ALLOWED = ("entity", "group", "job_type", "notes", "tags")


class SyncError(ValueError):
    """A run cannot be uploaded."""

    hide_traceback = True  # needs no traceback


def sync_command(project: Project, overrides: list[str]) -> None:
    """Upload ``run=<folder>``, one or several, from its configuration, record and ``metrics.csv``.

    A run that was killed and resumed has a W&B folder per attempt, and ``wandb sync`` uploads repeated steps twice.
    ``metrics.csv`` has each step once. Data of the run that the server may already have is replaced.

    Args:
        project: Project whose configuration files tell which targets in a record are allowed.
        overrides: ``run=<folder>``, once or several times.

    Raises:
        SyncError: No login was found, or the server is unreachable.
        ConfigError: No run is given, a folder holds none, or its record is not trusted.
    """
    folders = [Path(override.partition("=")[2]) for override in overrides if override.startswith("run=")]
    if not folders or len(folders) != len(overrides):
        others = [override for override in overrides if not override.startswith("run=")]
        problem = f"{others[0]}: no such argument" if others else "run is not set"
        raise ConfigError(f"{problem}; use run=<run>, once or several times")
    cfgs = [read_run_config(project, folder, instantiates=False) for folder in folders]
    if not logged_in():
        raise SyncError(f"{base_url()}: not logged in; run `wandb login`")
    if not is_reachable(base_url()):
        raise SyncError(f"{base_url()} is unreachable; try again later")
    for folder, cfg in zip(folders, cfgs, strict=True):
        print(f"{folder}: {sync(folder, cfg.redacted)}")


def sync(folder: Path, config: dict[str, Any]) -> str:
    """Upload one run, whose configuration is verified.

    Returns:
        URL of the run.
    """
    record = read_record(folder)
    loggers = config.get("logger")
    settings = loggers.get("wandb") if isinstance(loggers, dict) else None
    settings = settings if isinstance(settings, dict) else {}  # of a record of somebody else
    with tempfile.TemporaryDirectory() as scratch:
        uploaded = _begin(
            folder,
            id=str(record.get("id") or folder.name) if is_own(folder) else logged_id(folder),
            name="/".join(folder.resolve().parts[-2:]),
            project=settings.get("project") or config["name"],
            config=config,
            dir=scratch,
            mode="online",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            **{key: settings[key] for key in ALLOWED if key in settings},
        )
        uploaded.define_metric("trainer/global_step")
        uploaded.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        best = settings.get("best")
        for metric, summary in best.items() if isinstance(best, dict) else ():
            uploaded.define_metric(metric, summary=summary, step_metric="trainer/global_step")
        for step, values in read_rows(folder / run_files.METRICS):
            uploaded.log(values | {"trainer/global_step": step})
        uploaded.summary.update(record.get("test", {}))
        reason = (record.get("attempts") or [{}])[-1].get("reason")
        uploaded.finish(exit_code=0 if str(reason).startswith("completed") else 1)
    return str(uploaded.url)


def _begin(folder: Path, **options: Any) -> Any:
    """Begin a run of W&B.

    Raises:
        SyncError: W&B refuses it, as of a name that it does not allow.
    """
    try:
        return wandb.init(**options)
    except wandb.errors.Error as error:
        raise SyncError(
            printable(f"{folder}: W&B refuses it ({one_line(error, 200)}); set logger.wandb.project")
        ) from None
