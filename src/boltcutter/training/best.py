"""The best checkpoint of a run: that of ``callback.best``, or of a ``ModelCheckpoint`` of the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from boltcutter.callback.checkpoint import BestCheckpoint, LastCheckpoint
from boltcutter.checkpoint.load import find_damage
from boltcutter.checkpoint.select import find_best
from boltcutter.checkpoint.storage import CheckpointError, is_url
from boltcutter.config.compose import DictConfig
from boltcutter.protocols import HasMonitor
from boltcutter.run import folder as run

Selection = tuple[str | None, dict[str, Any] | None]  # path, and the callback if ``checkpoints`` alone does not tell


class BestRecorder(Callback):
    """Records the best checkpoint of a ``ModelCheckpoint`` of the user, for commands that have only the run folder.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self._recorded = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save the last checkpoint after the others, so that it contains their state."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A new list, as Lightning is iterating over this one.
        trainer.callbacks = sorted(callbacks, key=lambda callback: isinstance(callback, LastCheckpoint))  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record what has been saved before."""
        self._record(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what the last epoch has saved."""
        self._record(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record what training has saved."""
        self._record(trainer)

    def _record(self, trainer: L.Trainer) -> None:
        found = next(iter(monitored_checkpoints(trainer)), None) if trainer.is_global_zero else None
        if not found or self._recorded == found.best_model_path or is_default(found, self.cfg):
            return
        if is_url(found.best_model_path) or os.path.exists(found.best_model_path):  # or else it is being written
            self._recorded = found.best_model_path
            run.update_record(Path(self.cfg.folder), best=self._recorded, best_by=describe(found))


def select_best(trainer: L.Trainer, cfg: DictConfig) -> Selection:
    """Select the checkpoint to test, on rank zero, after training.

    Args:
        trainer: Its callbacks have saved checkpoints.
        cfg: The configuration of the run.

    Returns:
        Its path, None if there is no checkpoint; and what selected it, None if commands find it in ``checkpoints``.
    """
    found = monitored_checkpoints(trainer)
    for callback in found:
        if is_default(callback, cfg):
            path, by = find_best(cfg.checkpoints), None
        else:
            path, by = _valid(callback), describe(callback)
        if path:
            if others := [_label(other) for other in found if other is not callback]:
                print(f"best checkpoint: {path}, by {_label(callback)}; not that by {', '.join(others)}")
            return path, by
    record = run.read_record(Path(cfg.folder))
    if record.get("best_by") and find_damage(record["best"]) is None:  # by a spawned rank, with its own callbacks
        return record["best"], record["best_by"]
    if path := find_best(cfg.checkpoints):
        return path, None
    rest = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path)
    return next(((path, describe(callback)) for callback in rest if (path := _valid(callback))), (None, None))


def monitored_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    """List the callbacks that have saved a best checkpoint, the one that counts first.

    That is ``callback.best``; else one whose metric the task or another callback monitors, such as early stopping;
    else the first.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = (trainer.lightning_module, *callbacks)
    monitored = {o.monitor for o in owners if isinstance(o, HasMonitor) and not isinstance(o, ModelCheckpoint)}
    found = [c for c in callbacks if isinstance(c, ModelCheckpoint) and c.monitor is not None and c.best_model_path]
    return sorted(found, key=lambda c: (not isinstance(c, BestCheckpoint), c.monitor not in monitored))


def is_default(callback: ModelCheckpoint, cfg: DictConfig) -> bool:
    """Whether a callback saves where, and as, commands search the best checkpoint."""
    place = cfg.checkpoints if is_url(cfg.checkpoints) else os.path.realpath(cfg.checkpoints)
    return isinstance(callback, BestCheckpoint) and str(callback.dirpath).rstrip("/") == str(place).rstrip("/")


def describe(callback: ModelCheckpoint) -> dict[str, Any]:
    """Describe the callback that saved the best checkpoint, for the record."""
    score = None if callback.best_model_score is None else float(callback.best_model_score)
    return {"class": type(callback).__name__, "monitor": callback.monitor, "mode": callback.mode, "score": score}


def _label(callback: ModelCheckpoint) -> str:
    return f"{type(callback).__name__} of {callback.monitor} ({callback.mode})"


def _valid(callback: ModelCheckpoint) -> str | None:
    path = callback.best_model_path
    try:
        fault = find_damage(path)
    except CheckpointError as error:
        fault = str(error)
    if fault:
        print(f"warning: {path}: {fault}; trying another checkpoint")
    return None if fault else path
