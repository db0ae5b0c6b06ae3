"""Regression: one or more target values per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.task.base import Task

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


class Regression(Task):
    """Regression of T target columns, standardized for training; predictions are in the original units.

    Mean and standard deviation of the targets come from the data module's ``statistics`` if it has them
    (``target_mean`` and ``target_std``, T values each), and are saved in checkpoints.

    Args:
        model: Returns standardized predictions (N, T).
        loss: Squared, absolute or Huber loss of standardized targets, averaged over T.
        num_outputs: T.
        task: Arguments of ``Task``.

    Raises:
        ValueError: The number of target columns of the data differs from ``num_outputs``.

    Source: Huber, Robust Estimation of a Location Parameter, 1964.
    """

    kind: ClassVar[Literal["classification", "regression", "language_modeling"]] = "regression"
    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, *, num_outputs: int = 1, loss: Literal["mse", "l1", "huber"] = "mse", **task: Any
    ) -> None:
        super().__init__(model, **task)
        self.loss: Callable[..., Tensor] = LOSSES[loss]
        self.register_buffer("mean", torch.zeros(num_outputs))
        self.register_buffer("std", torch.ones(num_outputs))

    def setup(self, stage: str) -> None:
        """Set mean and standard deviation of the targets from the training data."""
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        statistics = getattr(data, "statistics", {})
        if "target_mean" in statistics:
            mean, std = torch.tensor(statistics["target_mean"]), torch.tensor(statistics["target_std"])
            if mean.shape != self.mean.shape:
                raise ValueError(
                    f"task.num_outputs={len(self.mean)} does not match the {len(mean)} target columns of the data; "
                    f"set task.num_outputs={len(mean)}"
                )
            self.mean.copy_(mean)
            self.std.copy_(torch.where(std > 0, std, 1))  # constant targets are not scaled

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions in the original units, shape (N, T)."""
        outputs = super().forward(inputs)
        # In bfloat16 or float16, adding a large mean would round small differences away.
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * self.std + self.mean

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample for standardized targets, shape (N,)."""
        error = self.loss((outputs - self.mean) / self.std, (targets - self.mean) / self.std, reduction="none")
        per_sample: Tensor = error.mean(dim=-1)
        return per_sample

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predicted values, shape (N, T)."""
        return outputs
