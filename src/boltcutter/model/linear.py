"""The baseline to beat: one linear layer."""

from __future__ import annotations

import math

from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_sizes


class Linear(nn.Module):
    """Logistic regression where the task is classification, linear regression where it is regression.

    Args:
        inputs: Shape of one sample, without the batch.
        outputs: Number of classes or of targets.

    Raises:
        ValueError: A size is not positive.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        check_sizes(inputs, outputs)
        self.rescaling = Rescaling()
        self.head = nn.Linear(math.prod(inputs), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *inputs) to (B, O)."""
        features = self.rescaling(x).flatten(1)  # (B, F)
        outputs: Tensor = self.head(features)
        return outputs
