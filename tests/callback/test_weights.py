"""The weights that are validated, saved and tested."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.checkpoint import LastCheckpoint
from boltcutter.callback.ema import EMA
from boltcutter.callback.weights import SameWeights


class Module(L.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.tested: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) - 1).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested.append(self.net.weight.detach().clone())

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.01)


class Average(Callback):
    """An average of somebody else; the options say when it takes the place of the weights."""

    def __init__(self, *when: str) -> None:
        self.when, self.average = when, list[torch.Tensor]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        if not self.average:
            self.average = [p.detach().clone() for p in pl_module.parameters()]
        for average, parameter in zip(self.average, pl_module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)

    def replace(self, module: L.LightningModule, when: str) -> None:
        for average, parameter in zip(self.average, module.parameters(), strict=False) if when in self.when else ():
            current = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(current)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.replace(pl_module, "validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.replace(pl_module, "validation")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.replace(pl_module, "end")

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.replace(pl_module, "test")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "save" in self.when and self.average:
            names = [name for name, _ in pl_module.named_parameters()]
            checkpoint["state_dict"] |= {n: a.clone() for n, a in zip(names, self.average, strict=True)}


class Converts(Callback):
    """Weights in another precision from the end of a validation to the next epoch."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.double()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.float()

    on_test_start = on_train_epoch_start


class Swaps(Module):
    """Validates an average of its own, which it does not save."""

    def on_validation_epoch_start(self) -> None:
        self.backup = self.net.weight.detach().clone()
        self.net.weight.data.mul_(0.5)

    def on_validation_epoch_end(self) -> None:
        self.net.weight.data.copy_(self.backup)


class Resets(Module):
    """Has hooks, and a buffer that a validation changes, but leaves its weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def on_validation_epoch_start(self) -> None:
        self.seen.zero_()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("callback", "lines"),
    [
        (Swaps, 1),
        (Resets, 0),
        (lambda: EMAWeightAveraging(decay=0.9), 0),
        (WeightAveraging, 0),
        (lambda: EMA(0.9), 0),
        (lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), 1),  # only at the end
        (lambda: Average("validation"), 1),
        (lambda: Average("validation", "save"), 0),
        (lambda: Average("validation", "save", "end"), 0),
        (lambda: Average("end"), 1),
        (lambda: Average("test"), 1),
        (Average, 0),
        (Converts, 0),
        (lambda: ModelPruning("l1_unstructured", amount=0.5), 0),
    ],
)
def test_what_is_tested_is_what_was_saved(
    callback: Any, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    given = callback()
    module, last = (
        given if isinstance(given, Module) else Module(),
        LastCheckpoint(str(tmp_path), filename="last", every_n_epochs=1),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[*([] if given is module else [given]), SameWeights(), last],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = DataLoader(TensorDataset(torch.rand(8, 2)), 2)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, ckpt_path=last.best_model_path, verbose=False)
    found = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(found) == lines
    saved = torch.load(last.best_model_path, weights_only=False)["state_dict"]["net.weight"]
    if not any("tested" in line.partition(":")[2].partition(":")[0] and "evaluate" in line for line in found):
        assert torch.equal(module.tested[0], saved)
