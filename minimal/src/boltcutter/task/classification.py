"""One class for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

Pair = tuple[Tensor, Tensor]


class Classification(L.LightningModule):
    """A model with what it takes to train it: cross-entropy, accuracy, optimizer and schedule.

    What is measured on a split is a metric of torchmetrics, which adds up sums and counts over ranks: a mean of the
    ranks' means would be wrong, as one of them may have a sample more.

    Args:
        model: Maps inputs (N, …) to logits (N, classes).
        optimizer: Called with the parameters.
        classes: Number of them.
        warmup: Share of the steps in which the learning rate rises, before it falls along half a cosine.
    """

    logged = ("train/loss", "val/loss", "val/accuracy")  # what a callback may look at

    def __init__(
        self, model: nn.Module, *, optimizer: Callable[..., Optimizer], classes: int, warmup: float = 0.05
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise ValueError(f"task.warmup={warmup} is not in [0, 1); try 0.05")
        self.model, self.optimizer, self.warmup = model, optimizer, warmup
        self.metrics = nn.ModuleDict()
        for split in ("val", "test"):
            self.metrics[f"{split}/loss"] = MeanMetric()
            self.metrics[f"{split}/accuracy"] = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        """Mean loss of the batch."""
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs), targets)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Pair, batch_idx: int, split: str = "val") -> None:
        """Measure."""
        inputs, targets = batch
        logits = self.model(inputs)
        loss, accuracy = f"{split}/loss", f"{split}/accuracy"
        measured: dict[str, Any] = {name: self.metrics[name] for name in (loss, accuracy)}
        measured[loss].update(F.cross_entropy(logits, targets, reduction="none"))
        measured[accuracy].update(logits, targets)
        self.log_dict(measured)

    def test_step(self, batch: Pair, batch_idx: int) -> None:
        """Measure."""
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, with its schedule over the whole training."""
        optimizer, steps = self.optimizer(self.model.parameters()), self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            rise, done = (step + 1) / max(1.0, self.warmup * steps), min(1.0, step / steps)
            return min(rise, 0.5 * (1 + math.cos(math.pi * done)))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
