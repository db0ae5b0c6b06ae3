"""What a model does first: look at its sizes, and turn pixels into floats.

Legend for this room: B batch, C channels, H height, W width, F features, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Rescaling(nn.Module):
    """Turn uint8 pixels into floats in [0, 1]; let floats pass as they are.

    Done inside the model, so that bytes rather than floats travel to the device, and an exported model takes raw
    pixels. Nothing here enters the state dict, so weights saved elsewhere fit.

    Args:
        mean: One for each channel, in units of [0, 1]; subtracted from floats as well.
        std: One for each channel; divides what is left.

    Raises:
        ValueError: Only one of ``mean`` and ``std`` is given, they differ in length, or a ``std`` is not positive.
    """

    scale: Tensor
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError(f"model.mean={mean} and model.std={std} go together; give both or neither")
        # A buffer rather than a number: it follows the module's device and dtype, and tells that dtype. 255 and not its
        # inverse, because every float dtype holds it exactly, so that white is 1 and no more.
        self.register_buffer("scale", torch.tensor(255.0), persistent=False)
        self.register_buffer("mean", None if mean is None else _channels(mean), persistent=False)
        self.register_buffer("std", None if std is None else _channels(std), persistent=False)
        if mean is not None and std is not None:
            if len(mean) != len(std):
                raise ValueError(
                    f"model.mean={list(mean)} does not match model.std={list(std)}; give one for each channel"
                )
            if min(std, default=0.0) <= 0:
                raise ValueError(f"model.std={list(std)} must be positive; try 1.0 for a channel that never varies")

    def forward(self, x: Tensor) -> Tensor:
        """Rescale a batch.

        Args:
            x: (B, ...) of uint8 or floats; (B, C, H, W) where there is a mean.

        Raises:
            ValueError: Integers wider than a byte, whose range nobody can know.
        """
        if x.dtype == torch.uint8:
            x = x.to(self.scale.dtype) / self.scale
        elif not x.is_floating_point():
            raise ValueError(f"data.dtype={x.dtype} has no known range; make pixels uint8, other numbers floats")
        if self.mean is None or self.std is None:
            return x
        return (x - self.mean) / self.std


def check_sizes(inputs: Sequence[int], outputs: int) -> None:
    """Raise ValueError unless there is a size, and every size is positive."""
    if not inputs or min(inputs) < 1:
        raise ValueError(f"model.inputs={tuple(inputs)} must be positive sizes; try (1, 28, 28) for MNIST")
    if outputs < 1:
        raise ValueError(f"model.outputs={outputs} must be positive; give the number of classes or of targets")


def check_image(name: str, inputs: Sequence[int]) -> None:
    """Raise ValueError unless a sample is an image, which the model called ``name`` needs."""
    if len(inputs) != 3:
        raise ValueError(f"model.inputs={tuple(inputs)}: {name} needs (channels, height, width); try model=mlp")


def _channels(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.get_default_dtype()).view(-1, 1, 1)  # (C, 1, 1)
