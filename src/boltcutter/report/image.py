"""Images of the report as data URLs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.run.image import encode_png

MAX_PIXELS = 128  # side of an image; larger ones are downscaled


def encode_image(pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Encode an image (C, H, W) of one or three channels as a data URL.

    Returns:
        ``url``, and whether the image is ``small``, that is, shown in its own resolution.
    """
    block = -(-max(pixels.shape[1:]) // MAX_PIXELS)
    data = base64.b64encode(encode_png(downscale(pixels, block))).decode()
    return {"url": f"data:image/png;base64,{data}", "small": block == 1}


def encode_file(path: Path) -> str:
    """Encode an SVG file as a data URL."""
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def downscale(pixels: npt.NDArray[np.uint8], block: int) -> npt.NDArray[np.uint8]:
    """Average blocks of ``block`` x ``block`` pixels of an image (C, H, W)."""
    if block == 1:
        return pixels
    means = pixels.astype(np.float32)
    for axis in (1, 2):
        starts = np.arange(0, pixels.shape[axis], block)
        sizes = np.diff(starts, append=pixels.shape[axis])  # the last block may be smaller
        means = np.add.reduceat(means, starts, axis) / (sizes[:, None] if axis == 1 else sizes)
    return means.round().astype(np.uint8)
