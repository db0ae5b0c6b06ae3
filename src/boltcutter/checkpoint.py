"""Checkpoints that are whole or not there: written in one step, verified before they are read, never run as code."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor, nn

# What torch.compile, FSDP and activation checkpointing put into names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; one line says which, why, and what to do."""

    explains_itself = True  # needs no traceback


class AtomicCheckpointIO(CheckpointIO):
    """Writes a file beside its place, brings it to the disk, and only then gives it its name.

    A process killed at any moment, or a full disk, leaves the file that was there before. What is read is checked
    byte by byte against the checksums that it carries. Paths with a protocol (``s3://``) go through fsspec, whose
    stores show an object only when it is whole.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``.

        Raises:
            CheckpointError: It could not be written; what was there before is untouched.
        """
        try:
            if "://" in str(path):
                buffer = BytesIO()
                torch.save(checkpoint, buffer)
                store, place = fsspec.url_to_fs(str(path))
                store.pipe_file(place, buffer.getvalue())
            else:
                _write(checkpoint, Path(path))
        except (OSError, RuntimeError) as error:  # torch gives a full disk as RuntimeError
            raise CheckpointError(_why_not_written(path, error)) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Read a checkpoint of this project, or of Lightning; tensors and plain types alone.

        Raises:
            CheckpointError: It is not there, not whole, or more than data.
        """
        found = load(path, map_location)
        if "state_dict" not in found:
            raise CheckpointError(
                f"{path}: holds weights but no training to go on with; load them with init_from={path}"
            )
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file, if it is there."""
        store, place = fsspec.url_to_fs(str(path))
        if store.exists(place):
            store.rm(place, recursive=True)


def load(path: str | Path, map_location: Any = "cpu", *, peek: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain types, after checking that it is whole.

    Args:
        path: Of the file.
        map_location: Where tensors go, as for ``torch.load``.
        peek: Known to be whole, and asked for names and shapes: tensors of a local file are read when they are used.

    Raises:
        CheckpointError: It is not there, not whole, or more than data.
    """
    fault = None if peek else damage(path)
    if fault:
        raise CheckpointError(f"{path}: {fault}; take another checkpoint")
    local = "://" not in str(path)
    with fsspec.open(str(path), "rb") as file:
        try:
            source: Any = str(path) if local else file
            found = torch.load(source, map_location=map_location, weights_only=True, mmap=peek and local)
        except (pickle.UnpicklingError, RuntimeError) as error:
            why = " ".join(str(error).split("\n")[-1].split()) or type(error).__name__
            raise CheckpointError(
                f"{path}: holds more than tensors and plain types, so it is not read ({why})"
            ) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not a checkpoint; take another file")
    return found


def damage(path: str | Path) -> str | None:
    """What is wrong with a file, by size, form and checksums; None if nothing is."""
    store, place = fsspec.url_to_fs(str(path))
    if not store.isfile(place):
        return "no such file"
    if store.size(place) == 0:
        return "the file is empty"
    with store.open(place, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                broken = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError, ValueError):
            return f"not a checkpoint, or cut short ({store.size(place)} bytes)"
    return f"damaged at its record {broken}" if broken else None


def newest(folder: str | Path, say: Callable[[str], None] = print) -> str | None:
    """The newest whole checkpoint named ``last…`` in a folder, or under a URL; a damaged one is passed over, and told.

    Args:
        folder: Where to look.
        say: Told of each damaged file.
    """
    store, place = fsspec.url_to_fs(str(folder))
    for file in sorted(store.glob(f"{place}/last*.ckpt"), key=store.modified, reverse=True):
        path = str(store.unstrip_protocol(file)) if "://" in str(folder) else str(file)
        fault = damage(path)
        if fault is None:
            return path
        say(f"warning: {path}: {fault}; taking the one before")
    return None


def weights(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's own weights in any file that training programs write.

    Understood are Lightning's checkpoints, bare state dicts, ``{"model": …}`` and ``{"state_dict": …}``, with the
    prefixes that DataParallel, ``torch.compile``, FSDP and a LightningModule's ``model.`` put before each key.
    """
    inner = next((found[key] for key in ("state_dict", "model", "model_state_dict") if key in found), found)
    plain = {}
    for key, value in inner.items():
        if isinstance(value, Tensor):
            plain[".".join(part for part in key.split(".") if part not in WRAPPERS)] = value
    for outer in ("module.", "model.", "module."):  # DataParallel around or inside a LightningModule
        if any(key.startswith(outer) for key in plain):
            plain = {key.removeprefix(outer): value for key, value in plain.items() if key.startswith(outer)}
    return plain


def initialize(model: nn.Module, path: str | Path) -> list[str]:
    """Give ``model`` the weights of a file, where names and shapes fit.

    Returns:
        A line for each kind of weight that was left alone: missing, unexpected, of another shape.

    Raises:
        CheckpointError: The file cannot be read, or nothing in it fits.
    """
    given, own = weights(load(path)), model.state_dict()
    fitting = {key: value for key, value in given.items() if key in own and own[key].shape == value.shape}
    if not fitting:
        some = ", ".join(list(given)[:3]) or "no weights"
        raise CheckpointError(f"init_from={path}: nothing in it fits the model (it has {some} …); take another file")
    model.load_state_dict(fitting, strict=False)
    reshaped = [f"{k} {list(given[k].shape)} → {list(own[k].shape)}" for k in given if k in own and k not in fitting]
    kinds = {
        "missing": [key for key in own if key not in given],
        "unexpected": [key for key in given if key not in own],
        "of another shape": reshaped,
    }
    return [f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in kinds.items() if keys]


def misfit(path: str | Path, task: nn.Module) -> str | None:
    """In one line, why training cannot go on from a checkpoint with this task; None if it can.

    Compared are names and shapes of the weights, and the settings that the optimizer keeps for each group.
    """
    found = load(path, peek=True)
    given, own = found.get("state_dict", {}), task.state_dict()
    kinds = {
        "weights are missing": [key for key in own if key not in given],
        "weights are unexpected": [key for key in given if key not in own],
        "weights have another shape": [key for key in own if key in given and given[key].shape != own[key].shape],
    }
    make: Any = getattr(task, "optimizer", None)
    if make is not None and found.get("optimizer_states"):
        then = found["optimizer_states"][0]["param_groups"][0].keys()  # with what schedulers have added
        now = make([nn.Parameter(torch.zeros(1))]).param_groups[0].keys()
        kinds["optimizer settings are missing"] = sorted(now - then)
    return "; ".join(f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in kinds.items() if keys) or None


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename from another disk would be a copy, which a kill can cut short.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    entry = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(entry)  # the name, too, must outlast a power cut
    finally:
        os.close(entry)


def _why_not_written(path: str | Path, error: Exception) -> str:
    there = next((p for p in Path(path).parents if p.is_dir()), Path("/"))
    free = "" if "://" in str(path) else f"; {shutil.disk_usage(there).free / 2**20:,.0f} MiB are free there"
    return f"{path}: not written ({' '.join(str(error).split())}){free}; the checkpoint before it is untouched"
