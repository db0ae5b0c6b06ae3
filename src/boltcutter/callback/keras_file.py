"""Keras files: weights to begin with, and the best model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from boltcutter.checkpoint.weights import StoresKerasFiles
from boltcutter.protocols import find_model


class KerasFile(Callback):
    """Save ``best.keras``, ``best.weights.h5`` or both beside the best checkpoint when training ends.

    Args:
        formats: File formats: ``keras``, ``weights.h5`` or both.
    """

    def __init__(self, formats: Sequence[Literal["keras", "weights.h5"]] = ("keras",)) -> None:
        self.formats = tuple(formats)

    def check_task(self, task: L.LightningModule) -> None:
        """Check that the task trains a Keras model."""
        model = find_model(task)
        if not isinstance(model, StoresKerasFiles):
            raise ValueError(
                f"callback.keras_file: model={type(model).__name__} is not a Keras model; set callback.keras_file=null "
                "or try model=keras_convnet"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the weights of the best checkpoint, on rank zero."""
        callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
        best = next((c.best_model_path for c in callbacks if c.monitor is not None), "")
        if not best:
            rank_zero_info("callback.keras_file: no file is written, because no best checkpoint was saved")
            return
        found: Any = trainer.strategy.load_checkpoint(best, weights_only=True)
        model: Any = copy.deepcopy(pl_module.model)
        weights = {n.removeprefix("model."): t for n, t in found["state_dict"].items() if n.startswith("model.")}
        model.load_state_dict(weights)
        if trainer.is_global_zero:
            store = get_filesystem(best)
            with TemporaryDirectory() as folder:
                for suffix in self.formats:
                    name = f"best.{suffix}"
                    model.save(f"{folder}/{name}")
                    store.put_file(f"{folder}/{name}", f"{best.rpartition('/')[0]}/{name}")
