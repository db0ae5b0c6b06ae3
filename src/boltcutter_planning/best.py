"""The best checkpoint of a run: that of ``callback.best``, or of a ``ModelCheckpoint`` of the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from boltcutter.callback.checkpoint import BestCheckpoint, LastCheckpoint
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.compose import DictConfig
from boltcutter.run.folder import read_record, update_record


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

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the final score as well, and print which checkpoint counts if there are several."""
        self._recorded = ""
        self._record(trainer)
        found = monitored_checkpoints(trainer)
        if len(found) > 1 and trainer.is_global_zero:
            rest = ", ".join(map(_label, found[1:]))
            print(f"best checkpoint: {found[0].best_model_path}, by {_label(found[0])}; not that by {rest}")

    def _record(self, trainer: L.Trainer) -> None:
        found = next(iter(monitored_checkpoints(trainer)), None) if trainer.is_global_zero else None
        if not found or self._recorded == found.best_model_path:
            return
        path, folder = found.best_model_path, Path(self.cfg.folder)
        if not is_url(path) and not os.path.exists(path):
            return  # it is being written
        self._recorded = path
        if not is_default(found, self.cfg):
            update_record(folder, best=path, best_by=describe(found))
        elif read_record(folder).get("best_by"):  # of an earlier attempt, with other callbacks
            update_record(folder, best_by=None)


def monitored_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    """List the callbacks that have saved a best checkpoint, the one that counts first.

    That is ``callback.best``; else one whose metric the task or another callback monitors, such as early stopping;
    else the first. Without any, one that saves the latest checkpoint counts, unless it is that of the run.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = (trainer.lightning_module, *callbacks)
    monitored = {getattr(o, "monitor", None) for o in owners if not isinstance(o, ModelCheckpoint)}
    saved = [c for c in callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
    found = [c for c in saved if c.monitor is not None]
    if not found and not any(isinstance(c, LastCheckpoint) for c in callbacks):
        return saved[:1]
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
