"""Files of any size: which of them are meant, and whether they have changed."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = 4096  # bytes that a system reads from a disk at least
BLOCK, BLOCKS = 4096, 16  # bytes of a block, and blocks of each file, that a fingerprint looks at


def find(pattern: str, setting: str, endings: tuple[str, ...] = (".bin", ".npy")) -> list[Path]:
    """Files that a path, a folder or a pattern means, in the order of their names.

    Raises:
        ValueError: There are none.
    """
    path = Path(pattern)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(endings))
    else:
        found = [path] if path.is_file() else sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not found:
        raise ValueError(f"{setting}={pattern}: no such file; give one, a folder of {', '.join(endings)}, or a pattern")
    return found


def sampled(path: Path) -> bytes:
    """Hash of a file's size, time of change, and some of its blocks; takes as long for a large file as for a small."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        for place in np.linspace(0, max(0, stat.st_size - BLOCK), BLOCKS).astype(np.int64).tolist():
            file.seek(place)
            digest.update(file.read(BLOCK))
    return digest.digest()


def stretches(numbers: npt.NDArray[Any], first: int, count: int, width: int, step: int = 1) -> npt.NDArray[np.void]:
    """Stretches of ``width`` of one row of numbers, each ``step`` further than the one before, without a copy.

    Each is one thing, which NumPy copies as a whole, and faster than a row of numbers.

    Returns:
        Shape (count,); ``view`` of its numbers' dtype makes rows of what is indexed.
    """
    size = numbers.itemsize
    return np.ndarray((count,), f"V{width * size}", numbers, first * size, (step * size,))
