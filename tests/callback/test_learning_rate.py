from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, Optimizer

from boltcutter.callback.learning_rate import LearningRates
from boltcutter.diagnosis.ledger import StepLedger
from boltcutter.run.ledger import ledger_path, read_ledger


class Rate(Optimizer):
    """An optimizer whose setting has another name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.1})

    def step(self, closure: Any = None) -> Any:
        return closure()


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize(("optimizer", "logged"), [(Rate, False), (SGD, True), (None, False)])
def test_an_optimizer_needs_no_learning_rate(tmp_path: Path, optimizer: Any, logged: bool) -> None:
    class Module(BoringModel):
        def configure_optimizers(self) -> Any:
            return optimizer and optimizer(self.parameters())

    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(tmp_path),
        callbacks=[LearningRates(), StepLedger(tmp_path)],
    )
    trainer.fit(Module())
    assert any(name.startswith("lr-") for name in trainer.callback_metrics) == logged
    ledger = read_ledger(ledger_path(tmp_path))
    assert ledger is not None
    assert [not bool(torch.tensor(rate).isnan()) for rate in ledger.rows["lr"].tolist()] == [logged] * len(ledger.rows)
