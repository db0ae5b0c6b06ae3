"""Checkpoint I/O: checkpoints are written atomically, and removed only after they are replaced."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from boltcutter.checkpoint import atomic, sharded_checkpoint
from boltcutter.checkpoint.load import find_damage, find_fault, find_objects, load_checkpoint, save
from boltcutter.checkpoint.snapshot import HostSnapshot
from boltcutter.checkpoint.state import check_state
from boltcutter.checkpoint.storage import CheckpointError as CheckpointError
from boltcutter.checkpoint.storage import (
    error_text,
    is_url,
    is_within,
    remedy_for,
    remove_shards,
    repeat,
    resolve_filesystem,
    shard_folders,
    store_errors,
)
from boltcutter.config.errors import one_line
from boltcutter.environment.process import is_rank_zero

# Constructor arguments, stored by Lightning and read only by its load_from_checkpoint.
OF_LAUNCHER = ".temp.ckpt"  # in which a launcher of Lightning passes weights from a rank, without a state of training
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")


class AtomicCheckpointIO(CheckpointIO):
    """Writes each checkpoint to a temporary file, flushes it to disk, and then renames it.

    If the process is killed or the disk is full, the previous file is unchanged. Files are verified against their
    checksums when they are loaded. Paths with a protocol (``s3://``) use fsspec; such storage makes an object visible
    only when it is complete.

    Args:
        asynchronous: Write in a background thread, so that training waits only for a copy in memory. Files are
            written in order, one at a time; an error is raised at the next save, or when training ends.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._snapshot = HostSnapshot() if asynchronous else None
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._used: set[Path] = set()  # folders that were created, and must not be removed by others
        self._removable: set[str] = set()
        self._written: set[tuple[str, str]] = (
            set()
        )  # folders or URLs of saved checkpoints, and the suffix of their names

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: This checkpoint or the previous one could not be written; existing files are unchanged.
        """
        self.wait()
        self._written.add(_place(path))
        if self._snapshot:
            checkpoint = self._snapshot.copy(checkpoint)
        self._submit(partial(self._write_checkpoint, path, checkpoint))

    def save_sharded(self, checkpoint: dict[str, Any], path: str | Path, orders: dict[str, torch.Tensor]) -> None:
        """Write a sharded checkpoint, synchronously on all ranks.

        Args:
            checkpoint: Its tensors may be ``DTensor``.
            path: Path of the checkpoint file, which refers to the shards.
            orders: Row order of permuted tensors, by name.

        Raises:
            CheckpointError: It could not be written; existing files are unchanged.
        """
        self.wait()
        self._written.add(_place(path))
        try:
            index = sharded_checkpoint.save(checkpoint, path, orders)
        except OSError as error:
            raise CheckpointError(_write_failure(path, error)) from error
        if index:  # on the first rank
            self._write_checkpoint(path, index, keep=index["shards"]["folder"])

    def sharded_size(self, path: str | Path) -> int:
        """Return the size of a checkpoint's shards, in bytes."""
        store, _ = resolve_filesystem(path)
        return sum(store.du(folder) for folder in shard_folders(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True, *, lazy: bool = False
    ) -> dict[str, Any]:
        """Load a checkpoint of Lightning, restricted to tensors and plain values.

        Args:
            path: Path or URL.
            map_location: Device of the tensors, as for ``torch.load``; None: the CPU, not the device of each tensor
                when it was saved, which may not exist here or belong to another rank.
            weights_only: Ignored; code in a checkpoint is never executed.
            lazy: Memory-map tensors, and do not load those in shards.

        Raises:
            CheckpointError: The file does not exist, is damaged, holds more than data, holds only weights, or its state
                of training is not as Lightning writes it.
        """
        self.wait()
        if lazy and (fault := find_damage(path)):
            raise CheckpointError(f"{path}: {fault}; use another checkpoint")
        found = load_checkpoint(path, map_location, lazy=lazy)
        if "state_dict" not in found:
            if Path(path).name == OF_LAUNCHER:
                self.permit_removal(str(path))
                return found
            raise CheckpointError(
                f"{path}: holds weights but no training state to resume; load them with init_from={path}"
            )
        check_state(found, path)
        _remove_objects(found, path)
        _update_moved_paths(found, path)
        return found

    def permit_removal(self, path: str) -> None:
        """Let a checkpoint of an earlier process be removed, as its path is one of the configuration."""
        self._removable.add(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, if it exists; not before the one that replaces it is written.

        Raises:
            CheckpointError: It is not in a folder into which a checkpoint was saved; the path may come from a file.
        """
        if _place(path) not in self._written and str(path) not in self._removable and not _is_sharded_folder(path):
            if not is_url(path) and not os.path.lexists(path):
                return  # as of Lightning's OnExceptionCheckpoint, which removes at the end what it may have saved
            raise CheckpointError(
                f"{path}: not removed, since no checkpoint was saved to its folder; remove it yourself if it is yours"
            )
        earlier = list(self._pending)

        def remove() -> None:
            with store_errors(path):
                store, place = resolve_filesystem(path)
                if store.isfile(place):
                    store.rm_file(place)  # not rm, which treats [, * and ? as a pattern
                elif store.exists(place):
                    store.rm(place, recursive=True)
                remove_shards(path)

        def remove_if_replaced() -> None:
            if all(job.exception() is None for job in earlier):
                repeat(path, remove)

        self._submit(remove_if_replaced)

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        pending, self._pending = self._pending, []
        for job in pending:
            job.result()

    def teardown(self) -> None:
        """Finish writing, and stop the thread."""
        failing = sys.exc_info()[1] is not None
        try:
            self.wait()
        except CheckpointError as error:
            if not failing:
                raise
            print(f"error: {one_line(error)}", file=sys.stderr)  # do not hide the error that ended training
        finally:
            if self._writer:
                self._writer.shutdown()
                self._writer = None

    def _submit(self, job: Callable[[], None]) -> None:
        if not self.asynchronous:
            return job()
        self._writer = self._writer or ThreadPoolExecutor(1, "checkpoint")
        return self._pending.append(self._writer.submit(job))

    def _write_checkpoint(self, path: str | Path, checkpoint: dict[str, Any], keep: str | None = None) -> None:
        if not is_url(path):
            self._write(Path(path), partial(save, checkpoint), keep)
            return
        content = BytesIO()
        save(checkpoint, content)
        try:
            store, place = resolve_filesystem(path)
            repeat(path, lambda: store.pipe_file(place, content.getvalue()))
            if keep:
                repeat(path, lambda: remove_shards(path, keep))
        except Exception as error:  # each store has its own
            raise CheckpointError(_write_failure(path, error)) from error

    def _write(self, path: Path, dump: Callable[[IO[bytes]], object], keep: str | None = None) -> None:
        folder = path.parent
        try:
            if folder not in self._used:
                folder.mkdir(parents=True, exist_ok=True)
            for entry in folder.iterdir():
                if entry.name.startswith(f".{path.name}."):  # of an earlier write, by a process that was killed
                    entry.unlink()
            atomic.write_atomically(path, dump, _verify)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            raise CheckpointError(_write_failure(path, error)) from error
        self._used.add(folder)
        remove_shards(path, keep)


def _place(path: str | Path) -> tuple[str, str]:
    """The folder of a checkpoint, with links resolved, and the suffix of its name."""
    folder, _, name = str(path).removeprefix("file://").rpartition("/")
    return folder if is_url(folder) else os.path.realpath(folder or "."), Path(name).suffix if name != ".." else name


def _is_sharded_folder(path: str | Path) -> bool:
    """Whether it is a folder that DeepSpeed or torch.distributed.checkpoint has written, without this class."""
    markers = ("zero_to_fp32.py", "checkpoint/zero_to_fp32.py", ".metadata")
    return not is_url(path) and not os.path.islink(path) and any(Path(path, name).is_file() for name in markers)


def _remove_objects(found: dict[str, Any], path: str | Path) -> None:
    """Remove the states of callbacks that hold objects of foreign classes, and warn about all that is not loaded."""
    states = found.get("callbacks") or {}
    objects = {f"callbacks.{name}": find_objects(states[name], f"callbacks.{name}") for name in states}
    found["callbacks"] = {name: state for name, state in states.items() if not objects[f"callbacks.{name}"]}
    others = {key: value for key, value in found.items() if key not in HYPERPARAMETERS}
    lines = [*(line for some in objects.values() for line in some[:1]), *find_objects(others)]
    if lines and is_rank_zero():
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        print(
            f"warning: {path}: {lines[0]}{more} and is not loaded; set trust=true if you trust the source of the file, "
            "or save plain values instead",
            file=sys.stderr,
        )


def _update_moved_paths(found: dict[str, Any], path: str | Path) -> None:
    """Update the paths in the state of ModelCheckpoint if the folder of a checkpoint was moved.

    Lightning discards this state if ``dirpath`` has changed, and would then keep a worse checkpoint as the best.
    """
    place = str(path).rpartition("/")[0] or "."
    here = place if is_url(path) else os.path.realpath(place)
    for name, state in found["callbacks"].items():
        if not isinstance(state, dict) or not isinstance(state.get("best_k_models"), dict):
            continue
        before, kept = f"{state.get('dirpath')}/", state["best_k_models"]
        paths = {key: old for key, old in state.items() if key.endswith("_model_path") and old}
        if not paths or before == f"{here}/" or not all(old.startswith(before) for old in (*kept, *paths.values())):
            continue
        new = {old: f"{here}/{old.removeprefix(before)}" for old in (*kept, *paths.values())}
        if not all(is_within(path, here) for path in new.values()):
            continue
        with store_errors(path):
            if not all(store.exists(at) for store, at in (resolve_filesystem(new[old]) for old in kept or new)):
                continue
        moved = {"dirpath": here, "best_k_models": {new[old]: score for old, score in kept.items()}}
        found["callbacks"][name] = {**state, **moved, **{key: new[old] for key, old in paths.items()}}


def _verify(file: IO[bytes]) -> None:
    if fault := find_fault(file):
        raise OSError(f"read back, {fault}")


def _write_failure(path: str | Path, error: Exception) -> str:
    if is_url(path):
        return f"{path}: not written ({error_text(error)}); the previous checkpoint is unchanged; {remedy_for(path)}"
    folder = Path(path).parent
    existing = next((p for p in folder.resolve().parents if p.is_dir()), Path("/")) if not folder.is_dir() else folder
    free = f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB are free"
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        return f"{path}: not written: the folder was removed, with its checkpoints; {free}"
    return f"{path}: not written ({error_text(error)}); {free}; the previous checkpoint is unchanged"
