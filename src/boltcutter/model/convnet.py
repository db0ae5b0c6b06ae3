"""A small convolutional network, for images that an MLP finds hard and a ResNet finds easy."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes


class ConvNet(nn.Module):
    """Three convolutions, global average pooling, a dense layer of 256 with dropout, and the output layer.

    As in the guide, but that every convolution pads as ``same``, which leaves an 8 x 8 image 2 x 2 rather than 1 x 1
    positions, and none has a bias, which batch norm would subtract again.

    Args:
        inputs: (channels, height, width) of one sample.
        outputs: Number of classes or of targets.
        dropout: Share of the dense layer dropped while training.

    Raises:
        ValueError: A sample is not an image, a size is not positive, or ``dropout`` is outside [0, 1).

    Source: Chollet, "Multi-GPU distributed training with PyTorch", keras.io, 2023.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: int, *, dropout: float = 0.5) -> None:
        super().__init__()
        check_image("ConvNet", inputs)
        check_sizes(inputs, outputs)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.5")
        self.rescaling = Rescaling()
        self.features = nn.Sequential(
            *_block(inputs[0], 12, kernel=3, stride=1),
            *_block(12, 24, kernel=6, stride=2),
            *_block(24, 32, kernel=6, stride=2),
        )
        self.dense = nn.Linear(32, 256)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(256, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, O)."""
        maps = self.features(self.rescaling(x))  # (B, 32, ceil(H / 4), ceil(W / 4))
        hidden = self.dense(maps.mean(dim=(2, 3))).relu()  # (B, 256)
        outputs: Tensor = self.head(self.dropout(hidden))
        return outputs


class SameConv2d(nn.Conv2d):
    """A convolution whose output has ceil(size / stride) positions, for any size.

    torch has ``padding="same"`` for a stride of one only. Where the padding is odd, the extra zero stands right and
    below, as TensorFlow puts it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', ceil(H / stride), ceil(W / stride))."""
        padding: list[int] = []
        for dim in (1, 0):  # F.pad counts from the last dimension
            size, kernel, stride = x.size(dim + 2), self.kernel_size[dim], self.stride[dim]
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(x, padding))


def _block(channels: int, filters: int, *, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    # Keras' momentum of 0.99 averages over hundreds of steps, which a small data set does not have in its first epochs:
    # evaluation would run on statistics that are still those of the start. torch's 0.1 (0.9 to Keras) is used.
    norm = nn.BatchNorm2d(filters, eps=1e-3)
    # The layer behind can scale as well, so only the shift is learned.
    norm.weight.requires_grad_(False)
    return SameConv2d(channels, filters, kernel, stride=stride, bias=False), norm, nn.ReLU()
