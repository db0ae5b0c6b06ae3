"""Where non-finite gradients come from; the message of the guard."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.guard import Guard, NonFiniteGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")


class Module(L.LightningModule):
    """A module whose values become non-finite in the given part."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.part = part
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 1))
        if part == "module":
            self.net[1].register_forward_hook(lambda module, inputs, output: output.clamp(max=0).log())
        if part == "weight":
            self.net[2].weight.data[0, 1] = torch.nan

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        x = x.log() if self.part == "transform" else x
        error = (self.net(x) - y).square().mean()
        if self.part == "loss":
            error = error / 0
        if self.part == "backward":
            error = error + (error - error.detach()).abs().sqrt()  # whose slope at 0 is infinite
        self.log("train/loss", error)
        return {"loss": error}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def message(folder: Path, module: L.LightningModule, inputs: Tensor, targets: Tensor, **options: Any) -> str:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[Guard(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with pytest.raises(NonFiniteGradientError) as error:
        trainer.fit(module, DataLoader(TensorDataset(inputs, targets), 4))
    return str(error.value)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("module", "the output of net.1 (Identity) is the first that is not finite"),
        ("transform", "the input of net.0 (Linear) is the first that is not finite"),
        ("loss", "the loss is inf, but each module's output is finite"),
        ("backward", "the loss is finite, but the backward pass of Abs is not"),
        ("weight", "the weight net.2.weight is not finite"),
    ],
)
def test_the_first_part_that_is_not_finite_is_named(part: str, expected: str, tmp_path: Path) -> None:
    found = message(tmp_path, Module(part), -torch.ones(8, 3), torch.zeros(8, 1))
    assert expected in found
    assert "optimizer.lr" not in found  # which had no effect before the first step


@pytest.mark.parametrize(("where", "value"), [(0, torch.nan), (1, torch.inf)])
def test_samples_that_are_not_finite_are_named(where: int, value: float, tmp_path: Path) -> None:
    tensors = [torch.ones(8, 3), torch.zeros(8, 1)]
    tensors[where][5, 0] = tensors[where][7, 0] = value
    found = message(tmp_path, Module(), *tensors)
    assert (
        f"batch[{where}] has {value} in sample 1 of the 4 of the batch, position [0] (2 of 8 training samples: 5, 7)"
        in found
    )
    assert "epoch 0, batch 1" in found
    assert "optimizer.lr" not in found
    assert "remove these samples" in found


def test_columns_are_named_and_the_run_ends_in_one_line(script: Script, tmp_path: Path) -> None:
    (tmp_path / "spoiled.py").write_text(
        "from boltcutter.data.tabular import Tabular\n"
        "class Spoiled(Tabular):\n"
        "    def load(self):\n"
        "        splits = super().load()\n"
        "        splits.train.inputs[3, 1] = float('nan')\n"
        "        return splits\n"
    )
    table = pd.DataFrame(np.random.default_rng(0).random((60, 3)), columns=["age", "income", "price"])
    table.to_csv(tmp_path / "table.csv", index=False)
    builtin = (Path(__file__).parents[2] / "configs" / "data" / "tabular.yaml").read_text()
    (tmp_path / "data.yaml").write_text(builtin.replace("boltcutter.data.tabular.Tabular", "spoiled.Spoiled"))
    overrides = [
        f"data={tmp_path}/data.yaml",
        f"data.path={tmp_path}/table.csv",
        "data.target=price",
        "data.batch_size=8",
    ]
    overrides += ["task=regression", "model=mlp", "logger=null", f"folder={tmp_path}/run"]
    done = script("train", *overrides, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "column income (1 of 42 training samples: 3)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "optimizer.lr" not in done.stderr
