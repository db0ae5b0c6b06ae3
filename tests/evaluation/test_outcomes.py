from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from boltcutter.evaluation.outcomes import PredictionWriter


class SomeLosses(L.LightningModule):
    """Returns losses for every other batch."""

    def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        outputs = {"predictions": batch[:, 0]}
        return outputs if batch_idx % 2 else outputs | {"losses": batch[:, 0]}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_losses_of_some_batches_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = L.Trainer(accelerator="cpu", callbacks=[PredictionWriter(tmp_path)], logger=False)
    trainer.test(SomeLosses(), DataLoader(torch.rand(8, 3), 2), verbose=False)  # type: ignore[arg-type]
    assert list(pd.read_csv(tmp_path / "predictions.csv")) == ["index", "prediction"]
    assert not (tmp_path / "worst.npz").exists()
    assert "skipped outputs: loss (is not returned for each batch)" in capsys.readouterr().out
