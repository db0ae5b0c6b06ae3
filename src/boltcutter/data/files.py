"""Large files: find them by pattern, divide them, and detect changes without reading them whole."""

from __future__ import annotations

import glob
import gzip
import hashlib
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.files import MAX_EXPANSION as MAX_EXPANSION
from boltcutter.files import expansion_limit as expansion_limit
from boltcutter.files import is_ours

PAGE_BYTES = 4096  # smallest unit that an operating system reads from a disk
BLOCK_BYTES, NUM_BLOCKS = 4096, 16  # blocks of each file that are hashed into a fingerprint

MAX_COUNTED = 1 << 26  # bytes of a file of this user whose content is counted, in a second at most


class ExpansionError(Exception):
    """A file expands to more than is allowed."""


def read_gzip(path: Path, limit: int) -> bytes:
    """Read a gzip file.

    Raises:
        ExpansionError: It has more bytes than the limit.
        OSError, EOFError, zlib.error: It is damaged.
    """
    with gzip.open(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ExpansionError
    return content


def check_expansion(path: Path, limit: int) -> None:
    """Check a compressed file, before another reader expands it.

    Args:
        path: A ``.zip`` file, of which the directory is read, or a ``.gz`` file, whose content is counted: of a file of
            this user, that of its first 64 MiB. Any other file is accepted.
        limit: Bytes to which it may expand.

    Raises:
        ExpansionError: It expands to more, or records of it overlap.
        OSError, EOFError, zlib.error, zipfile.BadZipFile: It is damaged.
    """
    size, counted = path.stat().st_size, MAX_COUNTED if is_ours(path.stat()) else sys.maxsize
    if path.suffix == ".gz":
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            while limit >= 0 and raw.tell() <= counted and (block := file.read(1 << 20)):
                limit -= len(block)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
        limit = -1 if sum(record.compress_size for record in records) > size else limit
        limit -= sum(record.file_size for record in records)
    if limit < 0:
        raise ExpansionError


def find_files(pattern: str, setting: str, suffixes: tuple[str, ...] = (".bin", ".npy")) -> list[Path]:
    """Return the files of a path, a folder (those with ``suffixes``) or a glob pattern, sorted by name."""
    path = Path(pattern)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(suffixes))
    else:
        files = [path] if path.is_file() else sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not files:
        what = f"no {' or '.join(suffixes)} file in this folder" if path.is_dir() else "no such file"
        raise ValueError(f"{setting}={pattern}: {what}; give one, a folder of {', '.join(suffixes)}, or a pattern")
    return [ordinary(file) for file in files]


def ordinary(path: Path, missing: str = "give an existing file") -> Path:
    """Return a path, unless a FIFO, which would block, or a device, which may be endless, is there, or nothing."""
    if not path.is_file():
        reason = "not an ordinary file; remove or replace it" if path.exists() else f"no such file; {missing}"
        raise ValueError(f"{path}: {reason}")
    return path


def map_npy(path: Path, missing: str = "give an existing file") -> npt.NDArray[Any]:
    """Memory-map a ``.npy`` file."""
    ordinary(path, missing)
    try:
        found = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        if not found.ndim or found.dtype.kind not in "biufc" or 0 in found.shape[1:]:
            raise ValueError(f"{found.dtype} of shape {list(found.shape)}, not rows of numbers")
        return found
    except Exception as error:  # NumPy parses the header as Python, and passes on what that raises
        raise ValueError(f"{path}: not a valid .npy file ({' '.join(str(error).split())}); replace it") from None


def sampled_hash(path: Path, *, with_time: bool = True) -> bytes:
    """Hash a file's size, modification time and some of its blocks, in a time that does not depend on its size.

    Without the time, copies of a file have the same hash.
    """
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns if with_time else ''}".encode())
    with open(path, "rb") as file:
        for offset in np.linspace(0, max(0, stat.st_size - BLOCK_BYTES), NUM_BLOCKS).astype(np.int64).tolist():
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
    return digest.digest()


def strided_windows(array: npt.NDArray[Any], first: int, count: int, width: int, step: int = 1) -> npt.NDArray[np.void]:
    """View a one-dimensional array as overlapping windows, without a copy.

    Each window is one element of a void dtype, which NumPy copies as a whole, and faster than a row.

    Args:
        array: Shape (n,).
        first: Index where the first window starts.
        count: Number of windows.
        width: Elements in a window.
        step: Elements between the starts of windows.

    Returns:
        Shape (count,); after indexing, ``view`` with the array's dtype turns windows into rows.
    """
    size = array.itemsize
    return np.ndarray((count,), f"V{width * size}", array, first * size, (step * size,))


def consecutive_ranges(fractions: dict[str, float], length: int) -> dict[str, tuple[int, int]]:
    """Divide the indices 0 … ``length`` - 1 into consecutive ranges."""
    ends = np.round(np.cumsum([0.0, *fractions.values()]) / sum(fractions.values()) * length).astype(int).tolist()
    return dict(zip(fractions, pairwise(ends), strict=True))
