"""Read checkpoints: verified first, and as data alone, whatever the file would run."""

from __future__ import annotations

import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from boltcutter import sharded, unpickle
from boltcutter.storage import CheckpointError, is_url, open_file, store_errors

READ_ERRORS = (
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)  # what torch's reader makes of a damaged file


def load(path: str | Path, map_location: Any = "cpu", *, lazy: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain types, after checking that it is whole.

    Args:
        path: Of the file; a URL as well.
        map_location: Where tensors go, as for ``torch.load``.
        lazy: Known to be whole: tensors of a local file are read when they are used, and those in parts not at all.

    Raises:
        CheckpointError: It is not there, not whole, or more than data.
    """
    with store_errors(path), open_file(path) as file:
        fault = None if lazy and file else _fault(file)
        if fault or file is None:
            raise CheckpointError(f"{path}: {fault}; take another checkpoint")
        mmap = lazy and not is_url(path)
        found = _unpickled(path, str(path) if mmap else file, map_location=map_location, mmap=mmap)
        return found if lazy else sharded.load_full(Path(path), found)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Names, shapes and plain values of a checkpoint; of tensors nothing is read. Raises as ``load`` does."""
    with store_errors(path), open_file(path, whole=False) as file:
        if file is None:
            raise CheckpointError(f"{path}: no such file; take another checkpoint")
        return _unpickled(path, file, map_location="meta")


def find_damage(path: str | Path) -> str | None:
    """What is wrong with a file, and its parts, by size, form and checksums; None if nothing is."""
    with store_errors(path), open_file(path) as file:
        fault = _fault(file)
    if fault or is_url(path):
        return fault
    with suppress(CheckpointError):  # whole, whatever it is
        fault = sharded.find_damage(Path(path), read_metadata(path))
    return fault


def _unpickled(path: str | Path, source: Any, **options: Any) -> dict[str, Any]:
    try:
        try:
            found = torch.load(source, weights_only=True, **options)
        except pickle.UnpicklingError:  # objects of other classes, perhaps, which strictly are refused
            found = _without_objects(source, **options)
    except (pickle.UnpicklingError, RuntimeError, *READ_ERRORS) as error:
        why = " ".join(str(error).split("\n")[-1].split()) or type(error).__name__
        raise CheckpointError(f"{path}: would execute code or is damaged, so it is not read ({why})") from None
    if not isinstance(found, dict):
        what = found.name if isinstance(found, unpickle.Placeholder) else type(found).__name__
        raise CheckpointError(f"{path}: holds a {what}, not a checkpoint; take another file")
    return found


def _without_objects(source: Any, *, map_location: Any = None, mmap: bool = False) -> Any:
    """Read with placeholders in place of objects of foreign classes.

    Torch's reader is called directly: ``torch.load`` would hand some archives over to TorchScript, which executes them.

    Raises:
        UnpicklingError: The file would execute code, or is of a format older than torch 1.6.
    """
    if not isinstance(source, str):
        source.seek(0)
    if not zipfile.is_zipfile(source):
        raise pickle.UnpicklingError("it is of an old format")
    if not isinstance(source, str):
        source.seek(0)
    memory = torch.UntypedStorage.from_file(source, False, os.path.getsize(source)) if mmap else None
    with torch.serialization._open_zipfile_reader(source) as archive:
        read: Any = torch.serialization._load
        return read(archive, map_location, unpickle.PICKLE_MODULE, overall_storage=memory, encoding="utf-8")


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
