from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from boltcutter.callback.keras_file import KerasFile


class Saved(nn.Linear):
    """A placeholder for a Keras model, which can only be saved here."""

    def save(self, path: str | Path) -> None:
        torch.save(self.weight.detach(), path)

    def load(self, path: str | Path) -> list[str]:
        raise NotImplementedError


class Task(BoringModel):
    """A module whose layer is named ``model``, as in the built-in tasks."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.model = Saved(32, 2)

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).mean()
        self.log("loss", loss)
        return loss


def fit(folder: Path, monitor: str | None) -> None:
    L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[KerasFile(), ModelCheckpoint(folder, monitor=monitor, mode="max", filename="best")],
    ).fit(Task())


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "is smaller than the logging interval", "GPU available")
]


def test_the_weights_are_those_of_the_best_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, "loss")  # falls, so the first of two epochs is best
    best = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert best["epoch"] == 0
    assert torch.equal(torch.load(tmp_path / "best.keras"), best["state_dict"]["model.weight"])


def test_without_a_best_checkpoint_nothing_is_written(tmp_path: Path) -> None:
    fit(tmp_path, None)
    assert not list(tmp_path.glob("*.keras"))


def test_a_model_that_is_not_a_keras_model_is_refused() -> None:
    task = Task()
    KerasFile().check_task(task)
    task.model = nn.Linear(1, 1)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^callback\.keras_file: model=Linear .*callback\.keras_file=null"):
        KerasFile().check_task(task)
