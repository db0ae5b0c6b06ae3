"""Random changes of pictures that depend on seed, epoch and sample alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.sampler import Batch, uniform

ONE = 256  # of a factor or a pixel's width, in whole numbers
CACHED = 1 << 19  # bytes of pictures to change at a time, few enough to stay in a processor's cache


@dataclass(frozen=True)
class Augment:
    """Change a batch of pictures at random, all at once.

    Everything is reckoned in whole numbers: a float's last bit can depend on where in a batch a picture stands, and
    a picture must come out the same whatever batch, worker or device count it meets.

    Args:
        flip: Chance of a mirror image, left for right.
        shift: Pixels, at most, in each direction; what is uncovered is 0.
        rotate: Degrees, at most, either way; what is uncovered is 0.
        brightness: The most that the factor of all pixels is away from 1.
        contrast: The most that the factor of differences from the mean is away from 1.
        erase: Pixels on each side of a square that is set to 0; cut off where it reaches over the edge.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017 (``erase``).
    """

    flip: float = 0.0
    shift: int = 0
    rotate: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    erase: int = 0

    def __post_init__(self) -> None:
        for name in ("flip", "brightness", "contrast"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.augment.{name}={getattr(self, name)} is not in [0, 1]; try 0.5")
        for name in ("shift", "erase", "rotate"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.augment.{name}={getattr(self, name)} is below 0; give 0 to leave it out")

    def __call__(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Changed bytes (N, C, H, W) of ``inputs`` of that shape."""
        # The same numbers go to the same change whichever others are switched on.
        draws = uniform(batch, 8).astype(np.float64).T  # (8, N)
        few = max(1, CACHED // inputs[0].numel())
        parts = [slice(start, start + few) for start in range(0, len(inputs), few)]
        return torch.cat([self._change(inputs[part], draws[:, part]) for part in parts])

    def _change(self, inputs: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        flipped = draws[0] < self.flip
        right, down = (_whole(draw, self.shift) for draw in draws[1:3])
        if self.rotate:
            angles = (2 * draws[3] - 1) * math.radians(self.rotate)
            inputs = _turn(inputs, flipped, right, down, angles)
        elif self.flip or self.shift:
            inputs = _move(inputs, flipped, right, down)
        if self.brightness:
            inputs = _scale(inputs, torch.zeros(len(inputs), 1, 1, 1, dtype=torch.int32), draws[4], self.brightness)
        if self.contrast:
            mean = inputs.sum(dim=(1, 2, 3), keepdim=True) // inputs[0].numel()  # of whole numbers, so exact
            inputs = _scale(inputs, mean.int(), draws[5], self.contrast)
        return _erase(inputs, draws[6], draws[7], self.erase) if self.erase else inputs


def _whole(draw: npt.NDArray[np.float64], most: int) -> Tensor:
    """Whole numbers from -most to most, shape (N, 1)."""
    return torch.from_numpy(np.floor(draw * (2 * most + 1)).astype(np.int64) - most)[:, None]


def _column(values: npt.NDArray[np.float64] | list[float]) -> Tensor:
    """Whole numbers that stand for ``values`` in units of 1 / ONE, shape (N, 1, 1)."""
    return torch.from_numpy(np.rint(np.asarray(values) * ONE).astype(np.int64))[:, None, None]


def _move(inputs: Tensor, flipped: npt.NDArray[np.bool_], right: Tensor, down: Tensor) -> Tensor:
    """Mirror, then shift; by rows and columns, which costs least."""
    n, channels, height, width = inputs.shape
    x, y = torch.arange(width) - right, torch.arange(height) - down  # (N, W), (N, H): where each pixel comes from
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    x = torch.where(torch.from_numpy(flipped)[:, None], width - 1 - x, x).clamp(0, width - 1)
    y = y.clamp(0, height - 1)
    moved = inputs.gather(3, x[:, None, None, :].expand(n, channels, height, width))
    return moved.gather(2, y[:, None, :, None].expand(n, channels, height, width)) * inside


def _turn(
    inputs: Tensor, flipped: npt.NDArray[np.bool_], right: Tensor, down: Tensor, angles: npt.NDArray[np.float64]
) -> Tensor:
    """Mirror, turn about the centre, then shift; each pixel between the four that it comes from."""
    n, channels, height, width = inputs.shape
    cos = _column([math.cos(a) * ONE for a in angles])  # in units of 1 / ONE²
    sin = _column([math.sin(a) * ONE for a in angles])
    x = (2 * (torch.arange(width) - right) - (width - 1))[:, None, :]  # (N, 1, W), half pixels from the centre
    y = (2 * (torch.arange(height) - down) - (height - 1))[:, :, None]  # (N, H, 1)
    sign = torch.from_numpy(np.where(flipped, -1, 1))[:, None, None]
    # In pixels times ONE from the upper left corner, shape (N, H, W); ``2 * ONE`` takes halves and one ONE away.
    from_x = sign * (cos * x + sin * y + ONE).div(2 * ONE, rounding_mode="floor") + (width - 1) * ONE // 2
    from_y = (cos * y - sin * x + ONE).div(2 * ONE, rounding_mode="floor") + (height - 1) * ONE // 2
    left, top = from_x.div(ONE, rounding_mode="floor"), from_y.div(ONE, rounding_mode="floor")
    across, along = from_x - left * ONE, from_y - top * ONE
    flat, total = inputs.flatten(2), torch.zeros(n, channels, height * width, dtype=torch.int32)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        at_x, at_y = left + dx, top + dy
        inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
        weight = (across if dx else ONE - across) * (along if dy else ONE - along) * inside  # (N, H, W)
        index = (at_y.clamp(0, height - 1) * width + at_x.clamp(0, width - 1)).flatten(1)[:, None]
        total += flat.gather(2, index.expand(n, channels, -1)) * weight.int().flatten(1)[:, None]
    return ((total + ONE * ONE // 2) >> 16).to(torch.uint8).view(inputs.shape)


def _scale(inputs: Tensor, centre: Tensor, draw: npt.NDArray[np.float64], most: float) -> Tensor:
    """Stretch differences from ``centre`` (N, 1, 1, 1) by a factor of 1 ± most."""
    factor = _column(1 + (2 * draw - 1) * most).int()[..., None]
    stretched = ((inputs.int() - centre) * factor + ONE // 2) >> 8
    return (stretched + centre).clamp(0, 255).to(torch.uint8)


def _erase(inputs: Tensor, across: npt.NDArray[np.float64], along: npt.NDArray[np.float64], side: int) -> Tensor:
    """Set a square with its centre anywhere in the picture to 0."""
    height, width = inputs.shape[2:]
    x = torch.arange(width) - torch.from_numpy(np.floor(across * width).astype(np.int64))[:, None] + side // 2
    y = torch.arange(height) - torch.from_numpy(np.floor(along * height).astype(np.int64))[:, None] + side // 2
    kept = ((x < 0) | (x >= side))[:, None, None, :] | ((y < 0) | (y >= side))[:, None, :, None]
    return inputs * kept
