"""The best model as a file of Keras."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, runtime_checkable

import lightning as L
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info


@runtime_checkable
class WritesKerasFiles(Protocol):
    """What a model has that can be written as a file of Keras; ``boltcutter.model.keras.KerasModel`` does."""

    def save(self, path: str | Path) -> None:
        """Write the weights it has now; the name's ending tells the format."""


class KerasFile(Callback):
    """Writes ``best.keras``, ``best.weights.h5`` or both beside the best checkpoint when training ends.

    Args:
        formats: Which of the two.

    Raises:
        ValueError: No format is given.
    """

    def __init__(self, formats: Sequence[Literal["keras", "weights.h5"]] = ("keras",)) -> None:
        if not formats:
            raise ValueError("callback.keras_file.formats is empty; name keras, weights.h5 or both")
        self.formats = tuple(formats)

    def check_task(self, task: L.LightningModule) -> None:
        """Raise ValueError unless the task trains a Keras model."""
        model = getattr(task, "model", None)
        if not isinstance(model, WritesKerasFiles):
            raise ValueError(
                f"callback.keras_file: model={type(model).__name__} is not a Keras model; set callback.keras_file=null "
                "or try model=keras_convnet"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the weights of the best checkpoint, on the first rank."""
        kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
        best = next((c.best_model_path for c in kept if c.monitor is not None), "")
        if not best:
            rank_zero_info("callback.keras_file: nothing is written, because no checkpoint was kept as the best")
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
