"""One or more numbers for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.task.base import Task

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


class Regression(Task):
    """T numbers, learnt on the scale of the training targets and given in their own units.

    The targets' mean and standard deviation are taken from the ``statistics`` of the data module where it has them
    (``target_mean`` and ``target_std``, T numbers each) and kept in checkpoints.

    Args:
        model: Gives (N, T), on the scale of mean 0 and deviation 1.
        loss: Squared error, absolute error, or Huber's between the two; of scaled targets, averaged over T.
        num_outputs: T.
        task: ``optimizer``, ``scheduler``, ``interval``, ``monitor``, ``metrics``, ``l1`` and ``l2``, as for ``Task``.

    Raises:
        ValueError: The data has another number of targets than ``num_outputs``.

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
        """Take the targets' scale from the training data."""
        super().setup(stage)
        statistics = getattr(getattr(self.trainer, "datamodule", None), "statistics", {})
        if "target_mean" in statistics:
            mean, std = torch.tensor(statistics["target_mean"]), torch.tensor(statistics["target_std"])
            if mean.shape != self.mean.shape:
                raise ValueError(
                    f"task.num_outputs={len(self.mean)} does not match the {len(mean)} target columns of the data; "
                    f"set task.num_outputs={len(mean)}"
                )
            self.mean.copy_(mean)
            self.std.copy_(torch.where(std > 0, std, 1))  # all targets alike: nothing to scale by

    def forward(self, inputs: Tensor) -> Tensor:
        """Numbers in the targets' own units, shape (N, T)."""
        outputs = self.outputs(inputs)
        # Sums in bfloat16 or float16 would lose what tells large targets apart.
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * self.std + self.mean

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of each sample on the targets' scale, shape (N,)."""
        error = self.loss((outputs - self.mean) / self.std, (targets - self.mean) / self.std, reduction="none")
        per_sample: Tensor = error.mean(dim=-1)
        return per_sample

    def predictions(self, outputs: Tensor) -> Tensor:
        """The numbers, shape (N, T)."""
        return outputs
