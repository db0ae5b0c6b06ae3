"""Record during training which checkpoints are saved, and which is the best, for commands that have only the folder."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint

from boltcutter.callback.checkpoint import BestCheckpoint, LastCheckpoint
from boltcutter.checkpoint.find import list_names
from boltcutter.checkpoint.storage import is_url, repeat
from boltcutter.config.settings import Settings
from boltcutter.run.best import relative
from boltcutter.run.folder import read_record, update_record


class CheckpointRecorder(Callback):
    """Records the best checkpoint, as the callbacks say, and the folders of all checkpoints, after each save.

    Args:
        cfg: The configuration of the run.
        configured: Callbacks of the configuration by name.
    """

    def __init__(self, cfg: Settings, configured: Mapping[str, Callback]) -> None:
        self.cfg, self.configured = cfg, configured
        self._places: set[str] = set()  # folders or URLs that were saved to
        self._recorded: dict[str, Any] = {}
        self._ours: Any = None  # what saves in place of a function of the trainer
        self._theirs: Any = None  # that function, if somebody has set it

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save the last checkpoint after the others, so that it contains their state; record what is saved."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A new list, as Lightning is iterating over this one.
        trainer.callbacks = sorted(callbacks, key=lambda callback: isinstance(callback, LastCheckpoint))  # type: ignore[attr-defined]
        self.teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._theirs, self._ours = vars(trainer).get("save_checkpoint"), partial(self._save, trainer)
            vars(trainer)["save_checkpoint"] = self._ours
            savers = (c for c in callbacks if isinstance(c, Checkpoint))
            ranks = any(getattr(c, "monitor", None) and getattr(c, "save_top_k", 1) for c in savers)
            if not ranks and trainer.is_global_zero and (note := why_no_best(trainer, self.configured)):
                print(note)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record what training has saved."""
        self._record(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what was still being written, and print which checkpoint counts if there are several."""
        self._record(trainer)
        found = monitored_checkpoints(trainer)
        if len(found) > 1 and trainer.is_global_zero:
            rest = ", ".join(map(_label, found[1:]))
            print(f"best checkpoint: {found[0].best_model_path}, by {_label(found[0])}; not that by {rest}")
        if not found and trainer.is_global_zero and (note := why_no_best(trainer, self.configured, ended=True)):
            print(note)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the trainer."""
        state = vars(trainer)
        if self._ours is not None and state.get("save_checkpoint") is self._ours:
            del state["save_checkpoint"]
            state.update({"save_checkpoint": self._theirs} if self._theirs else {})
        self._ours = self._theirs = None

    def _save(self, trainer: L.Trainer, filepath: Any, *arguments: Any, **options: Any) -> None:
        save = self._theirs or partial(type(trainer).save_checkpoint, trainer)
        save(filepath, *arguments, **options)
        self._places.add(str(filepath).rpartition("/")[0] or ".")
        self._record(trainer)

    def _record(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        folder, best = self.cfg.place.folder, next(iter(monitored_checkpoints(trainer)), None)
        facts: dict[str, Any] = {"best_by": describe(best) if best else None}
        if best:
            path = best.best_model_path
            if not is_url(path) and not os.path.exists(path):
                return  # it is being written
            facts["best"] = relative(self.cfg.place, path)
        if not self._recorded:
            self._recorded = {key: read_record(folder).get(key) for key in ("best", "best_by", "saved")}
        before = self._recorded.get("saved")
        saved = set(before) if isinstance(before, list) else set[str]()  # `true` in older records
        for place in self._places:
            if (name := relative(self.cfg.place, place)) not in saved and repeat(place, partial(list_names, place)):
                saved.add(name)
        facts |= {"saved": sorted(saved)} if saved else {}
        if facts != {key: self._recorded.get(key) for key in facts}:
            update_record(folder, **facts)
            self._recorded |= facts


def monitored_checkpoints(trainer: L.Trainer) -> list[Any]:
    """List the callbacks that have saved a best checkpoint, the one that counts first.

    That is ``callback.best``; else one whose metric the task or another callback monitors, such as early stopping;
    else the first. One whose metric was always NaN has none. Without any, one that saves the latest checkpoint counts,
    unless it is that of the run. They are subclasses of ``ModelCheckpoint``, or have its attributes.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = (trainer.lightning_module, *callbacks)
    monitored = {getattr(o, "monitor", None) for o in owners if not isinstance(o, Checkpoint)}
    saved: list[Any] = [c for c in callbacks if isinstance(c, Checkpoint) and getattr(c, "best_model_path", None)]
    found = [c for c in saved if getattr(c, "monitor", None) is not None]
    if not found and not any(isinstance(c, LastCheckpoint) for c in callbacks):
        return saved[:1]
    scored = [c for c in found if (score := describe(c)["score"]) is None or math.isfinite(score)]
    return sorted(scored, key=lambda c: (not isinstance(c, BestCheckpoint), c.monitor not in monitored))


def why_no_best(trainer: L.Trainer, configured: Mapping[str, Callback], *, ended: bool = False) -> str | None:
    """Say why no callback saves a best checkpoint; None if one does, or if that is said elsewhere.

    Args:
        trainer: With all callbacks.
        configured: Callbacks of the configuration by name.
        ended: Whether training has ended, so that a callback may have saved nothing; else it begins.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    savers: list[Any] = [c for c in callbacks if isinstance(c, Checkpoint) and not trainer.fast_dev_run]  # type: ignore[attr-defined]
    ranked = [c for c in savers if getattr(c, "monitor", None) and getattr(c, "save_top_k", 1)]
    if not savers or bool(ranked) != ended:
        return None
    is_due = [c.monitor in trainer.callback_metrics and not getattr(c, "best_model_path", "?") for c in ranked]
    if ended and not all(is_due):
        return None
    chosen: list[Any] = ranked or [
        c for c in savers if isinstance(c, ModelCheckpoint) and not isinstance(c, LastCheckpoint)
    ]
    names = {id(callback): f"callback.{name}" for name, callback in configured.items()}
    name = names.get(id(chosen[0]), type(chosen[0]).__name__) if chosen else ""
    if ended:
        reason = f"{name} was never due; lower its every_n_epochs, or train longer"
    elif chosen:
        reason = f"{name}.monitor=null; set it" if chosen[0].save_top_k else f"{name}.save_top_k=0; set it to 1"
    else:
        reason = "none has a monitor; add callback.best"
    return f"note: no callback saves a best checkpoint, so ckpt=best and the test take the last one: {reason}"


def describe(callback: Any) -> dict[str, Any]:
    """Describe the callback that saved the best checkpoint, for the record."""
    score, known = getattr(callback, "best_model_score", None), ("monitor", "mode")
    found = {"class": type(callback).__name__, **{name: getattr(callback, name, None) for name in known}}
    return found | {"score": None if score is None else float(score)}


def _label(callback: Any) -> str:
    return f"{type(callback).__name__} of {callback.monitor} ({getattr(callback, 'mode', 'min')})"
