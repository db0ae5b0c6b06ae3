"""A linear baseline."""

from __future__ import annotations

import math

from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_sizes


class Linear(nn.Module):
    """A single linear layer: logistic regression for classification, linear regression for regression.

    Args:
        input_shape: Shape of one sample, without the batch dimension.
        num_classes: Number of classes; of target columns for regression.

    Raises:
        ValueError: A size is not positive.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        self.rescaling = Rescaling()
        self.head = nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *input_shape) to (B, num_classes)."""
        features = self.rescaling(x).flatten(1)  # (B, F)
        outputs: Tensor = self.head(features)
        return outputs
