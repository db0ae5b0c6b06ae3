"""ResNet-18, ResNet-34 and ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes


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
        block, counts = DEPTHS[depth]
        self.rescaling = Rescaling(mean, std)
        large = stem == "large"
        self.conv1 = nn.Conv2d(input_shape[0], 64, 7, 2, 3, bias=False) if large else _conv3(input_shape[0], 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        self.layer1 = _stage(block, counts[0], 64, 64, stride=1)
        self.layer2 = _stage(block, counts[1], 64 * block.expansion, 128, stride=2)
        self.layer3 = _stage(block, counts[2], 128 * block.expansion, 256, stride=2)
        self.layer4 = _stage(block, counts[3], 256 * block.expansion, 512, stride=2)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
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
            elif zero_init_residual and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif zero_init_residual and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a residual connection."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, width, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        outputs: Tensor = self.relu(self.bn2(self.conv2(x)) + shortcut)
        return outputs


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1 convolutions, with a residual connection."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, 4 * width, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        outputs: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return outputs


# Type of block, and number of blocks in each of the four stages.
DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


def _stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, channels: int, width: int, *, stride: int
) -> nn.Sequential:
    first = block(channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(count - 1)))


def _conv3(channels: int, filters: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)


def _shortcut(channels: int, filters: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == filters:
        return None
    return nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))
