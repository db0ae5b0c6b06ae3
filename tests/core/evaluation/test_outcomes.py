from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from boltcutter.evaluation.outcomes import PredictionWriter, to_columns

CLASSES = torch.tensor([0, 2, 1])
SCORES = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.1, 0.7], [0.5, 0.3, 0.2]])


@pytest.mark.parametrize(
    ("outputs", "targets", "names", "skipped"),
    [
        ({"losses": torch.ones(3), "predictions": SCORES}, CLASSES, ["loss", "target", "prediction", "confidence"], []),
        ({"losses": torch.ones(3)}, CLASSES, ["loss"], []),
        (CLASSES, CLASSES, ["target", "prediction"], []),
        (SCORES[:, :1], torch.ones(3, 1), ["target", "prediction"], []),
        (
            {"predictions": SCORES},
            SCORES.round().long(),
            [f"{n}_{t}" for n in ("target", "prediction") for t in range(3)],
            [],
        ),
        (OrderedDict(loss=torch.tensor(1.0), logits=SCORES), None, ["logits_0", "logits_1", "logits_2"], ["loss"]),
        ({"mask": torch.ones(3, 8, 8), "iou": torch.ones(3)}, torch.ones(3, 8, 8), ["iou"], ["mask"]),
        ({"text": ["a", "b", "c"], "index": None}, None, [], ["text"]),
        ({"short": torch.ones(2)}, None, [], ["short"]),
        (torch.tensor(1.0), CLASSES, [], []),
        (None, CLASSES, [], []),
        ((SCORES, SCORES), None, [], ["prediction"]),
    ],
)
def test_one_number_per_sample_becomes_a_column(
    outputs: Any, targets: Any, names: list[str], skipped: list[str]
) -> None:
    found, rejected = to_columns(outputs, targets, 3)
    assert list(found) == names
    assert list(rejected) == skipped
    assert all(values.shape == (3,) for values in found.values())


def test_the_most_probable_class_is_returned_with_its_probability() -> None:
    found, _ = to_columns({"predictions": SCORES}, CLASSES, 3)
    assert found["prediction"].tolist() == [0, 2, 0]
    assert np.allclose(found["confidence"], [0.8, 0.7, 0.5])


def test_a_series_of_one_variable_is_a_column_for_each_position() -> None:
    outputs = {"predictions": torch.zeros(4, 3, 1), "targets": torch.ones(4, 3, 1)}
    table, skipped = to_columns(outputs, None, 4)
    assert list(table) == ["target_0", "target_1", "target_2", "prediction_0", "prediction_1", "prediction_2"]
    assert not skipped


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
