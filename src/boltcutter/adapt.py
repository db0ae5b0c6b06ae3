"""Modules and data modules that know nothing of this project: what they lack, and what the trainer does without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.config import ConfigError
from boltcutter.environment.process import is_rank_zero
from boltcutter.monitors import MonitorCheck

# What data modules of this project have beside the hooks of Lightning's.
PROJECT_DATA = ("empty_splits", "sizes", "fingerprint", "loader", "read")


def is_native_data(data: Any) -> bool:
    """Whether a data module is one of this project's; a foreign one may use some of the names for something else."""
    return all(hasattr(type(data), name) for name in PROJECT_DATA)


def is_native_task(task: Any) -> bool:
    """Whether a task is one of this project's, which list what they log."""
    return isinstance(getattr(task, "logged", None), set)


def adapt(trainer: L.Trainer, task: L.LightningModule, callbacks: Mapping[str, Callback]) -> None:
    """Fit the trainer to a module that optimizes by itself, or does not list what it logs.

    Args:
        trainer: Changed.
        task: Any module.
        callbacks: Those of the configuration, by name.

    Raises:
        ConfigError: A setting has no meaning for the module.
    """
    if callbacks and not is_native_task(task):
        trainer.callbacks.insert(0, MonitorCheck(callbacks))  # type: ignore[attr-defined]
    if task.automatic_optimization:
        return
    name = type(task).__name__
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: {name} optimizes manually, and has to "
            "accumulate by itself; set trainer.accumulate_grad_batches=1"
        )
    if trainer.gradient_clip_val:
        if is_rank_zero():
            print(
                f"trainer.gradient_clip_val={trainer.gradient_clip_val} has no effect: {name} optimizes manually, and "
                "may call clip_gradients by itself"
            )
        trainer.gradient_clip_val = trainer.gradient_clip_algorithm = None


def skip_reason(data: Any, task: L.LightningModule, split: str) -> str | None:
    """What module and data lack to be measured on a split; None where they have all.

    Args:
        data: A data module, or None where the module has its own loaders.
        task: The module.
        split: ``train``, ``val`` or ``test``.
    """
    step = "validation_step" if uses_validation_step(data, split) else "test_step"
    if not is_overridden(step, task):
        return f"{type(task).__name__} has no {step}"
    if loader_owner(data, task, split) is None:
        return f"there is no {split}_dataloader"
    if is_native_data(data) and split in data.empty_splits:  # known once they are loaded
        return f"{type(data).__name__} has no samples in its {split} split (data.split)"
    return None


def uses_validation_step(data: Any, split: str) -> bool:
    """Whether a split is measured by ``validation_step``; data modules of this project give any split to a test."""
    return split == "val" and not is_native_data(data)


def loader_owner(data: Any, task: L.LightningModule, split: str) -> L.LightningDataModule | L.LightningModule | None:
    """The data module, or the module, that has the samples of a split."""
    owners = (owner for owner in (data, task) if owner is not None)
    return next((owner for owner in owners if is_overridden(f"{split}_dataloader", owner)), None)


def prediction_argument(data: Any, task: L.LightningModule) -> str | None:
    """What ``predict.py`` needs besides a run; None where it has nothing to predict for."""
    if is_native_data(data):
        return f"input=<{'text or file' if hasattr(task, 'generate') else 'files'}>"
    return "" if loader_owner(data, task, "predict") else None
