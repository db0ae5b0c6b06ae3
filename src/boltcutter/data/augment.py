"""Random image transforms that depend only on seed, epoch and the position of a sample in the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        brightness: The brightness factor is drawn from [1 - brightness, 1 + brightness].
        contrast: The contrast factor, applied to differences from the mean, is drawn from [1 - contrast, 1 + contrast].
        on_device: Whether batches are transformed on the device of the training, where they arrive as bytes, instead of
            where they are read; the numbers are drawn on the host in both cases, and the results are equal.
    """

    flip: float = 0.0
    shift: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    on_device: bool = False
    is_pure: ClassVar[bool] = True  # draws from no global random generator

    def __post_init__(self) -> None:
        for name in ("flip", "brightness", "contrast"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.augment.{name}={getattr(self, name)} is not in [0, 1]; try 0.5")
        if self.shift < 0:
            raise ValueError(f"data.augment.shift={self.shift} is negative; try 0 to disable it")

    def __call__(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Transform uint8 images (N, C, H, W) where they are read, unless they are transformed on the device."""
        return inputs if self.on_device else self.transform(inputs, batch)

    def transform(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Transform uint8 images (N, C, H, W), on any device."""
        # Each transform always uses the same of the eight random numbers, whichever others are enabled.
        draws = uniform(batch, 8).astype(np.float64).T  # (8, N)
        size = max(1, CHUNK_BYTES // inputs[0].numel()) if inputs.device.type == "cpu" else len(inputs)
        chunks = [slice(start, start + size) for start in range(0, len(inputs), size)]
        return torch.cat([self._transform(inputs[chunk], draws[:, chunk]) for chunk in chunks])

    def _transform(self, inputs: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        if self.flip or self.shift:
            right, down = (_offsets(draw, self.shift) for draw in draws[1:3])
            inputs = _flip_and_shift(inputs, draws[0] < self.flip, right, down)
        if self.brightness:
            inputs = _scale(inputs, torch.tensor(0), draws[4], self.brightness)
        if self.contrast:
            mean = inputs.sum(dim=(1, 2, 3), keepdim=True) // inputs[0].numel()  # of integers, so exact
            inputs = _scale(inputs, mean.int(), draws[5], self.contrast)
        return inputs


def _offsets(draw: npt.NDArray[np.float64], limit: int) -> Tensor:
    """Integers from -limit to limit, shape (N, 1)."""
    return torch.from_numpy(np.floor(draw * (2 * limit + 1)).astype(np.int64) - limit)[:, None]


def _flip_and_shift(inputs: Tensor, flipped: npt.NDArray[np.bool_], right: Tensor, down: Tensor) -> Tensor:
    """Flip, then translate; separately by rows and columns, which is fastest."""
    n, channels, height, width = inputs.shape
    x, y = torch.arange(width) - right, torch.arange(height) - down  # source coordinates (N, W), (N, H)
    x = torch.where(torch.from_numpy(flipped)[:, None], width - 1 - x, x)
    x, y = x.to(inputs.device, non_blocking=True), y.to(inputs.device, non_blocking=True)
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    moved = inputs.gather(3, x[:, None, None, :].expand(n, channels, height, width))
    return moved.gather(2, y[:, None, :, None].expand(n, channels, height, width)) * inside


def _scale(inputs: Tensor, centre: Tensor, draw: npt.NDArray[np.float64], limit: float) -> Tensor:
    """Multiply differences from ``centre``, a number or (N, 1, 1, 1), by a factor in [1 - limit, 1 + limit]."""
    fixed_point = np.rint((1 + (2 * draw - 1) * limit) * UNIT).astype(np.int32)  # in units of 1 / UNIT
    factor = torch.from_numpy(fixed_point)[:, None, None, None].to(inputs.device, non_blocking=True)
    scaled = ((inputs.int() - centre) * factor + UNIT // 2) >> 8
    return (scaled + centre).clamp(0, 255).to(torch.uint8)


def _splitmix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(batch: Batch, count: int) -> npt.NDArray[np.float32]:
    """Draw ``count`` random numbers for each sample, which depend only on seed, epoch and its position in the order.

    Returns:
        Shape (N, count), in [0, 1).
    """
    return uniform_at(batch.stream(), batch.positions, count)


def uniform_at(key: int, positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float32]:
    """Draw ``count`` random numbers for each of some positions in a stream, whatever the others are.

    Returns:
        Shape (N, count), in [0, 1).

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64).
    """
    counter = positions.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count).astype(np.uint64)
    with np.errstate(over="ignore"):
        z = _splitmix64(np.uint64(key) + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    numbers: npt.NDArray[np.float32] = ((z >> np.uint64(40)) * np.float64(2**-24)).astype(np.float32)
    return numbers
