"""Random image transforms that depend only on seed, epoch and sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.sampler import Batch

UNIT = 256  # 1.0 in fixed-point arithmetic
CHUNK_BYTES = 1 << 19  # bytes of images to transform at a time, few enough for the CPU's cache


@dataclass(frozen=True)
class Augment:
    """Random transform of a batch of uint8 images.

    It uses fixed-point arithmetic, because the last bit of a float can depend on the position of an image in its
    batch, and the result must not depend on batch, workers or number of devices.

    Args:
        flip: Probability of a horizontal flip.
        shift: Maximum translation in each direction, in pixels; filled with 0.
        rotate: Maximum rotation in either direction, in degrees; filled with 0.
        brightness: The brightness factor is drawn from [1 - brightness, 1 + brightness].
        contrast: The contrast factor, applied to differences from the mean, is drawn from [1 - contrast, 1 + contrast].
        erase: Side of a square at a random position that is set to 0, in pixels; clipped at the edges.

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
                raise ValueError(f"data.augment.{name}={getattr(self, name)} is negative; try 0 to disable it")

    def __call__(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Transform uint8 images (N, C, H, W)."""
        # Each transform always uses the same random numbers, whichever others are enabled.
        draws = uniform(batch, 8).astype(np.float64).T  # (8, N)
        size = max(1, CHUNK_BYTES // inputs[0].numel())
        chunks = [slice(start, start + size) for start in range(0, len(inputs), size)]
        return torch.cat([self._transform(inputs[chunk], draws[:, chunk]) for chunk in chunks])

    def _transform(self, inputs: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        flipped = draws[0] < self.flip
        right, down = (_offsets(draw, self.shift) for draw in draws[1:3])
        if self.rotate:
            angles = (2 * draws[3] - 1) * math.radians(self.rotate)
            inputs = _rotate(inputs, flipped, right, down, angles)
        elif self.flip or self.shift:
            inputs = _flip_and_shift(inputs, flipped, right, down)
        if self.brightness:
            inputs = _scale(inputs, torch.zeros(len(inputs), 1, 1, 1, dtype=torch.int32), draws[4], self.brightness)
        if self.contrast:
            mean = inputs.sum(dim=(1, 2, 3), keepdim=True) // inputs[0].numel()  # of integers, so exact
            inputs = _scale(inputs, mean.int(), draws[5], self.contrast)
        return _erase(inputs, draws[6], draws[7], self.erase) if self.erase else inputs


def _offsets(draw: npt.NDArray[np.float64], limit: int) -> Tensor:
    """Integers from -limit to limit, shape (N, 1)."""
    return torch.from_numpy(np.floor(draw * (2 * limit + 1)).astype(np.int64) - limit)[:, None]


def _fixed_point(values: npt.NDArray[np.float64] | list[float]) -> Tensor:
    """Fixed-point values in units of 1 / UNIT, shape (N, 1, 1)."""
    return torch.from_numpy(np.rint(np.asarray(values) * UNIT).astype(np.int64))[:, None, None]


def _flip_and_shift(inputs: Tensor, flipped: npt.NDArray[np.bool_], right: Tensor, down: Tensor) -> Tensor:
    """Flip, then translate; separately by rows and columns, which is fastest."""
    n, channels, height, width = inputs.shape
    x, y = torch.arange(width) - right, torch.arange(height) - down  # source coordinates (N, W), (N, H)
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    x = torch.where(torch.from_numpy(flipped)[:, None], width - 1 - x, x).clamp(0, width - 1)
    y = y.clamp(0, height - 1)
    moved = inputs.gather(3, x[:, None, None, :].expand(n, channels, height, width))
    return moved.gather(2, y[:, None, :, None].expand(n, channels, height, width)) * inside


def _rotate(
    inputs: Tensor, flipped: npt.NDArray[np.bool_], right: Tensor, down: Tensor, angles: npt.NDArray[np.float64]
) -> Tensor:
    """Flip, rotate about the centre, then translate, with bilinear interpolation."""
    n, channels, height, width = inputs.shape
    cos = _fixed_point([math.cos(a) * UNIT for a in angles])  # in units of 1 / UNIT²
    sin = _fixed_point([math.sin(a) * UNIT for a in angles])
    x = (2 * (torch.arange(width) - right) - (width - 1))[:, None, :]  # (N, 1, W), half pixels from the centre
    y = (2 * (torch.arange(height) - down) - (height - 1))[:, :, None]  # (N, H, 1)
    sign = torch.from_numpy(np.where(flipped, -1, 1))[:, None, None]
    # Source coordinates in pixels times UNIT, shape (N, H, W); dividing by 2 * UNIT removes the halves and one UNIT.
    from_x = sign * (cos * x + sin * y + UNIT).div(2 * UNIT, rounding_mode="floor") + (width - 1) * UNIT // 2
    from_y = (cos * y - sin * x + UNIT).div(2 * UNIT, rounding_mode="floor") + (height - 1) * UNIT // 2
    left, top = from_x.div(UNIT, rounding_mode="floor"), from_y.div(UNIT, rounding_mode="floor")
    across, along = from_x - left * UNIT, from_y - top * UNIT
    flat, total = inputs.flatten(2), torch.zeros(n, channels, height * width, dtype=torch.int32)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        at_x, at_y = left + dx, top + dy
        inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
        weight = (across if dx else UNIT - across) * (along if dy else UNIT - along) * inside  # (N, H, W)
        index = (at_y.clamp(0, height - 1) * width + at_x.clamp(0, width - 1)).flatten(1)[:, None]
        total += flat.gather(2, index.expand(n, channels, -1)) * weight.int().flatten(1)[:, None]
    return ((total + UNIT * UNIT // 2) >> 16).to(torch.uint8).view(inputs.shape)


def _scale(inputs: Tensor, centre: Tensor, draw: npt.NDArray[np.float64], limit: float) -> Tensor:
    """Multiply differences from ``centre`` (N, 1, 1, 1) by a factor in [1 - limit, 1 + limit]."""
    factor = _fixed_point(1 + (2 * draw - 1) * limit).int()[..., None]
    scaled = ((inputs.int() - centre) * factor + UNIT // 2) >> 8
    return (scaled + centre).clamp(0, 255).to(torch.uint8)


def _erase(inputs: Tensor, across: npt.NDArray[np.float64], along: npt.NDArray[np.float64], side: int) -> Tensor:
    """Set a square with its centre anywhere in the image to 0."""
    height, width = inputs.shape[2:]
    x = torch.arange(width) - torch.from_numpy(np.floor(across * width).astype(np.int64))[:, None] + side // 2
    y = torch.arange(height) - torch.from_numpy(np.floor(along * height).astype(np.int64))[:, None] + side // 2
    outside = ((x < 0) | (x >= side))[:, None, None, :] | ((y < 0) | (y >= side))[:, None, :, None]
    return inputs * outside


def _splitmix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(batch: Batch, count: int) -> npt.NDArray[np.float32]:
    """Draw ``count`` random numbers for each sample, which depend only on seed, epoch and sample, not on the batch.

    Returns:
        Shape (N, count), in [0, 1).

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64).
    """
    key = np.random.SeedSequence([batch.seed, batch.epoch]).generate_state(1, np.uint64)
    counter = batch.indices.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = _splitmix64(key + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    numbers: npt.NDArray[np.float32] = ((z >> np.uint64(40)) * np.float64(2**-24)).astype(np.float32)
    return numbers
