"""Images of the report as data URLs; PNG is encoded without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG: grey, RGB, RGBA
MAX_PIXELS = 128  # side of an image; larger ones are downscaled


def encode_image(pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Encode an image (C, H, W) of one or three channels as a data URL.

    Returns:
        ``url``, and whether the image is ``small``, that is, shown in its own resolution.
    """
    block = -(-max(pixels.shape[1:]) // MAX_PIXELS)
    data = base64.b64encode(encode_png(downscale(pixels, block))).decode()
    return {"url": f"data:image/png;base64,{data}", "small": block == 1}


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


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode an image (C, H, W) of one, three or four channels as PNG.

    Source: Portable Network Graphics Specification, third edition, W3C, 2025.
    """
    channels, height, width = pixels.shape
    values = np.moveaxis(pixels, 0, -1).reshape(height, -1)
    lines = np.insert(values, 0, 0, axis=1)  # each line begins with the number of its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
