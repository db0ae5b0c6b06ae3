"""The convolutional network of the multi-GPU guide, written in Keras."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from boltcutter.model.keras import KerasModel, keras
from boltcutter.model.rescaling import Rescaling, check_image, check_sizes


class KerasConvNet(KerasModel):
    """Three convolutions with batch norm, global average pooling, a dense layer of 256 with dropout, and the outputs.

    The Keras model takes floats in [0, 1] with channels last; bytes with channels first become that before it.

    Args:
        inputs: (channels, height, width) of one sample.
        outputs: Number of classes or of targets.
        dropout: Fraction of the dense layer that is dropped while training.

    Raises:
        ValueError: A sample is not an image, a size is not positive, or ``dropout`` is outside [0, 1).

    Source: Chollet, "Multi-GPU distributed training with PyTorch", keras.io, 2023.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: int, *, dropout: float = 0.5) -> None:
        check_image("KerasConvNet", inputs)
        check_sizes(inputs, outputs)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.5")
        channels, height, width = inputs
        pixels = keras.Input((height, width, channels))
        maps = pixels
        for filters, kernel, stride in ((12, 3, 1), (24, 6, 2), (32, 6, 2)):
            maps = keras.layers.Conv2D(filters, kernel, strides=stride, padding="same", use_bias=False)(maps)
            # Keras's momentum of 0.99 averages over hundreds of steps, more than the first epochs of small data have.
            maps = keras.layers.BatchNormalization(scale=False, momentum=0.9)(maps)
            maps = keras.layers.ReLU()(maps)
        hidden = keras.layers.Dense(256, activation="relu")(keras.layers.GlobalAveragePooling2D()(maps))
        hidden = keras.layers.Dropout(dropout)(hidden)
        super().__init__(keras.Model(pixels, keras.layers.Dense(outputs)(hidden)), channels_first=True)
        self.rescaling = Rescaling()

    def forward(self, *inputs: Tensor) -> Any:
        """Map (B, C, H, W) to (B, O)."""
        return super().forward(*map(self.rescaling, inputs))
