"""Find the checkpoint of a finished run: its best one may be that of a ``ModelCheckpoint`` with a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from boltcutter.checkpoint import select
from boltcutter.checkpoint.load import find_damage
from boltcutter.checkpoint.storage import CheckpointError, is_url
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError, printable
from boltcutter.environment.identity import is_restarted
from boltcutter.environment.process import is_rank_zero
from boltcutter.run import trust
from boltcutter.run.folder import read_record


def resumed_checkpoint(cfg: DictConfig, warn: Callable[[str], None] = print) -> str | None:
    """Find the checkpoint to resume from: the newest, or the one given with ``resume=``; None for a new run.

    ``warn`` is called with a warning for each damaged file, on rank zero.

    Raises:
        ConfigError: The given checkpoint does not exist or is damaged, or the storage cannot be reached, or holds only
            DeepSpeed's checkpoint folders.
    """
    if cfg.get("ckpt") and not is_restarted():  # a requeued job continues from what it has saved since
        return find_checkpoint(cfg, cfg.ckpt)
    try:
        found = select.find_newest(cfg.checkpoints, warn if is_rank_zero() else lambda text: None)
        if found is None and (sharded := select.list_folders(cfg.checkpoints)):
            raise CheckpointError(
                f"{sharded[0]} is a folder written by DeepSpeed, from which runs cannot be resumed; use another "
                "folder=, with init_from=<weights file written by zero_to_fp32.py in that folder>"
            )
    except CheckpointError as error:
        raise ConfigError(f"checkpoints={error}") from error
    return found


def find_checkpoint(cfg: DictConfig, which: str) -> str:
    """Find a checkpoint of a run as ``select.find_checkpoint`` does; ``best`` may be in a folder of its own."""
    return (_recorded(cfg) if which == "best" else None) or select.find_checkpoint(cfg.checkpoints, which)


def find_best(cfg: DictConfig) -> str | None:
    """Find the checkpoint of a run that is tested after training; None if there is none."""
    return _recorded(cfg) or select.find_best(cfg.checkpoints)


def _recorded(cfg: DictConfig) -> str | None:
    """The best checkpoint of a ``ModelCheckpoint`` of the user, unless it is damaged."""
    record = read_record(Path(cfg.folder))
    if not record.get("best_by"):
        return None
    path = str(record.get("best"))
    inside = Path(cfg.folder, path.rpartition(f"/{record.get('id')}/")[2])  # the folder may have been moved
    if not is_url(path) and inside.exists():
        path = str(inside)
    is_elsewhere = is_url(path) and not path.startswith(f"{cfg.checkpoints}/")  # which is verified
    if "::" in path or is_elsewhere:  # and this entry is not signed
        trust.check(path, f"run={cfg.folder}", Path(cfg.folder))
    try:
        fault = find_damage(path)
    except CheckpointError as error:
        fault = str(error)
    if fault is None:
        return path
    if is_rank_zero():
        print(printable(f"warning: ckpt=best: {path}: {fault}; trying another checkpoint"), file=sys.stderr)
    return None
