"""Load checkpoints: verify them first, and load only data, never code."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from boltcutter.checkpoint import sharded_checkpoint, unpickle
from boltcutter.checkpoint.storage import CheckpointError, is_url, open_file, store_errors
from boltcutter.config.errors import as_config_error
from boltcutter.environment.announcement import CountedFile
from boltcutter.protocols import GeneratesTokens

# Raised by torch on damaged files.
READ_ERRORS = (EOFError, LookupError, TypeError, ValueError, AttributeError, NotImplementedError, zipfile.BadZipFile)

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch before 1.6 begin


def load_checkpoint(path: str | Path, map_location: Any = "cpu", *, lazy: bool = False) -> dict[str, Any]:
    """Load a checkpoint of tensors and plain values, after verifying that the file is complete.

    Args:
        path: Path or URL of the file.
        map_location: Device of the tensors, as for ``torch.load``; None: the CPU.
        lazy: Skip the verification, memory-map the tensors of a local file, and do not load those in shards.

    Raises:
        CheckpointError: The file does not exist, is damaged, or holds more than data.
    """
    with store_errors(path), open_file(path) as file:
        fault = None if lazy and file else find_fault(file)
        if fault or file is None:
            raise CheckpointError(f"{path}: {fault}; use another checkpoint")
        mmap = lazy and not is_url(path)
        found = _unpickle(path, str(path) if mmap else file, map_location=map_location or "cpu", mmap=mmap)
        return found if lazy or "shards" not in found else sharded_checkpoint.load_full(path, found)


def save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """Write a checkpoint to a file that is open for reading and writing, so that this user can load its objects."""
    torch.save(checkpoint, CountedFile(file))
    unpickle.seal(file)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint with tensors on the meta device, which have shapes but no data.

    Raises:
        CheckpointError: As for ``load``.
    """
    with store_errors(path), open_file(path, whole=False) as file:
        if file is None:
            raise CheckpointError(f"{path}: no such file; use another checkpoint")
        return _unpickle(path, file, map_location="meta")


def read_steps(path: str | Path) -> int | None:
    """Return after how many steps, as loggers count them, a checkpoint was saved; None if it is not of a training.

    ``global_step`` counts the steps of all optimizers of manual optimization, loggers count batches.

    Raises:
        CheckpointError: As for ``load``.
    """
    metadata = read_metadata(path)
    loops = metadata.get("loops", {}).get("fit_loop", {})
    manual = loops.get("epoch_loop.manual_optimization.optim_step_progress", {}).get("total", {}).get("completed")
    steps = loops["epoch_loop.batch_progress"]["total"]["processed"] if manual else metadata.get("global_step")
    return None if steps is None else int(steps)


def find_damage(path: str | Path) -> str | None:
    """Verify a file and its shards by size, format and checksums; return a description of the damage, or None."""
    with store_errors(path), open_file(path) as file:
        if file is None or (fault := find_fault(file)):
            return find_fault(file)
        with suppress(CheckpointError):  # not damaged, even if it is no checkpoint
            metadata = _unpickle(path, file, map_location="meta")
            fault = sharded_checkpoint.find_damage(path, metadata) if "shards" in metadata else None
    return fault


def find_objects(value: Any, path: str = "") -> list[str]:
    """One line for each object in a loaded checkpoint in whose place there is a placeholder, with its key and class."""
    return list(unpickle.find_placeholders(value, path))


def _unpickle(path: str | Path, source: Any, *, map_location: Any, mmap: bool = False) -> dict[str, Any]:
    try:
        if not zipfile.is_zipfile(source):
            raise pickle.UnpicklingError("it has a legacy format")
        with zipfile.ZipFile(source) as archive:
            if fault := _find_expansion(archive):
                raise pickle.UnpicklingError(fault)
        if not isinstance(source, str):
            source.seek(0)
        content = unpickle.read_archive(source, map_location=map_location, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, *READ_ERRORS) as error:
        raise CheckpointError(_why_not_loaded(path, error, map_location)) from None
    if not isinstance(content, dict):
        what = content.name if hasattr(content, "built") else type(content).__name__  # a placeholder
        raise CheckpointError(f"{path}: holds a {what}, not a checkpoint; use another file")
    return content


def _why_not_loaded(path: str | Path, error: Exception, map_location: Any) -> str:
    """What an error of reading a file means, and what to do."""
    if isinstance(error, RuntimeError) and str(map_location) not in ("cpu", "meta"):  # of a device that is missing
        why = str(error).split(". ")[0].split("\n")[0]
        return f"{path}: not loaded to map_location={map_location} ({why}); use map_location=cpu"
    why = " ".join(str(error).split("\n")[-1].split()) or type(error).__name__
    return f"{path}: not loaded, because it would execute code or is damaged ({why})"


def find_fault(file: IO[bytes] | None) -> str | None:
    """Verify an open file as ``find_damage`` does, but not its shards."""
    if file is None:
        return "no such file"
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return "the file is empty"
    file.seek(0)
    if file.read(len(LEGACY)) == LEGACY:  # read by an unpickler of torch whose limits are wider
        return (
            'has the legacy format of torch before 1.6, which is not loaded; convert it by python -c "import torch; '
            "torch.save(torch.load('<old file>', weights_only=True), '<new file>')\""
        )
    try:
        with zipfile.ZipFile(file) as archive:
            if fault := _find_expansion(archive):
                return f"not loaded, because {fault}"
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, zlib.error):
        return f"not a checkpoint, or truncated ({size} bytes)"
    return f"record {broken} is damaged" if broken else None


def _find_expansion(archive: zipfile.ZipFile) -> str | None:
    """Return why reading an archive would take more memory or time than its size allows, or None."""
    records = archive.infolist()
    if any(record.compress_size < record.file_size for record in records):
        return "it is compressed, and torch compresses nothing"
    assert archive.fp is not None
    size = archive.fp.seek(0, os.SEEK_END)
    return "its records overlap" if sum(record.file_size for record in records) > size else None


def restore(data: Any, model: Any, task: Any = None) -> None:
    """Restore a native data module, and a task if given, from a checkpoint or an export.

    Args:
        data: The data module.
        model: Path or URL of a checkpoint, or an ``ExportedModel``.
        task: The task; of an export, only one that generates tokens uses it.

    Raises:
        ConfigError: The names of classes do not fit.
    """
    if not isinstance(model, str):
        with as_config_error():
            data.load_state_dict(
                {"statistics": model.statistics, "input_structure": model.input_structure, "classes": model.classes}
            )
        generates = isinstance(task, GeneratesTokens)
        if generates:
            task.model = model
        return
    state = load_checkpoint(model)
    with as_config_error():
        data.load_state_dict(state.get(type(data).__qualname__, {"statistics": {}}))
    if task is not None:
        task.load_state_dict(state["state_dict"])
