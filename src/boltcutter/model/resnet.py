"""ResNet-18, ResNet-34 and ResNet-50."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes

# Whether blocks are bottlenecks, and the number of blocks in each of the four stages, by the number of layers.
DEPTHS = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3))}
EXPANSION = 4  # channels of the output of a bottleneck by those inside


class ResNet(nn.Module):
    """A residual network with the parameter names of torchvision, so that pretrained torchvision weights load.

    Args:
        input_shape: (channels, height, width) of one sample.
        num_classes: Number of classes; of target columns for regression.
        depth: Number of layers with weights.
        stem: ``small`` keeps the resolution, for images of about 32 pixels; ``large``, the paper's, reduces it by 4.

    Raises:
        ValueError: ``input_shape`` is not that of an image, a size is not positive, or another argument is unknown.

    Source: He et al., 2015, arXiv:1512.03385, with the stride in the 3 x 3 convolution of a bottleneck as in
    torchvision; Goyal et al., 2017, arXiv:1706.02677 (residual branches begin at zero).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: Literal[18, 34, 50] = 18,
        stem: Literal["small", "large"] = "small",
    ) -> None:
        super().__init__()
        check_image("ResNet", input_shape)
        check_sizes(input_shape, num_classes)
        if depth not in DEPTHS:
            raise ValueError(f"model.depth={depth} is unknown; try one of {', '.join(map(str, DEPTHS))}")
        if stem not in ("small", "large"):
            raise ValueError(f"model.stem={stem} is unknown; try small or large")
        is_bottleneck, counts = DEPTHS[depth]
        self.rescaling = Rescaling()
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
        self._init_weights()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.rescaling(x)))))  # (B, 64, H, W), or H / 4 and W / 4
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, F, H / 8, W / 8), or H / 32 and W / 32
        outputs: Tensor = self.fc(x.mean(dim=(2, 3)))
        return outputs

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block):
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
