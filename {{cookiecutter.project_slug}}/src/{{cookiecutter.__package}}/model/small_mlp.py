"""A small multilayer perceptron."""

import math

import torch
from torch import Tensor, nn


class SmallMLP(nn.Module):
    """One hidden layer with dropout. Any ``nn.Module`` can be used as a model.

    Args:
        input_shape: Shape of one sample, without the batch dimension.
        num_classes: Number of classes.
        hidden_size: Units of the hidden layer.
        dropout: Probability with which a hidden unit is zeroed during training.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, hidden_size: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"model.hidden_size={hidden_size} is not a positive number of units; try 64")
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), hidden_size),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, num_classes) for inputs of shape (batch, *input_shape)."""
        if x.dtype == torch.uint8:  # pixels
            x = x.to(next(self.parameters()).dtype) / 255
        return self.layers(x)
