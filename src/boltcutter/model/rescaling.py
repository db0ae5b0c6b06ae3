"""Input checks and the conversion of pixels to floats, shared by the models.

Shapes: B batch, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Rescaling(nn.Module):
    """Convert uint8 pixels to floats in [0, 1], then normalize by mean and standard deviation if given.

    Being part of the model, it lets batches of bytes rather than floats be copied to the device, and exported models
    take raw pixels. Its buffers are not part of the state dict, so that weights from other sources load.

    Args:
        mean: Mean of each channel, in units of [0, 1]; also subtracted from float inputs.
        std: Standard deviation of each channel.

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
        # A buffer rather than a Python number, as it follows the module's device and dtype. Every float dtype
        # represents 255 exactly, unlike 1 / 255, so that white becomes exactly 1.
        self.register_buffer("scale", torch.tensor(255.0), persistent=False)
        self.register_buffer("mean", None if mean is None else _per_channel(mean), persistent=False)
        self.register_buffer("std", None if std is None else _per_channel(std), persistent=False)
        if mean is not None and std is not None:
            if len(mean) != len(std):
                raise ValueError(
                    f"model.mean={list(mean)} does not match model.std={list(std)}; give one value per channel"
                )
            if min(std, default=0.0) <= 0:
                raise ValueError(f"model.std={list(std)} must be positive; try 1.0 for a constant channel")

    def forward(self, x: Tensor) -> Tensor:
        """Rescale a batch.

        Args:
            x: (B, ...) of uint8 or floats; (B, C, H, W) with ``mean`` and ``std``.

        Raises:
            ValueError: The input has another integer dtype than uint8, whose range of values is unknown.
        """
        if x.dtype == torch.uint8:
            x = x.to(self.scale.dtype) / self.scale
        elif not x.is_floating_point():
            raise ValueError(f"data.dtype={x.dtype} has no known range; use uint8 for pixels, floats otherwise")
        if self.mean is None or self.std is None:
            return x
        return (x - self.mean) / self.std


def check_sizes(input_shape: Sequence[int], num_classes: int) -> None:
    """Raise ``ValueError`` unless ``input_shape`` is not empty and all sizes are positive."""
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"model.input_shape={tuple(input_shape)} must be positive sizes; try (1, 28, 28) for MNIST")
    if num_classes < 1:
        raise ValueError(f"model.num_classes={num_classes} must be positive; give the number of classes or targets")


def check_image(name: str, input_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless ``input_shape`` is that of an image, which the model called ``name`` requires."""
    if len(input_shape) != 3:
        raise ValueError(
            f"model.input_shape={tuple(input_shape)}: {name} needs (channels, height, width); try model=mlp"
        )


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.get_default_dtype()).view(-1, 1, 1)  # (C, 1, 1)
