from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, R2Score

from boltcutter.task.regression import Regression

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "have no `val_dataloader`", "is smaller than the logging interval")
]


class Numbers(L.LightningDataModule):
    """Two targets of very different scales."""

    statistics: dict[str, Any] = {"target_mean": [50.0, -3000.0], "target_std": [10.0, 500.0]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(21, 4, generator=random)
        self.targets = torch.randn(21, 2, generator=random) * torch.tensor([10, 500]) + torch.tensor([50, -3000])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.inputs, self.targets), 8)

    test_dataloader = train_dataloader


def task(**options: Any) -> Regression:
    torch.manual_seed(0)
    options = {"num_outputs": 2, "metrics": {"mae": MeanAbsoluteError(), "r2": R2Score()}} | options
    return Regression(nn.Linear(4, options["num_outputs"]), optimizer=partial(Adam, lr=0.1), **options)


def trainer(folder: Path, max_epochs: int = 1) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def test_predictions_have_original_units_and_the_loss_is_standardized(tmp_path: Path) -> None:
    data, module = Numbers(), task()
    (scores,) = trainer(tmp_path).test(module, data, verbose=False)
    outputs = module.model(data.inputs).detach().numpy() * [10, 500] + [50, -3000]
    targets = data.targets.numpy()
    np.testing.assert_allclose(module.predictions(module(data.inputs)).detach(), outputs, rtol=1e-5)
    assert scores["test/mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-5)
    assert scores["test/r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-4)
    assert scores["test/loss"] == pytest.approx(np.mean(((targets - outputs) / [10, 500]) ** 2), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "expected"), [("mse", (4 + 0.25) / 2), ("l1", (2 + 0.5) / 2), ("huber", (1.5 + 0.125) / 2)]
)
def test_losses_of_standardized_targets(loss: Literal["mse", "l1", "huber"], expected: float) -> None:
    module = task(loss=loss)
    module.mean.copy_(torch.tensor([50, -3000]))
    module.std.copy_(torch.tensor([10, 500]))
    outputs, targets = torch.tensor([[70.0, -3000]] * 3), torch.tensor([[50.0, -2750]] * 3)
    torch.testing.assert_close(module.losses(outputs, targets), torch.full((3,), expected))


def test_mean_and_std_are_saved_in_checkpoints(tmp_path: Path) -> None:
    data, trained = Numbers(), task()
    training = trainer(tmp_path)
    training.fit(trained, data)
    training.save_checkpoint(tmp_path / "a.ckpt")
    loaded = task()
    loader = DataLoader(data.inputs, 8)  # type: ignore[arg-type]
    found = trainer(tmp_path).predict(loaded, loader, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert (loaded.mean.tolist(), loaded.std.tolist()) == ([50, -3000], [10, 500])
    torch.testing.assert_close(torch.cat(found or []), trained(data.inputs))  # type: ignore[arg-type]


def test_mean_and_std_of_the_checkpoint_take_precedence(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.fit(task(), Numbers())
    training.save_checkpoint(tmp_path / "a.ckpt")
    other, module = Numbers(), task()
    other.statistics = {"target_mean": [0.0, 0.0], "target_std": [1.0, 1.0]}
    trainer(tmp_path).test(module, other, ckpt_path=tmp_path / "a.ckpt", weights_only=True, verbose=False)
    assert module.mean.tolist() == [50, -3000]


def test_no_scaling_without_statistics(tmp_path: Path) -> None:
    module, data = task(), Numbers()
    data.statistics = {}
    trainer(tmp_path).test(module, data, verbose=False)
    torch.testing.assert_close(module(data.inputs), module.model(data.inputs))


def test_constant_targets_are_not_scaled(tmp_path: Path) -> None:
    module, data = task(), Numbers()
    data.statistics = {"target_mean": [50.0, -3000.0], "target_std": [10.0, 0.0]}
    trainer(tmp_path).test(module, data, verbose=False)
    assert module.std.tolist() == [10, 1]


def test_another_number_of_target_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task\.num_outputs=1 .* 2 .*; set task\.num_outputs=2$"):
        trainer(tmp_path).fit(task(num_outputs=1), Numbers())


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_precision_of_large_targets(dtype: torch.dtype, expected: torch.dtype) -> None:
    module = Regression(nn.Identity(), optimizer=partial(Adam))
    module.mean.fill_(2000)
    numbers = module(torch.tensor([[0.5], [1.0]], dtype=dtype))
    assert numbers.dtype == expected
    assert numbers.tolist() == [[2000.5], [2001.0]]


def test_training_learns_both_targets(tmp_path: Path) -> None:
    data = Numbers()
    data.targets = data.inputs[:, :2] * torch.tensor([10, 500]) + torch.tensor([50, -3000])
    module = task()
    training = trainer(tmp_path, max_epochs=60)
    training.fit(module, data)
    assert training.callback_metrics["train/r2"] > 0.99
