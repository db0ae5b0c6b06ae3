"""Pictures of any library as pixels, and pixels as PNG, which is encoded without an imaging library."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.files import IMAGE_FORMATS

Pixels = npt.NDArray[np.uint8]  # (C, H, W)
COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG: grey, RGB, RGBA
MAX_PIXELS = 128  # side of an image in a table of the report; larger ones are downscaled
PADDING = 2  # pixels between the images of a grid


def to_pixels(image: Any) -> list[Pixels]:
    """Convert a picture, or a batch of pictures, to pixels.

    Floating-point values in [0, 1] are shown as they are; if there are others, as in pictures of 16 bits, the range of
    the picture is stretched to [0, 1]. NaN is black.

    Args:
        image: A tensor on any device or an array, of shape (H, W), (C, H, W), (H, W, C) or with a batch dimension in
            front; a PIL image; a figure or axes of matplotlib; a ``wandb.Image``; or the path of an image file.

    Returns:
        Each picture as (C, H, W), with one, three or four channels.

    Raises:
        ValueError: It is none of these.
    """
    values = _to_array(image)
    return [_orient(each, image) for each in (values if values.ndim == 4 else [values])]


def arrange(pictures: Sequence[Pixels]) -> Pixels:
    """Arrange pictures in a grid, from left to right and top to bottom; a single one stays as it is."""
    if len(pictures) == 1:
        return pictures[0]
    if len({len(picture) for picture in pictures}) > 1:
        pictures = [_to_rgba(picture) for picture in pictures]
    columns = math.ceil(math.sqrt(len(pictures)))
    height, width = (max(picture.shape[axis] for picture in pictures) + PADDING for axis in (1, 2))
    rows = -(-len(pictures) // columns)
    grid = np.zeros((len(pictures[0]), rows * height - PADDING, columns * width - PADDING), np.uint8)
    for number, picture in enumerate(pictures):
        top, left = number // columns * height, number % columns * width
        grid[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return grid


def _to_array(image: Any) -> npt.NDArray[Any]:
    if type(image).__module__.partition(".")[0] == "wandb":
        image = image.image  # as loaded by PIL
    if isinstance(image, str | Path):
        from PIL import Image  # only needed for files

        with Image.open(image, formats=list(IMAGE_FORMATS)) as file:
            return _to_array(file)
    if hasattr(image, "detach"):  # a tensor
        image = image.detach().cpu()
        return np.asarray(image.float() if image.is_floating_point() else image)
    if hasattr(image, "convert"):  # of PIL
        if image.mode.startswith(("I", "F")):  # which Pillow would clip to 8 bits
            return np.asarray(image, np.float32)
        transparent = "A" in image.mode or "transparency" in image.info
        return np.asarray(image.convert("RGBA" if transparent else "L" if image.mode in ("1", "L") else "RGB"))
    figure = image if hasattr(image, "savefig") else getattr(image, "figure", None)
    if figure is not None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        before = figure.canvas
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        figure.set_canvas(before)
        return np.array(canvas.buffer_rgba())
    return np.asarray(image)


def _orient(values: npt.NDArray[Any], image: Any) -> Pixels:
    """Move channels to the front; where both ends could be channels, tensors have them in front, and arrays behind."""
    if values.ndim == 2:
        values = values[None]
    first, last = (values.ndim == 3 and values.shape[axis] in COLOR_TYPES for axis in (0, -1))
    if not (first or last) or values.dtype.kind not in "biuf" or not values.size:
        raise ValueError(
            f"{type(image).__name__} of shape {values.shape} and type {values.dtype} is not a picture; "
            "expected (H, W), or (C, H, W) or (H, W, C) with 1, 3 or 4 channels"
        )
    if last and not (first and hasattr(image, "detach")):
        values = np.moveaxis(values, -1, 0)
    return _to_bytes(values)


def _to_bytes(values: npt.NDArray[Any]) -> Pixels:
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * 255
    if values.dtype.kind != "f" and values.dtype != np.uint16:
        return values.clip(0, 255).astype(np.uint8)
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = min(0.0, finite.min(initial=0.0)), max(1.0, finite.max(initial=0.0))
    if low < 0 or high > 1:
        low, high = finite.min(), finite.max()
    scaled = (values.astype(np.float64) - low) / ((high - low) or 1.0)
    pixels: Pixels = (np.nan_to_num(scaled, nan=0.0, posinf=1.0, neginf=0.0) * 255).round().astype(np.uint8)
    return pixels


def _to_rgba(picture: Pixels) -> Pixels:
    color = np.repeat(picture, 3, axis=0) if len(picture) == 1 else picture[:3]
    alpha = picture[3:] if len(picture) == 4 else np.full_like(color[:1], 255)
    return np.concatenate([color, alpha])


def encode_image(pixels: Pixels) -> dict[str, Any]:
    """Encode an image (C, H, W) of one or three channels as a data URL.

    Returns:
        ``url``, and whether the image is ``small``, that is, shown in its own resolution.
    """
    block = -(-max(pixels.shape[1:]) // MAX_PIXELS)
    data = base64.b64encode(encode_png(downscale(pixels, block))).decode()
    return {"url": f"data:image/png;base64,{data}", "small": block == 1}


def downscale(pixels: Pixels, block: int) -> Pixels:
    """Average blocks of ``block`` x ``block`` pixels of an image (C, H, W)."""
    if block == 1:
        return pixels
    means: npt.NDArray[np.floating] = pixels.astype(np.float32)
    for axis in (1, 2):
        starts = np.arange(0, pixels.shape[axis], block)
        sizes = np.diff(starts, append=pixels.shape[axis])  # the last block may be smaller
        means = np.add.reduceat(means, starts, axis) / (sizes[:, None] if axis == 1 else sizes)
    return means.round().astype(np.uint8)


def encode_png(pixels: Pixels) -> bytes:
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
