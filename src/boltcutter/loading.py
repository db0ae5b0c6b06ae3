"""Read checkpoints: verified first, and as data alone, whatever the file would run."""

from __future__ import annotations

import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from boltcutter import sharded
from boltcutter.storage import CheckpointError, is_url, opened, store_errors


def load(path: str | Path, map_location: Any = "cpu", *, peek: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain types, after checking that it is whole.

    Args:
        path: Of the file; a URL as well.
        map_location: Where tensors go, as for ``torch.load``.
        peek: Known to be whole: tensors of a local file are read when they are used, and those in parts not at all.

    Raises:
        CheckpointError: It is not there, not whole, or more than data.
    """
    with store_errors(path), opened(path) as file:
        fault = None if peek and file else _fault(file)
        if fault or file is None:
            raise CheckpointError(f"{path}: {fault}; take another checkpoint")
        lazily = peek and not is_url(path)
        found = _unpickled(path, str(path) if lazily else file, map_location=map_location, mmap=lazily)
        return found if peek else sharded.whole(Path(path), found)


def outline(path: str | Path) -> dict[str, Any]:
    """Names, shapes and plain values of a checkpoint; of tensors nothing is read. Raises as ``load`` does."""
    with store_errors(path), opened(path, whole=False) as file:
        if file is None:
            raise CheckpointError(f"{path}: no such file; take another checkpoint")
        return _unpickled(path, file, map_location="meta")


def damage(path: str | Path) -> str | None:
    """What is wrong with a file, and its parts, by size, form and checksums; None if nothing is."""
    with store_errors(path), opened(path) as file:
        fault = _fault(file)
    if fault or is_url(path):
        return fault
    with suppress(CheckpointError):  # whole, whatever it is
        fault = sharded.fault(Path(path), outline(path))
    return fault


def _unpickled(path: str | Path, source: Any, **options: Any) -> dict[str, Any]:
    try:
        found = torch.load(source, weights_only=True, **options)
    except (pickle.UnpicklingError, RuntimeError) as error:
        why = " ".join(str(error).split("\n")[-1].split()) or type(error).__name__
        raise CheckpointError(f"{path}: holds more than tensors and plain types, so it is not read ({why})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not a checkpoint; take another file")
    return found


def _fault(file: IO[bytes] | None) -> str | None:
    if file is None:
        return "no such file"
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return "the file is empty"
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError):
        return f"not a checkpoint, or cut short ({size} bytes)"
    file.seek(0)
    return f"damaged at its record {broken}" if broken else None
