"""Checkpoint callbacks: the last checkpoint, and the best ones up to a number or a total size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities import cloud_io
from lightning.pytorch.callbacks import ModelCheckpoint

from boltcutter.internals import has_validated
from boltcutter.protocols import WaitsForWrites

GIB = 2**30

# Else adlfs, gcsfs and s3fs are imported for a second, to see that a folder is not on their object storage
setattr(cloud_io, "module_available", sys.modules.__contains__)  # noqa: B010 (mypy refuses an assignment)


class MetricNotLoggedError(RuntimeError):
    """A callback or scheduler monitors a metric that is not logged."""

    hide_traceback = True  # needs no traceback


class CheckpointSizeError(RuntimeError):
    """A single checkpoint is larger than the maximum total size."""

    hide_traceback = True  # needs no traceback


class LastCheckpoint(ModelCheckpoint):
    """Save the last checkpoint.

    A subclass, because a ``ModelCheckpoint`` returned by a module's ``configure_callbacks`` replaces all callbacks of
    exactly that class.
    """


class BestCheckpoint(ModelCheckpoint):
    """Save the best checkpoints, each with its score.

    With ``save_top_k=1`` the file is ``best.ckpt``, otherwise ``best-<step>.ckpt``.

    Args:
        dirpath: Folder of the checkpoints; a path or a URL.
        monitor: Metric to monitor.
        mode: ``min`` if smaller values are better, else ``max``.
        save_top_k: Number of checkpoints to keep; -1 keeps all.
        max_gib: Maximum total size of the kept checkpoints in GiB, excluding the one being written. The worst are
            removed first, the best never. Sizes are known only after writing, so asynchronous writes are waited for.
        checkpoint: Other arguments of ``ModelCheckpoint``.

    Raises:
        ValueError: ``save_top_k`` or ``max_gib`` is invalid.
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
                f"callback.best.save_top_k={save_top_k} must be -1 or more; try 3, or -1 to keep all checkpoints"
            )
        if max_gib is not None and not max_gib > 0:
            raise ValueError(f"callback.best.max_gib={max_gib} must be positive; try 10, or null for no limit")
        if max_gib is not None and monitor is None:
            raise ValueError(
                f"callback.best.max_gib={max_gib} needs a metric to rank checkpoints; set callback.best.monitor"
            )
        options: dict[str, Any] = {"filename": "best" if save_top_k == 1 else "best-{step}"}
        options |= {"auto_insert_metric_name": False, "save_top_k": save_top_k, "monitor": monitor, "mode": mode}
        options["enable_version_counter"] = False  # a resumed run overwrites the checkpoints of repeated steps
        try:
            super().__init__(dirpath, **options | checkpoint)
        except TypeError as error:  # of a file system that needs more than an address
            raise ValueError(f"checkpoints={dirpath}: cannot be reached ({error}); use s3://, gs:// or az://") from None
        self.max_gib = max_gib
        self._saving = self._has_warned = False
        self._initial_state_key = self.state_key

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint; it stays the same when the monitor is replaced."""
        return getattr(self, "_initial_state_key", None) or super().state_key

    def replace_monitor(self, monitor: str | None, mode: Literal["min", "max"] = "min") -> None:
        """Monitor another metric than the configured one; None disables saving the best checkpoint."""
        if monitor is None:
            self.save_top_k = 0
        else:
            self.monitor, self.mode = monitor, mode
            self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the weights are not larger than ``max_gib``.

        Raises:
            CheckpointSizeError: They are.
        """
        if self.max_gib is not None:
            weights = sum(t.nbytes for t in pl_module.state_dict().values() if isinstance(t, torch.Tensor))
            self._check_size(weights)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the score in the best checkpoints."""
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
        elif has_validated(trainer):
            logged = ", ".join(sorted(monitor_candidates.keys() - {"epoch", "step"})) or "none"
            raise MetricNotLoggedError(
                f"callback.best.monitor={self.monitor} is not logged (logged metrics: {logged}); set "
                "callback.best.monitor and callback.best.mode, or callback.best=null"
            )
        elif trainer.is_global_zero and not self._has_warned:
            self._has_warned = True
            print(
                f"warning: callback.best.monitor={self.monitor}: no validation has run yet, so no best checkpoint is "
                "saved; lower trainer.val_check_interval or check_val_every_n_epoch, or monitor train/loss",
                file=sys.stderr,
            )

    def _update_best_and_save(self, current: Any, trainer: L.Trainer, monitor_candidates: Any) -> None:
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if self.max_gib is None:
            return
        sizes = self._sizes(trainer)
        self._check_size(max(sizes.values()))
        worst_first = sorted(self.best_k_models, key=lambda path: self.best_k_models[path], reverse=self.mode == "min")
        for path in worst_first[:-1]:
            if sum(sizes.values()) <= self.max_gib * GIB:
                break
            del sizes[path], self.best_k_models[path]
            trainer.strategy.remove_checkpoint(path)
        if len(self.best_k_models) < len(worst_first):  # the limit is reached, so the next one replaces the worst
            self.save_top_k = len(self.best_k_models)
            self.kth_best_model_path = worst_first[-self.save_top_k]
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _sizes(self, trainer: L.Trainer) -> dict[str, int]:
        """Size of each kept checkpoint in bytes, the same on all ranks."""
        sizes = {}
        if trainer.is_global_zero:
            writer = trainer.strategy.checkpoint_io
            if isinstance(writer, WaitsForWrites):
                writer.wait()
            shards: Callable[[str], int] = getattr(writer, "sharded_size", lambda path: 0)
            store = cloud_io.get_filesystem(self.dirpath or "")
            store.invalidate_cache()
            sizes = {
                path: shards(path) + (store.size(path) if store.exists(path) else 0) for path in self.best_k_models
            }
        return dict(trainer.strategy.broadcast(sizes))

    def _check_size(self, size: int) -> None:
        if self.max_gib is not None and size > self.max_gib * GIB:
            raise CheckpointSizeError(
                f"callback.best.max_gib={self.max_gib}: a single checkpoint needs at least {size / GIB:.3g} GiB; "
                f"try {10 * size / GIB:.2g}"
            )


class DelayedSaves:
    """Delays what a ``ModelCheckpoint`` saves within an epoch: to before the next optimizer step, or the epoch's end.

    Lightning saves before the values of the step are logged, with gradients that are partly accumulated, and, after the
    last batch, before validation and the end of the epoch, which a resumed run would leave out.

    Args:
        trainer: The trainer.
        callback: Its hooks are set, until ``restore``.
    """

    HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")

    def __init__(self, trainer: L.Trainer, callback: ModelCheckpoint) -> None:
        self.callback = callback
        self.after_batch, self.after_epoch = callback.on_train_batch_end, callback.on_train_epoch_end
        self.replaced = {name: vars(callback)[name] for name in self.HOOKS if name in vars(callback)}
        self.is_due = trainer.fit_loop.epoch_loop.val_loop.restarted_mid_evaluation  # what precedes the validation
        for name in self.HOOKS:
            setattr(callback, name, getattr(self, name))

    def restore(self) -> None:
        """Restore the hooks that nobody has set since."""
        for name in self.HOOKS:
            if vars(self.callback).get(name) == getattr(self, name):
                delattr(self.callback, name)
                vars(self.callback).update({name: self.replaced[name]} if name in self.replaced else {})

    def save(self, trainer: L.Trainer, pl_module: L.LightningModule, batch_idx: int) -> None:
        """Save if it is due."""
        if not self.is_due:
            return
        self.is_due, progress = False, trainer.fit_loop.epoch_loop.batch_progress
        last, progress.is_last_batch = progress.is_last_batch, False  # else Lightning would wait for a validation
        try:
            self.after_batch(trainer, pl_module, None, None, batch_idx)
        finally:
            progress.is_last_batch = last

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save before the step, unless gradients are partly accumulated."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.save(trainer, pl_module, batch_idx)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Save later."""
        self.is_due = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what is due, then what is saved at the end of an epoch."""
        self.save(trainer, pl_module, trainer.fit_loop.batch_idx)
        self.after_epoch(trainer, pl_module)


def saves_within_epochs(callback: ModelCheckpoint) -> bool:
    """Whether it saves within epochs, by a number of steps or a time."""
    return callback._every_n_train_steps >= 1 or callback._train_time_interval is not None
