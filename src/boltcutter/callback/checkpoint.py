"""Checkpoints: the last one, and the best, how many of them and how much room they may take."""

from __future__ import annotations

import sys
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint

GIB = 2**30


class MonitorNotLoggedError(RuntimeError):
    """There is no value of the metric that the best checkpoint is chosen by."""

    hide_traceback = True  # needs no traceback


class CheckpointSizeError(RuntimeError):
    """Not even one checkpoint fits into what checkpoints may take."""

    hide_traceback = True  # needs no traceback


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last checkpoint.

    A class of its own, because a ModelCheckpoint that a module's ``configure_callbacks`` returns replaces all callbacks
    of exactly that class.
    """


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoints; each carries its score.

    The one that is kept is ``best.ckpt``; of several each has its step in its name.

    Args:
        dirpath: Where they go; a path or a URL.
        monitor: Metric that they are best by.
        mode: Whether its ``min`` or its ``max`` is best.
        save_top_k: How many are kept; -1 keeps all.
        max_gib: What they may take in all, in GiB, beside the one that is being written; the worst are removed first,
            and the best never. Their size is known once they are written, so that an asynchronous write is waited for.
        checkpoint: Any other argument of ModelCheckpoint.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        *,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        max_gib: float | None = None,
        **checkpoint: Any,
    ) -> None:
        if save_top_k < -1:
            raise ValueError(
                f"callback.best.save_top_k={save_top_k} is not a number of checkpoints; try 3, or -1 for all"
            )
        if max_gib is not None and not max_gib > 0:
            raise ValueError(f"callback.best.max_gib={max_gib} is no room; try 10, or null for any")
        if max_gib is not None and monitor is None:
            raise ValueError(f"callback.best.max_gib={max_gib}: nothing tells the worst; set callback.best.monitor")
        names = {"filename": "best" if save_top_k == 1 else "best-{step}", "auto_insert_metric_name": False}
        replaced = {"enable_version_counter": False}  # what a resumed run makes again has the same name
        super().__init__(dirpath, monitor=monitor, mode=mode, save_top_k=save_top_k, **names | replaced | checkpoint)
        self.max_gib = max_gib
        self._saving = False
        self._configured = self.state_key

    @property
    def state_key(self) -> str:
        """Of its state in a checkpoint; it does not change when the monitor is replaced."""
        return getattr(self, "_configured", None) or super().state_key

    def replace_monitor(self, monitor: str | None, mode: Literal["min", "max"] = "min") -> None:
        """Choose by another metric than the configured one; without any, keep no best checkpoint."""
        if monitor is None:
            self.save_top_k = 0
        else:
            self.monitor, self.mode = monitor, mode
            self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that at least the weights have room.

        Raises:
            CheckpointSizeError: They have not.
        """
        if self.max_gib is not None:
            weights = sum(t.nbytes for t in pl_module.state_dict().values() if isinstance(t, torch.Tensor))
            self._fit(weights)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the score into the checkpoints that are kept for it."""
        if self._saving and self.current_score is not None:
            checkpoint["best"] = {"monitor": self.monitor, "mode": self.mode, "score": float(self.current_score)}

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self._saving = True
        try:
            super()._save_checkpoint(trainer, filepath)
        finally:
            self._saving = False

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, torch.Tensor]) -> None:
        if self.monitor in (None, *monitor_candidates) or not self.save_top_k:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        elif trainer.fit_loop.epoch_loop.val_loop._has_run:
            listed = ", ".join(sorted(monitor_candidates.keys() - {"epoch", "step"})) or "none"
            raise MonitorNotLoggedError(
                f"callback.best.monitor={self.monitor} is not logged (there are: {listed}); set callback.best.monitor "
                "and callback.best.mode, or callback.best=null"
            )
        elif trainer.is_global_zero:
            print(
                f"warning: callback.best.monitor={self.monitor}: there was no validation yet, so no checkpoint is kept "
                "as the best; lower trainer.val_check_interval, or monitor train/loss",
                file=sys.stderr,
            )

    def _update_best_and_save(self, current: Any, trainer: L.Trainer, monitor_candidates: Any) -> None:
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if self.max_gib is None:
            return
        sizes = self._sizes(trainer)
        self._fit(max(sizes.values()))
        worst_first = sorted(self.best_k_models, key=lambda path: self.best_k_models[path], reverse=self.mode == "min")
        for path in worst_first[:-1]:
            if sum(sizes.values()) <= self.max_gib * GIB:
                break
            del sizes[path], self.best_k_models[path]
            trainer.strategy.remove_checkpoint(path)
        if len(self.best_k_models) < len(worst_first):  # as many as these have room: the next replaces the worst
            self.save_top_k = len(self.best_k_models)
            self.kth_best_model_path = worst_first[-self.save_top_k]
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _sizes(self, trainer: L.Trainer) -> dict[str, int]:
        """Of each checkpoint that is kept, in bytes; the same on all ranks."""
        sizes = {}
        if trainer.is_global_zero:
            writer = trainer.strategy.checkpoint_io
            getattr(writer, "wait", int)()
            parts = getattr(writer, "sharded_size", lambda path: 0)
            store = get_filesystem(self.dirpath or "")
            store.invalidate_cache()
            sizes = {path: parts(path) + (store.size(path) if store.exists(path) else 0) for path in self.best_k_models}
        return dict(trainer.strategy.broadcast(sizes))

    def _fit(self, size: int) -> None:
        if self.max_gib is not None and size > self.max_gib * GIB:
            raise CheckpointSizeError(
                f"callback.best.max_gib={self.max_gib}: one checkpoint takes {size / GIB:.3g} GiB or more; "
                f"try {10 * size / GIB:.2g}"
            )
