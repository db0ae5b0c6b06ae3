from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from boltcutter.evaluation.outcomes import PredictionWriter
from boltcutter.report import page


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


class Losses(L.LightningModule):
    """The number of each sample is its loss."""

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"losses": batch[1].float(), "predictions": batch[1].float(), "targets": batch[1]}


def test_outcome(tmp_path: Path, samples: list[Any], collate: Any) -> str:
    """Evaluate samples in batches of two, and return the report."""
    folder = tmp_path / "evaluation" / "test"
    trainer = L.Trainer(accelerator="cpu", callbacks=[PredictionWriter(folder)], logger=False)
    loader = DataLoader(samples, 2, collate_fn=collate)  # type: ignore[arg-type]
    trainer.test(Losses(), loader, verbose=False)
    return page.render_page(tmp_path)


test_outcome.__test__ = False  # type: ignore[attr-defined]


def pad(samples: list[Any]) -> Any:
    inputs, numbers = zip(*samples, strict=True)
    return {"steps": pad_sequence([*inputs], True)}, torch.tensor(numbers)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("structure", ["padded", "list"])
def test_the_worst_errors_of_different_lengths(tmp_path: Path, structure: str) -> None:
    samples = [(torch.full((5 - number,), 10.0 + number), number) for number in range(4)]
    collate = pad if structure == "padded" else lambda some: ([x for x, _ in some], torch.tensor([y for _, y in some]))
    report = test_outcome(tmp_path, samples, collate)
    with np.load(tmp_path / "evaluation" / "test" / "worst.npz") as worst:
        assert worst["loss"].tolist() == [3, 2, 1, 0]
        lengths = [3, 3, 5, 5] if structure == "padded" else [2, 3, 4, 5]
        assert worst["shapes"].tolist() == [[length] for length in lengths]
    assert "13  13" in report
    assert "13  13  0  0" not in report


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_picture_among_the_inputs_is_shown(tmp_path: Path) -> None:
    samples = [({"age": torch.rand(3), "picture": torch.rand(1, 8, 8)}, number) for number in range(4)]
    assert test_outcome(tmp_path, samples, None).count('<img src="data:image/png') == 4


class Named(list[Any]):
    """Samples of files."""

    names = ("a.png", "b.png", "c.png")


class Classes(L.LightningModule):
    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"predictions": batch[0], "targets": batch[1]}


class FileLosses(L.LightningModule):
    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"losses": batch[0][:, 0], "predictions": batch[0], "targets": batch[1], "inputs": batch[1]}


class Animals(L.LightningDataModule):
    classes = ("cat", "dog")

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Named((torch.eye(2)[number % 2], 1) for number in range(3)), 2)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_predictions_have_the_names_of_files_and_classes(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", callbacks=[PredictionWriter(tmp_path)], logger=False)
    trainer.test(Classes(), datamodule=Animals(), verbose=False)
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["file"].tolist() == ["a.png", "b.png", "c.png"]
    assert table["prediction_class"].tolist() == ["cat", "dog", "cat"]
    assert table["target_class"].tolist() == ["dog"] * 3


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_worst_errors_have_the_names_of_files(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", callbacks=[PredictionWriter(tmp_path)], logger=False)
    trainer.test(FileLosses(), datamodule=Animals(), verbose=False)
    with np.load(tmp_path / "worst.npz") as worst:
        assert worst["files"].tolist() == ["a.png", "c.png", "b.png"]
        assert worst["inputs"].shape == (3, 2)  # not the output of this name
