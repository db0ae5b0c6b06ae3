"""A small convolutional network, for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions with ever more filters, global average pooling, dropout, and a linear layer.

    Group norm looks at one sample at a time. So, unlike with batch norm, neither the size of a batch nor the number of
    ranks has a say in what is computed, and there is nothing to keep beside the weights.

    Source: Wu and He, Group Normalization, 2018.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: int, *, dropout: float = 0.5) -> None:
        super().__init__()
        if len(inputs) != 3:
            raise ValueError(f"model.inputs={list(inputs)}: channels, height and width are needed; try [1, 28, 28]")
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.5")
        self.features = nn.Sequential(*_block(inputs[0], 32, 1), *_block(32, 64, 2), *_block(64, 128, 2))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(128, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width), bytes or floats in [0, 1], to logits (batch, outputs)."""
        maps = self.features(x / 255 if x.dtype == torch.uint8 else x)  # (batch, 128, height / 4, width / 4)
        logits: Tensor = self.head(maps.mean(dim=(2, 3)))
        return logits


def _block(channels: int, filters: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, filters, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.GroupNorm(8, filters), nn.ReLU()
