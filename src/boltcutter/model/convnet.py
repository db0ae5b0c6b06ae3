"""A small convolutional network for images."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes


class ConvNet(nn.Module):
    """Three convolutions, global average pooling, a dense layer of 256 units with dropout, and the output layer.

    The network of the guide, except that all convolutions use ``same`` padding, so that an 8 x 8 image has 2 x 2 rather
    than 1 x 1 positions after them, and no bias, which batch normalization would cancel.

    Args:
        input_shape: (channels, height, width) of one sample.
        num_classes: Number of classes; of target columns for regression.
        dropout: Dropout probability of the dense layer.

    Raises:
        ValueError: ``input_shape`` is not that of an image, a size is not positive, or ``dropout`` is outside [0, 1).

    Source: Chollet, "Multi-GPU distributed training with PyTorch", keras.io, 2023.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, dropout: float = 0.5) -> None:
        super().__init__()
        check_image("ConvNet", input_shape)
        check_sizes(input_shape, num_classes)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.5")
        self.rescaling = Rescaling()
        self.features = nn.Sequential(
            *_conv_block(input_shape[0], 12, kernel=3, stride=1),
            *_conv_block(12, 24, kernel=6, stride=2),
            *_conv_block(24, 32, kernel=6, stride=2),
        )
        self.dense = nn.Linear(32, 256)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, num_classes)."""
        maps = self.features(self.rescaling(x))  # (B, 32, ceil(H / 4), ceil(W / 4))
        hidden = self.dense(maps.mean(dim=(2, 3))).relu()  # (B, 256)
        outputs: Tensor = self.head(self.dropout(hidden))
        return outputs


class SameConv2d(nn.Conv2d):
    """A convolution with ``same`` padding for any stride: its output has ceil(size / stride) positions.

    PyTorch supports ``padding="same"`` only for a stride of 1. An odd amount of padding has its extra zero on the right
    and at the bottom, as in TensorFlow.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', ceil(H / stride), ceil(W / stride))."""
        padding: list[int] = []
        for dim in (1, 0):  # F.pad counts from the last dimension
            size, kernel, stride = x.size(dim + 2), self.kernel_size[dim], self.stride[dim]
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(x, padding))


def _conv_block(channels: int, filters: int, *, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    # PyTorch's momentum, as that of Keras, 0.99 (0.01 in PyTorch), averages over hundreds of steps: in the first epochs
    # on a small dataset the running statistics would still be close to their initial values.
    norm = nn.BatchNorm2d(filters, eps=1e-3)
    # The next layer can learn the scale, so only the shift is learned here.
    norm.weight.requires_grad_(False)
    return SameConv2d(channels, filters, kernel, stride=stride, bias=False), norm, nn.ReLU()
