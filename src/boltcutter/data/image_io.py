"""Read image files as uint8 tensors."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from boltcutter.data.files import ordinary
from boltcutter.files import IMAGE_FORMATS

SUFFIXES = tuple(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes)
SEVERAL_FRAMES = "data: images with several frames or pages, of which the first is read; save each in its own file"
FEW_LEVELS = (
    "data: images of 16 bits whose values are all below 4,096, as those of cameras with 12 bits, become "
    "16 levels or fewer; multiply them by 16, or save them with 8 bits"
)
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
ORIENTATION, SIDEWAYS = 274, (5, 6, 7, 8)  # of EXIF, and those that exchange height and width
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")


class ImageError(ValueError):
    """An image is damaged."""

    hide_traceback = True

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition("ImageError: ")[2].strip())  # without the traceback that a worker adds


def read_image(path: Path, shape: tuple[int, int, int], contents: BinaryIO | None = None) -> Tensor:
    """Read one image as uint8: EXIF orientation applied, resized to cover ``shape``, and centre-cropped.

    Grey, palette and CMYK images are converted to the channels of ``shape``, 12 and 16 bits are scaled to 8, and
    transparency is ignored, as torchvision does. Of several frames or pages, the first is read, with a warning.

    Args:
        path: A file of one of ``IMAGE_FORMATS``.
        shape: Channels (1 or 3), height, width.
        contents: The file's contents, if they are part of another file; ``path`` then only names it in errors.

    Raises:
        ValueError: The image is damaged, its pixels have no known range, or Pillow is not installed.
    """
    Image, ImageOps = _import_pillow()
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    with _open(path, contents) as file:
        if file.format != "MPO" and getattr(
            file, "is_animated", False
        ):  # an MPO is a photo with a preview or a depth map
            warnings.warn(SEVERAL_FRAMES, stacklevel=2)
        is_deep = ";16" in str(file.tile)  # of several channels, of which Pillow keeps the upper 8 bits
        file.draft(mode, (2 * width, 2 * height))  # decode a much larger JPEG at a fraction of its size
        upright = ImageOps.exif_transpose(file)
        if upright.mode.startswith(("I", "F")):  # which Pillow would clip to 8 bits
            upright = Image.fromarray(_eight_bits(np.asarray(upright), getattr(file, "tag_v2", {})))
        if upright.mode == "P" and "transparency" in upright.info:
            upright = upright.convert("RGBA")  # directly to RGB, Pillow warns of each
        image = (upright.convert("RGB") if upright.mode == "LAB" else upright).convert(mode)
        if is_deep and file.mode in ("RGB", "RGBA") and 0 < np.asarray(image).max() <= 0xF:
            warnings.warn(FEW_LEVELS, stacklevel=2)
    scale = max(width / image.width, height / image.height)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    fitted = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (fitted.width - width) // 2, (fitted.height - height) // 2
    pixels = np.asarray(fitted.crop((left, top, left + width, top + height)), np.uint8).reshape(height, width, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())  # (C, H, W)


def _eight_bits(pixels: npt.NDArray[Any], tags: Mapping[int, Any]) -> npt.NDArray[np.uint8]:
    """Scale greyscale of 12 or 16 bits to 8 bits; ``tags`` are those of a TIFF file."""
    low, high = pixels.min(), pixels.max()
    (bits,), (sign,) = tags.get(BITS, (16,)), tags.get(SAMPLE_FORMAT, (1,))
    if pixels.dtype.kind == "f" or bits > 16 or sign != 1 or low < 0 or high > 0xFFFF:
        kind = "floating point" if pixels.dtype.kind == "f" else f"{bits} bits" + ("" if sign == 1 else " with a sign")
        raise ValueError(
            f"greyscale of {kind} from {low:g} to {high:g}, whose range is not known; save it with 8 or 16 bits"
        )
    if tags.get(PHOTOMETRIC) == 0 and bits == 16:  # white is 0, which Pillow inverts only up to 8 bits
        pixels = 0xFFFF - pixels
    elif bits == 16 and 0xFF < high <= 0xFFF:
        warnings.warn(FEW_LEVELS, stacklevel=2)
    scaled: npt.NDArray[np.uint8] = (pixels >> (bits - 8)).astype(np.uint8)
    return scaled


def read_image_shape(path: Path, contents: BinaryIO | None = None) -> tuple[int, int, int]:
    """Return channels (1 or 3), height and width of an image, turned by its EXIF orientation, without decoding it."""
    with _open(path, contents) as image:
        height, width = image.height, image.width
        if image.getexif().get(ORIENTATION, 1) in SIDEWAYS and image.format != "TIFF":  # which Pillow turns itself
            height, width = width, height
        return 1 if image.mode[0] in "1LIF" and image.mode != "LAB" else 3, height, width


@contextmanager
def _open(path: Path, contents: BinaryIO | None) -> Iterator[Any]:
    Image, _ = _import_pillow()
    try:
        with Image.open(contents or ordinary(path), formats=list(IMAGE_FORMATS)) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise ImageError(f"{path}: not a valid image ({reason}); remove or replace it") from None


def is_image_file(path: Path) -> bool:
    """Whether the name is that of an image, in any case."""
    return path.suffix.lower() in SUFFIXES


def is_encoded_image(contents: bytes) -> bool:
    """Whether bytes begin like a file of one of ``IMAGE_FORMATS``, except PPM, which begins as a text may."""
    if contents.startswith((b"RIFF", b"BM")):  # short signatures, with more behind a size
        return contents[8:12] == b"WEBP" or (contents[:2] == b"BM" and contents[6:10] == bytes(4))
    return contents.startswith(SIGNATURES)


def list_files(folder: Path) -> list[Path]:
    """Return the files below ``folder``, sorted, without hidden files and folders; links to folders are followed.

    Raises:
        ValueError: Two folders are the same, by a link, so that their files would be read twice.
    """
    found: list[Path] = []
    seen: dict[str, str] = {}
    for root, folders, names in os.walk(folder, followlinks=True):
        if (other := seen.setdefault(os.path.realpath(root), root)) != root:
            if Path(root).is_relative_to(other):  # a link to a folder above
                folders.clear()
                continue
            raise ValueError(f"{root}: the same folder as {other}, by a link; remove one of them")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(found)


def warn_left_out(setting: str, others: Iterable[Path]) -> None:
    """Count files that are not read, by the ends of their names, in one warning."""
    ends = Counter(file.suffix or file.name for file in others)
    if ends:
        counts = ", ".join(f"{count} {end}" for end, count in ends.most_common(5))
        more = f" and {len(ends) - 5} more kinds" if len(ends) > 5 else ""
        rank_zero_warn(f"{setting}: not read: {counts}{more}; images are {', '.join(SUFFIXES)}; convert or remove them")


def read_images(paths: Sequence[Path], shape: tuple[int, int, int]) -> tuple[Tensor, list[str]]:
    """Read image files, and all images in folders and their subfolders.

    Returns:
        Images of shape (N, C, H, W), and their paths.
    """
    files: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"input={path}: no such file or folder; give an image or a folder of images")
        if not path.is_dir():
            files.append(path)
            continue
        for file in list_files(path):
            (files if is_image_file(file) else others).append(file)
    given = f"input={','.join(map(str, paths))}"
    if not files:
        raise ValueError(f"{given}: no image ({', '.join(SUFFIXES)}) there; give images or a folder of images")
    warn_left_out(given, others)
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
