"""Input checks and the conversion of pixels to floats, shared by the models.

Shape: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Rescaling(nn.Module):
    """Convert uint8 pixels to floats in [0, 1].

    Being part of the model, it lets batches of bytes rather than floats be copied to the device, and exported models
    take raw pixels. Its buffers are not part of the state dict, so that weights from other sources load.
    """

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        # A buffer rather than a Python number, as it follows the module's device and dtype. Every float dtype
        # represents 255 exactly, unlike 1 / 255, so that white becomes exactly 1.
        self.register_buffer("scale", torch.tensor(255.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rescale a batch.

        Args:
            x: (B, ...) of uint8 or floats.

        Raises:
            ValueError: The input has another integer dtype than uint8, whose range of values is unknown.
        """
        if x.dtype == torch.uint8:
            return x.to(self.scale.dtype) / self.scale
        if not x.is_floating_point():
            raise ValueError(f"data.dtype={x.dtype} has no known range; use uint8 for pixels, floats otherwise")
        return x


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
