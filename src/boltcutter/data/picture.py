"""Pictures from files, as tensors of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg")


def read_picture(path: Path, shape: tuple[int, int, int], contents: BinaryIO | None = None) -> Tensor:
    """One picture as bytes: upright, scaled until it covers ``shape``, and cut at the centre.

    Args:
        path: A PNG or JPEG file.
        shape: Channels (1 or 3), height, width.
        contents: Of the file, where it is not one of its own.

    Raises:
        ValueError: The file is not a whole picture.
    """
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    try:
        with Image.open(contents or path) as file:
            file.draft(mode, (2 * width, 2 * height))  # a JPEG much larger than that is decoded at a fraction
            upright = ImageOps.exif_transpose(file)
            picture = (_eight_bits(upright) if upright.mode.startswith("I") else upright).convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a whole PNG or JPEG picture ({reason}); remove or replace it") from None
    scale = max(width / picture.width, height / picture.height)
    size = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    fitted = picture.resize(size, Image.Resampling.BILINEAR)
    left, top = (fitted.width - width) // 2, (fitted.height - height) // 2
    pixels = np.asarray(fitted.crop((left, top, left + width, top + height)), np.uint8).reshape(height, width, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())  # (C, H, W)


def find_pictures(folder: Path) -> list[Path]:
    """PNG and JPEG files in ``folder`` itself, sorted; hidden ones are left out."""
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))


def read_pictures(paths: Sequence[Path], shape: tuple[int, int, int]) -> tuple[Tensor, list[str]]:
    """Pictures of files and of all files in folders and below, shape (N, C, H, W), and their names.

    Raises:
        ValueError: There is none, or one is missing or damaged.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"input={path}: no such file or folder; give a picture or a folder of them")
        folders = sorted(f for f in (path, *path.rglob("*")) if f.is_dir())
        files += [file for folder in folders for file in find_pictures(folder)] if folders else [path]
    if not files:
        raise ValueError(
            f"input={','.join(map(str, paths))}: no PNG or JPEG picture there; give files or a folder of them"
        )
    return torch.stack([read_picture(file, shape) for file in files]), [str(file) for file in files]


def check_picture_shape(shape: tuple[int, int, int]) -> None:
    """Refuse what no picture can have.

    Raises:
        ValueError: Not 1 or 3 channels, or a side without pixels.
    """
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise ValueError(f"data.shape={list(shape)}: channels (1 or 3), height and width are needed; try [3, 64, 64]")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Sixteen bits of grey as eight, which Pillow would cut off instead of scaling."""
    return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
