"""Runs that train nothing, and unusual ones that do train."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.diagnosis import Invariants


class Module(L.LightningModule):
    """A module that learns; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.layer(batch[0]).square().mean()
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class OtherParameters(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.unused.parameters(), lr=0.1)


class Detached(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]).detach() * self.unused(batch[0])).mean()


class ReturnsNone(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)


class NoOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return None


class ZeroRate(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ZeroSchedule(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.0)]


class ConstantLoss(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss([torch.zeros(1, 4)]) * 0 + 2.5


class ForgetsStep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))


class SkipsSome(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx < 2 else self.loss(batch)


class WarmupFromZero(Module):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, lambda step: min(step, 2) / 2 if step < 10 else 0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class EpochWarmup(WarmupFromZero):
    interval = "epoch"


class ZeroInitialized(Module):
    """The same loss until the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layer.weight)
        nn.init.ones_(self.layer.bias)


class SkipsAll(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class Resumed(Module):
    """A training that has ended but for its validation."""

    def on_train_start(self) -> None:
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = 10
        self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 10

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class Gan(Module):
    """Two optimizers, of which one gets its first gradient late, and a step that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.unused, self.layer)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, union-attr]
        first.zero_grad()
        if batch_idx > 3:
            self.manual_backward(self.unused(batch[0]).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        second.step()


class RawOptimizers(Gan):
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


@pytest.fixture
def fit(tmp_path: Path) -> Any:
    (tmp_path / "record.json").write_text("{}")

    def call(module: L.LightningModule, **options: Any) -> dict[str, Any]:
        check = Invariants(folder=tmp_path)
        trainer = L.Trainer(
            **{"max_epochs": 3, "callbacks": [check], **options},
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        torch.manual_seed(0)
        trainer.fit(module, DataLoader(TensorDataset(torch.rand(40, 4)), 4))
        return json.loads((tmp_path / "record.json").read_text())  # type: ignore[no-any-return]

    return call


pytestmark = pytest.mark.filterwarnings(
    "ignore:`LightningModule.configure_optimizers` returned `None`",
    "ignore:`training_step` returned `None`",
    "ignore:The 'train_dataloader' does not have many workers",
)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OtherParameters, "no parameter of SGD gets a gradient: the loss of OtherParameters."),
        (Detached, "no parameter of SGD gets a gradient: the loss of Detached."),
        (ReturnsNone, "training_step returned None for all 4 batches looked at"),
        (NoOptimizer, "configure_optimizers returned None"),
        (ZeroRate, "all learning rates were 0 in 8 steps"),
        (ZeroSchedule, "all learning rates were 0 in 30 steps"),
        (ConstantLoss, "all gradients were exactly 0"),
        (ForgetsStep, "SGD has made no step"),
        (SkipsAll, "SGD has made no step; let on_train_batch_start skip none"),
    ],
)
def test_a_run_that_trains_nothing_warns(
    kind: type[Module], text: str, fit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(kind())["warning"].startswith(f"nothing is trained: {text}")
    lines = [line for line in capsys.readouterr().err.splitlines() if "nothing-trained (certain): " in line]
    assert len(lines) == 1
    assert text in lines[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Module, {}),
        (Module, {"limit_train_batches": 1}),
        (Module, {"overfit_batches": 1}),
        (Module, {"accumulate_grad_batches": 10}),
        (Module, {"max_steps": 2, "max_epochs": -1}),
        (SkipsSome, {}),
        (WarmupFromZero, {}),
        (WarmupFromZero, {"overfit_batches": 1, "max_epochs": 12}),
        (EpochWarmup, {}),
        (ZeroInitialized, {"accumulate_grad_batches": 5}),
        (Gan, {}),
        (RawOptimizers, {}),
        (Resumed, {}),
    ],
)
def test_unusual_runs_do_not_warn(kind: type[Module], options: dict[str, Any], fit: Any) -> None:
    assert "warning" not in fit(kind(), **options)


def test_the_record_says_it(script: Script, tmp_path: Path) -> None:
    overrides = [*QUICK, "test=false", "model=linear", "trainer.max_epochs=1", "optimizer.lr=0"]
    done = script("train", *overrides, f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: nothing-trained (certain): all learning rates were 0")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["attempts"][0]["reason"].startswith("completed, but nothing is trained: all learning rates were 0")
    done = script("train", f"resume={tmp_path}/run", "trainer.max_epochs=2", "optimizer.lr=0.1")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["attempts"][1]["reason"] == "completed"
