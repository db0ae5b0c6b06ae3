"""Read image files as uint8 tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from boltcutter_data.files import ordinary

SUFFIXES = (".png", ".jpg", ".jpeg")


class ImageError(ValueError):
    """An image is damaged."""

    hide_traceback = True

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition("ImageError: ")[2].strip())  # without the traceback that a worker adds


def read_image(path: Path, shape: tuple[int, int, int], contents: BinaryIO | None = None) -> Tensor:
    """Read one image as uint8: EXIF orientation applied, resized to cover ``shape``, and centre-cropped.

    Args:
        path: A PNG or JPEG file.
        shape: Channels (1 or 3), height, width.
        contents: The file's contents, if they are part of another file; ``path`` then only names it in errors.

    Raises:
        ValueError: The image is damaged, or Pillow is not installed.
    """
    Image, ImageOps = _import_pillow()
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    with _open(path, contents) as file:
        file.draft(mode, (2 * width, 2 * height))  # decode a much larger JPEG at a fraction of its size
        upright = ImageOps.exif_transpose(file)
        if upright.mode.startswith("I"):  # 16-bit greyscale, which Pillow would clip
            upright = Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
        image = upright.convert(mode)
    scale = max(width / image.width, height / image.height)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    fitted = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (fitted.width - width) // 2, (fitted.height - height) // 2
    pixels = np.asarray(fitted.crop((left, top, left + width, top + height)), np.uint8).reshape(height, width, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())  # (C, H, W)


def read_image_shape(path: Path, contents: BinaryIO | None = None) -> tuple[int, int, int]:
    """Return channels (1 or 3), height and width of an image without decoding it."""
    with _open(path, contents) as image:
        return 1 if image.mode[0] in "1LI" else 3, image.height, image.width


@contextmanager
def _open(path: Path, contents: BinaryIO | None) -> Iterator[Any]:
    Image, _ = _import_pillow()
    try:
        with Image.open(contents or ordinary(path)) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise ImageError(f"{path}: not a valid PNG or JPEG image ({reason}); remove or replace it") from None


def find_images(folder: Path) -> list[Path]:
    """Return the PNG and JPEG files directly in ``folder``, sorted, without hidden ones."""
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))


def read_images(paths: Sequence[Path], shape: tuple[int, int, int]) -> tuple[Tensor, list[str]]:
    """Read image files, and all images in folders and their subfolders.

    Returns:
        Images of shape (N, C, H, W), and their paths.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"input={path}: no such file or folder; give an image or a folder of images")
        folders = sorted(f for f in (path, *path.rglob("*")) if f.is_dir())
        files += [file for folder in folders for file in find_images(folder)] if folders else [path]
    if not files:
        raise ValueError(
            f"input={','.join(map(str, paths))}: no PNG or JPEG image there; give images or a folder of images"
        )
    return torch.stack([read_image(file, shape) for file in files]), [str(file) for file in files]


def check_image_shape(shape: tuple[int, ...]) -> None:
    """Check the shape of an image, and that images can be read."""
    _import_pillow()
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise ValueError(f"data.shape={list(shape)} must be channels (1 or 3), height and width; try [3, 64, 64]")


def _import_pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise ValueError(
            "data: Pillow, which reads images, is not installed; pip install 'boltcutter[images]'"
        ) from None
    return Image, ImageOps
