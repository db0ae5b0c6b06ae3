"""Checkpoints that are whole or not there, verified before they are read, and never run as code."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from boltcutter.config import one_line


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""

    explains_itself = True  # needs no traceback


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a file beside its place, brings it to the disk, and only then gives it its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``; what was there before stays if it cannot be written."""
        path = Path(path)
        draft = path.with_name(f".{path.name}.part")  # in the same folder, as only there a rename is one step
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except (OSError, RuntimeError) as error:  # torch gives a full disk as RuntimeError
            draft.unlink(missing_ok=True)
            text = f"{path}: not written ({one_line(error)}); the checkpoint before it is untouched; free some space"
            raise CheckpointError(text) from error

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint as ``load`` does, whatever Lightning asks for."""
        return load(path)


def load(path: str | Path) -> dict[str, Any]:
    """Read a file of tensors and plain types, after a look at its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken:
            raise zipfile.BadZipFile(f"damaged at its record {broken}")
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        text = f"{path}: no whole checkpoint of plain data ({one_line(error)[:150]}); put another in its place"
        raise CheckpointError(text) from None
