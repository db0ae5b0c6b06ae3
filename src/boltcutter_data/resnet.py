"""ResNet-18, ResNet-34 and ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes

# Whether blocks are bottlenecks, and the number of blocks in each of the four stages, by the number of layers.
DEPTHS = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3))}
EXPANSION = 4  # channels of the output of a bottleneck by those inside


class Normalization(Rescaling):
    """Convert uint8 pixels to floats in [0, 1], then normalize by mean and standard deviation if given.

    Args:
        mean: Mean of each channel, in units of [0, 1]; also subtracted from float inputs.
        std: Standard deviation of each channel.

    Raises:
        ValueError: Only one of ``mean`` and ``std`` is given, they differ in length, or a ``std`` is not positive.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError(f"model.mean={mean} and model.std={std} go together; give both or neither")
        if mean is not None and std is not None:
            if len(mean) != len(std):
                raise ValueError(
                    f"model.mean={list(mean)} does not match model.std={list(std)}; give one value per channel"
                )
            if min(std, default=0.0) <= 0:
                raise ValueError(f"model.std={list(std)} must be positive; try 1.0 for a constant channel")
        self.register_buffer("mean", None if mean is None else _per_channel(mean), persistent=False)
        self.register_buffer("std", None if std is None else _per_channel(std), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rescale and normalize a batch of shape (B, C, H, W)."""
        x = super().forward(x)
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.get_default_dtype()).view(-1, 1, 1)  # (C, 1, 1)


class ResNet(nn.Module):
    """A residual network with the parameter names of torchvision, so that pretrained torchvision weights load.

    Args:
        input_shape: (channels, height, width) of one sample.
        num_classes: Number of classes; of target columns for regression.
        depth: Number of layers with weights.
        stem: ``small`` keeps the resolution, for images of about 32 pixels; ``large``, the paper's, reduces it by 4.
        zero_init_residual: Initialize each residual branch to zero, so that blocks start as identities.
        mean: Mean of each channel, in units of [0, 1], to normalize inputs as in pretraining.
        std: Standard deviation of each channel.

    Raises:
        ValueError: ``input_shape`` is not that of an image, a size is not positive, ``depth`` or ``stem`` is unknown,
            or ``mean`` and ``std`` do not match the channels.

    Source: He et al., 2015, arXiv:1512.03385, with the stride in the 3 x 3 convolution of a bottleneck as in
    torchvision; Goyal et al., 2017, arXiv:1706.02677 (``zero_init_residual``).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: Literal[18, 34, 50] = 18,
        stem: Literal["small", "large"] = "small",
        zero_init_residual: bool = True,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_image("ResNet", input_shape)
        check_sizes(input_shape, num_classes)
        if depth not in DEPTHS:
            raise ValueError(f"model.depth={depth} is unknown; try one of {', '.join(map(str, DEPTHS))}")
        if stem not in ("small", "large"):
            raise ValueError(f"model.stem={stem} is unknown; try small or large")
        if mean is not None and len(mean) != input_shape[0]:
            raise ValueError(
                f"model.mean={list(mean)} does not match {input_shape[0]} channels; give one value per channel"
            )
        is_bottleneck, counts = DEPTHS[depth]
        self.rescaling = Normalization(mean, std)
        large = stem == "large"
        self.conv1 = _conv(input_shape[0], 64, 7, 2) if large else _conv(input_shape[0], 64, 3)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        expansion = EXPANSION if is_bottleneck else 1
        self.layer1 = _stage(counts[0], 64, 64, stride=1, is_bottleneck=is_bottleneck)
        self.layer2 = _stage(counts[1], 64 * expansion, 128, stride=2, is_bottleneck=is_bottleneck)
        self.layer3 = _stage(counts[2], 128 * expansion, 256, stride=2, is_bottleneck=is_bottleneck)
        self.layer4 = _stage(counts[3], 256 * expansion, 512, stride=2, is_bottleneck=is_bottleneck)
        self.fc = nn.Linear(512 * expansion, num_classes)
        self._init_weights(zero_init_residual)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.rescaling(x)))))  # (B, 64, H, W), or H / 4 and W / 4
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, F, H / 8, W / 8), or H / 32 and W / 32
        outputs: Tensor = self.fc(x.mean(dim=(2, 3)))
        return outputs

    def _init_weights(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Block):
                nn.init.zeros_((module.bn3 if module.is_bottleneck else module.bn2).weight)


class Block(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of one between two 1 x 1 convolutions, with a residual connection."""

    def __init__(self, channels: int, width: int, stride: int, is_bottleneck: bool) -> None:
        super().__init__()
        self.is_bottleneck, outputs = is_bottleneck, width * (EXPANSION if is_bottleneck else 1)
        self.conv1 = _conv(channels, width, 1) if is_bottleneck else _conv(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride if is_bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(width)
        if is_bottleneck:
            self.conv3 = _conv(width, outputs, 1)
            self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        is_same = stride == 1 and channels == outputs
        shortcut = None if is_same else nn.Sequential(_conv(channels, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, outputs, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.is_bottleneck:
            x = self.bn3(self.conv3(self.relu(x)))
        outputs: Tensor = self.relu(x + shortcut)
        return outputs


def _stage(count: int, channels: int, width: int, *, stride: int, is_bottleneck: bool) -> nn.Sequential:
    outputs = width * (EXPANSION if is_bottleneck else 1)
    first = Block(channels, width, stride, is_bottleneck)
    return nn.Sequential(first, *(Block(outputs, width, 1, is_bottleneck) for _ in range(count - 1)))


def _conv(channels: int, filters: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, kernel, stride, padding=kernel // 2, bias=False)
