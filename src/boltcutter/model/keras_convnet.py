"""The small convolutional network, written in Keras."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from boltcutter.model.keras_model import KerasModel, keras
from boltcutter.model.rescaling import Rescaling, check_image, check_sizes


class KerasConvNet(KerasModel):
    """Three convolutions, global average pooling, a dense layer of 256 units with dropout, and the output layer.

    Inputs are channels-first bytes or floats; they are converted to channels-last floats in [0, 1] for the Keras model.

    Args:
        input_shape: (channels, height, width) of one sample.
        num_classes: Number of classes; of target columns for regression.
        dropout: Dropout probability of the dense layer.

    Raises:
        ValueError: ``input_shape`` is not that of an image, a size is not positive, or ``dropout`` is outside [0, 1).

    Source: Chollet, "Multi-GPU distributed training with PyTorch", keras.io, 2023.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, dropout: float = 0.5) -> None:
        check_image("KerasConvNet", input_shape)
        check_sizes(input_shape, num_classes)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.5")
        channels, height, width = input_shape
        pixels = keras.Input((height, width, channels))
        maps = pixels
        for filters, kernel, stride in ((12, 3, 1), (24, 6, 2), (32, 6, 2)):
            maps = keras.layers.Conv2D(filters, kernel, strides=stride, padding="same", use_bias=False)(maps)
            # Keras' default momentum of 0.99 averages over more steps than the first epochs of a small dataset have.
            maps = keras.layers.BatchNormalization(scale=False, momentum=0.9)(maps)
            maps = keras.layers.ReLU()(maps)
        hidden = keras.layers.Dense(256, activation="relu")(keras.layers.GlobalAveragePooling2D()(maps))
        hidden = keras.layers.Dropout(dropout)(hidden)
        super().__init__(keras.Model(pixels, keras.layers.Dense(num_classes)(hidden)), channels_first=True)
        self.rescaling = Rescaling()

    def forward(self, *inputs: Tensor) -> Any:
        """Map (B, C, H, W) to (B, num_classes)."""
        return super().forward(*map(self.rescaling, inputs))
