"""Monitored metrics that are NaN."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.checkpoint import BestCheckpoint
from boltcutter.callback.monitors import MonitoredValues
from boltcutter.training.best import monitored_checkpoints

NAN = float("nan")


class Module(L.LightningModule):
    """Logs given values, one in each epoch, in validation or training."""

    def __init__(self, values: list[float], name: str = "val/score") -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.values, self.name = values, name

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.name.startswith("train"):
            self.log(self.name, self.values[self.current_epoch], on_step=False, on_epoch=True)
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.name.startswith("val") and not self.trainer.sanity_checking:
            self.log(self.name, self.values[self.current_epoch])

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def fit(folder: Path, module: Module) -> L.Trainer:
    best = BestCheckpoint(str(folder), monitor=module.name)
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[MonitoredValues(), best],
        max_epochs=len(module.values),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = DataLoader(TensorDataset(torch.ones(2, 1)))
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["val/score", "train/score"])
@pytest.mark.parametrize(
    ("values", "lines", "step"),
    [
        ([NAN, NAN, NAN], 2, None),  # the first, and all of them
        ([NAN, float("inf")], 2, None),
        ([NAN, 2.0, 3.0], 1, 4),
        ([2.0, NAN, 1.0, NAN], 2, 6),  # the first, and how many
        ([2.0, 1.0], 0, 4),
    ],
)
def test_one_line_says_that_a_metric_is_nan(
    name: str, values: list[float], lines: int, step: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(tmp_path, Module(values, name))
    found = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(found) == lines
    assert all(name in line for line in found)
    kept = monitored_checkpoints(trainer)
    assert bool(kept) == (step is not None)
    if step is not None:
        assert torch.load(kept[0].best_model_path, weights_only=True)["global_step"] == step
