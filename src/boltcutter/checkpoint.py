"""Checkpoints that are whole or not there: written in one step, and removed only once they are replaced."""

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

from boltcutter import sharded
from boltcutter.environment.process import is_rank_zero
from boltcutter.loading import find_damage, load
from boltcutter.storage import CheckpointError as CheckpointError
from boltcutter.storage import error_text, is_url, remedy_for, resolve_filesystem, store_errors, write_atomically
from boltcutter.unpickle import find_placeholders

# Where Lightning keeps constructor arguments; only its own load_from_checkpoint reads them.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")


class AtomicCheckpointIO(CheckpointIO):
    """Writes a file beside its place, brings it to the disk, and only then gives it its name.

    A process killed at any moment, or a full disk, leaves the file that was there before. What is read is checked
    byte by byte against the checksums that it carries. Paths with a protocol (``s3://``) go through fsspec, whose
    stores show an object only when it is whole.

    Args:
        asynchronous: Write in a thread beside the training, which then waits only for a copy in memory. Files are
            written in order, one at a time; a fault is raised at the next save, or when training ends.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._snapshot = BytesIO()  # used again and again: fresh memory costs more than the copy
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._used: set[Path] = set()  # folders that must not vanish

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``.

        Raises:
            CheckpointError: It could not be written, or the one before; what was there before is untouched.
        """
        self.wait()
        if not self.asynchronous and not is_url(path):
            return self._write(path, lambda file: torch.save(checkpoint, file))
        self._snapshot.seek(0)
        torch.save(checkpoint, self._snapshot)
        return self._do(partial(self._write_snapshot, path, self._snapshot.tell()))

    def save_sharded(self, checkpoint: dict[str, Any], path: str | Path, orders: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint of which each rank has a part, as ``sharded.save`` does; ranks wait for it.

        Raises:
            CheckpointError: It could not be written; what was there before is untouched.
        """
        self.wait()
        try:
            index = sharded.save(checkpoint, path, orders)
        except OSError as error:
            raise CheckpointError(_why_not_written(path, error)) from error
        if index:  # on the first rank
            self._write(path, lambda file: torch.save(index, file), keep=index["shards"]["folder"])

    def load_sharded(self, path: str | Path, index: dict[str, Any], into: dict[str, torch.Tensor]) -> None:
        """Fill tensors by name with what a lazy has found to be in parts; called on all ranks."""
        sharded.load_into(Path(path), index, into, alone=False)

    def sharded_size(self, path: str | Path) -> int:
        """Bytes of a checkpoint beside those of the file itself."""
        return sharded.size(Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True, *, lazy: bool = False
    ) -> dict[str, Any]:
        """Read a checkpoint of this project, or of Lightning; tensors and plain types alone; or ``lazy`` as ``load``.

        Raises:
            CheckpointError: It is not there, not whole, or more than data.
        """
        self.wait()
        if lazy and (fault := find_damage(path)):
            raise CheckpointError(f"{path}: {fault}; take another checkpoint")
        found = load(path, map_location, lazy=lazy)
        if "state_dict" not in found:
            raise CheckpointError(
                f"{path}: holds weights but no training to go on with; load them with init_from={path}"
            )
        _leave_out_objects(found, path)
        _find_moved(found, path)
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file, if it is there; never before the one that replaces it is written."""
        earlier = list(self._pending)

        def remove() -> None:
            if all(job.exception() is None for job in earlier):
                with store_errors(path):
                    store, place = resolve_filesystem(path)
                    if store.isfile(place):
                        store.rm_file(place)  # not rm, which would take [, * or ? in it for a pattern
                    elif store.exists(place):
                        store.rm(place, recursive=True)
                    sharded.remove_stale(Path(path))

        self._do(remove)

    def wait(self) -> None:
        """Return once all that was saved is written.

        Raises:
            CheckpointError: It could not be.
        """
        pending, self._pending = self._pending, []
        for job in pending:
            job.result()

    def teardown(self) -> None:
        """Write what is left."""
        failing = sys.exc_info()[1] is not None
        try:
            self.wait()
        except CheckpointError as error:
            if not failing:
                raise
            print(f"error: {error}", file=sys.stderr)  # beside what ended the training
        finally:
            if self._writer:
                self._writer.shutdown()
                self._writer = None

    def _do(self, job: Callable[[], None]) -> None:
        if not self.asynchronous:
            return job()
        self._writer = self._writer or ThreadPoolExecutor(1, "checkpoint")
        return self._pending.append(self._writer.submit(job))

    def _write_snapshot(self, path: str | Path, size: int) -> None:
        with self._snapshot.getbuffer() as memory, memory[:size] as content:
            if not is_url(path):
                return self._write(path, lambda file: file.write(content))
            try:
                store, place = resolve_filesystem(path)
                store.pipe_file(place, bytes(content))
            except Exception as error:  # each store has its own
                raise CheckpointError(_why_not_written(path, error)) from error

    def _write(self, path: str | Path, dump: Callable[[IO[bytes]], object], keep: str | None = None) -> None:
        folder = Path(path).parent
        try:
            if folder not in self._used:
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), dump)
        except (OSError, RuntimeError) as error:  # torch gives a full disk as RuntimeError
            raise CheckpointError(_why_not_written(path, error)) from error
        self._used.add(folder)
        sharded.remove_stale(Path(path), keep)


def _leave_out_objects(found: dict[str, Any], path: str | Path) -> None:
    """Drop states of callbacks that hold objects of foreign classes, and report what else is not loaded."""
    states = found.get("callbacks") or {}
    left = {f"callbacks.{name}": list(find_placeholders(states[name], f"callbacks.{name}")) for name in states}
    found["callbacks"] = {name: state for name, state in states.items() if not left[f"callbacks.{name}"]}
    others = {key: value for key, value in found.items() if key not in HYPERPARAMETERS}
    lines = [*(line for some in left.values() for line in some[:1]), *find_placeholders(others)]
    if lines and is_rank_zero():
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        print(f"warning: {path}: {lines[0]}{more}, which is not loaded; save plain values there", file=sys.stderr)


def _find_moved(found: dict[str, Any], path: str | Path) -> None:
    """Where the folder of a checkpoint was moved, have ModelCheckpoint find those it keeps in their new place.

    Lightning's forgets all it knew of them when its ``dirpath`` is another one, and would keep a worse one as the best.
    """
    place = str(path).rpartition("/")[0] or "."
    here = place if is_url(path) else os.path.realpath(place)
    for name, state in found["callbacks"].items():
        if not isinstance(state, dict) or not isinstance(state.get("best_k_models"), dict):
            continue
        before, kept = f"{state.get('dirpath')}/", state["best_k_models"]
        paths = {key: old for key, old in state.items() if key.endswith("_model_path") and old}
        if before == f"{here}/" or not all(old.startswith(before) for old in (*kept, *paths.values())):
            continue
        new = {old: f"{here}/{old.removeprefix(before)}" for old in (*kept, *paths.values())}
        with store_errors(path):
            if not all(store.exists(at) for store, at in (resolve_filesystem(new[old]) for old in kept)):
                continue
        moved = {"dirpath": here, "best_k_models": {new[old]: score for old, score in kept.items()}}
        found["callbacks"][name] = {**state, **moved, **{key: new[old] for key, old in paths.items()}}


def _why_not_written(path: str | Path, error: Exception) -> str:
    if is_url(path):
        return f"{path}: not written ({error_text(error)}); the checkpoint before it is untouched; {remedy_for(path)}"
    folder = Path(path).parent
    there = next((p for p in folder.resolve().parents if p.is_dir()), Path("/")) if not folder.is_dir() else folder
    free = f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB are free there"
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        return f"{path}: not written: the folder has vanished, with the checkpoints in it; {free}"
    return f"{path}: not written ({error_text(error)}); {free}; the checkpoint before it is untouched"
