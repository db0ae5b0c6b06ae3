"""Check whether a run may continue in an existing folder without ``resume=``."""

from __future__ import annotations

import json
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.find import list_names
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.environment import identity
from boltcutter.run.best import resumed_checkpoint, saved_places
from boltcutter.run.changes import changed_settings, shown
from boltcutter.run.folder import read_record
from boltcutter.run.metrics import has_rows
from boltcutter.run.remote.store import run_store

# Keys that may differ between attempts.
LAUNCH_KEYS = ("folder", "resume", "ckpt", "resume_exact", "reproduce", "launch", "choices")
MAX_SHOWN = 3  # changed settings listed in a message


def check_start(cfg: Settings, *, given: bool) -> None:
    """Refuse to continue a run that this command did not start.

    A job that SLURM requeued, or that torchrun restarted, continues its own run, even in a folder set by the user.

    Args:
        cfg: Configuration of the run, with its folder.
        given: Whether the folder was set by the user.

    Raises:
        ConfigError: The folder or its checkpoints belong to another run.
    """
    folder = cfg.place.folder
    record = read_record(folder) if (folder / run_files.RECORD).is_file() else {}
    found = resumed_checkpoint(cfg, warn=lambda text: None)  # training reports damaged files
    if not found and (record.get("saved") or any(list_names(place) for place in saved_places(cfg.place))):
        raise ConfigError(
            f"{'resume' if cfg.resume else 'folder'}={folder}: the run has saved checkpoints, but none in "
            f"checkpoints={', '.join(saved_places(cfg.place))} is valid; restore them, name one by "
            f"resume={folder} ckpt=<file>, or use reproduce={folder} to start again in another folder"
        )
    if cfg.resume or not (found or (given and has_rows(folder))):
        return
    inside = cfg.place.checkpoints.startswith(f"{run_store().show(folder)}/")
    if (given or not inside) and not _is_restart(record):
        key, its = ("folder", cfg.folder) if inside else ("checkpoints", "<its folder>")
        raise ConfigError(f"{key}={cfg.get(key)} holds a run; use resume={its} to continue it, or another {key}")
    now = json.loads(json.dumps(run_store().portable(cfg), default=str))  # as it was recorded
    changed = [
        f"{key}={shown(new)}, was {shown(old)}"
        for key, (old, new) in changed_settings(record.get("config", {}), now).items()
        if key.partition(".")[0] not in LAUNCH_KEYS
    ]
    if changed:
        listed = ", ".join(changed[:MAX_SHOWN]) + (", …" if len(changed) > MAX_SHOWN else "")
        raise ConfigError(
            f"folder={folder} holds a run of another configuration ({listed}); use resume={folder} to continue it, "
            "or another folder"
        )


def _is_restart(record: dict[str, Any]) -> bool:
    attempts = record.get("attempts") or [{}]
    return identity.is_restarted() and identity.job_id() is not None and attempts[-1].get("job") == identity.job_id()
