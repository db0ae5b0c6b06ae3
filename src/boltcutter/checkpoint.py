"""Checkpoints that are whole or not there: written in one step, verified before they are read, never run as code."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import fsspec
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from boltcutter import sharded
from boltcutter.sharded import CheckpointError as CheckpointError

_copy: tuple[str, IO[bytes]] | None = None  # of what was last read behind a URL: which it is, and a file that goes away


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
        if not self.asynchronous and not _is_url(path):
            return self._write(path, lambda file: torch.save(checkpoint, file))
        self._snapshot.seek(0)
        torch.save(checkpoint, self._snapshot)
        return self._do(partial(self._write_snapshot, path, self._snapshot.tell()))

    def save_parts(self, checkpoint: dict[str, Any], path: str | Path, orders: dict[str, torch.Tensor]) -> None:
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
            self._write(path, lambda file: torch.save(index, file), keep=index["parts"]["folder"])

    def read_parts(self, path: str | Path, index: dict[str, Any], into: dict[str, torch.Tensor]) -> None:
        """Fill tensors by name with what a peek has found to be in parts; called on all ranks."""
        sharded.read(Path(path), index, into, alone=False)

    def size_of_parts(self, path: str | Path) -> int:
        """Bytes of a checkpoint beside those of the file itself."""
        return sharded.size(Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True, *, peek: bool = False
    ) -> dict[str, Any]:
        """Read a checkpoint of this project, or of Lightning; tensors and plain types alone; or ``peek`` as ``load``.

        Raises:
            CheckpointError: It is not there, not whole, or more than data.
        """
        self.wait()
        if peek and (fault := damage(path)):
            raise CheckpointError(f"{path}: {fault}; take another checkpoint")
        found = load(path, map_location, peek=peek)
        if "state_dict" not in found:
            raise CheckpointError(
                f"{path}: holds weights but no training to go on with; load them with init_from={path}"
            )
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file, if it is there; never before the one that replaces it is written."""
        earlier = list(self._pending)

        def remove() -> None:
            if all(job.exception() is None for job in earlier):
                with _told(path):
                    store, place = _store(path)
                    if store.exists(place):
                        store.rm(place, recursive=True)
                    sharded.sweep(Path(path))

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
            if not _is_url(path):
                return self._write(path, lambda file: file.write(content))
            try:
                store, place = _store(path)
                store.pipe_file(place, bytes(content))
            except Exception as error:  # each store has its own
                raise CheckpointError(_why_not_written(path, error)) from error

    def _write(self, path: str | Path, dump: Callable[[IO[bytes]], object], keep: str | None = None) -> None:
        folder = Path(path).parent
        try:
            if folder not in self._used:
                folder.mkdir(parents=True, exist_ok=True)
            _write_atomically(Path(path), dump)
        except (OSError, RuntimeError) as error:  # torch gives a full disk as RuntimeError
            raise CheckpointError(_why_not_written(path, error)) from error
        self._used.add(folder)
        sharded.sweep(Path(path), keep)


def load(path: str | Path, map_location: Any = "cpu", *, peek: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain types, after checking that it is whole.

    Args:
        path: Of the file; a URL as well.
        map_location: Where tensors go, as for ``torch.load``.
        peek: Known to be whole: tensors of a local file are read when they are used, and those in parts not at all.

    Raises:
        CheckpointError: It is not there, not whole, or more than data.
    """
    with _told(path), _opened(path) as file:
        fault = None if peek and file else _fault(file)
        if fault or file is None:
            raise CheckpointError(f"{path}: {fault}; take another checkpoint")
        lazily = peek and not _is_url(path)
        found = _unpickled(path, str(path) if lazily else file, map_location=map_location, mmap=lazily)
        return found if peek else sharded.whole(Path(path), found)


def outline(path: str | Path) -> dict[str, Any]:
    """Names, shapes and plain values of a checkpoint; of tensors nothing is read. Raises as ``load`` does."""
    with _told(path), _opened(path, whole=False) as file:
        if file is None:
            raise CheckpointError(f"{path}: no such file; take another checkpoint")
        return _unpickled(path, file, map_location="meta")


def damage(path: str | Path) -> str | None:
    """What is wrong with a file, and its parts, by size, form and checksums; None if nothing is."""
    with _told(path), _opened(path) as file:
        fault = _fault(file)
    if fault or _is_url(path):
        return fault
    with suppress(CheckpointError):  # whole, whatever it is
        fault = sharded.fault(Path(path), outline(path))
    return fault


def newest(place: str | Path, say: Callable[[str], None] = print) -> str | None:
    """The whole checkpoint named ``last…`` that has come furthest; a damaged one is passed over, and told.

    Args:
        place: A folder, or a URL.
        say: Told of each damaged file.

    Raises:
        CheckpointError: The store behind the URL cannot be reached.
    """
    # By steps, since a store's clock may tell only seconds. What cannot be read is shown first, to be passed over.
    return _first_whole(_files(place, "last*.ckpt"), lambda found: found.get("global_step", 0), say)


def best(place: str | Path, say: Callable[[str], None] = print) -> str | None:
    """The whole checkpoint named ``best…`` with the best score; without one the newest. As ``newest`` otherwise."""

    def score(found: Mapping[str, Any]) -> float:
        known = found.get("best", {"mode": "max", "score": -math.inf})
        return float(known["score"] if known["mode"] == "max" else -known["score"])

    return _first_whole(_files(place, "best*.ckpt"), score, say) or newest(place, say)


def names(place: str | Path) -> list[str]:
    """Of all checkpoints there."""
    return sorted(path.rpartition("/")[2] for path in _files(place, "*.ckpt"))


def check_place(place: str | Path) -> None:
    """See that checkpoints can be written, before hours are spent on the first.

    Raises:
        CheckpointError: They cannot.
    """
    probe = f"{place}/.probe-{os.getpid()}"
    try:
        store, path = _store(probe)
        if not _is_url(place):
            Path(place).mkdir(parents=True, exist_ok=True)
        store.pipe_file(path, b"can be written")
        store.rm_file(path)
    except Exception as error:  # each store has its own
        raise CheckpointError(f"checkpoints={place}: cannot be written ({_text(error)}); {_remedy(place)}") from error


def _is_url(path: str | Path) -> bool:
    return "://" in str(path)


def _store(path: str | Path) -> tuple[Any, str]:
    store, place = fsspec.url_to_fs(str(path))
    store.invalidate_cache()  # what another process, or another thread, has written
    return store, place


@contextmanager
def _opened(path: str | Path, *, whole: bool = True) -> Iterator[IO[bytes] | None]:
    """A file to read, or None; what is behind a URL is fetched at once, or only those parts that are asked for."""
    store, place = _store(path)
    if not store.isfile(place):
        yield None
    elif _is_url(path) and whole:
        yield _fetched(store, place)
    else:
        with store.open(place, "rb", block_size=2**20) as file:
            yield file


def _fetched(store: Any, place: str) -> IO[bytes]:
    """A copy on this machine, made once as long as the store has the same: it may be far, and is read several times."""
    global _copy
    key = str(store.ukey(place))
    if _copy is None or _copy[0] != key:
        _copy = None  # gives its room back first
        file = NamedTemporaryFile(suffix=".ckpt")  # noqa: SIM115 - kept
        store.get_file(place, file.name)
        _copy = key, file
    _copy[1].seek(0)
    return _copy[1]


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


def _files(place: str | Path, pattern: str) -> list[str]:
    """Paths or URLs, the last written first."""
    with _told(place):
        store, folder = _store(place)
        found = sorted(store.glob(f"{folder}/{pattern}"), key=store.modified, reverse=True)
        return [str(store.unstrip_protocol(file)) if _is_url(place) else str(file) for file in found]


def _first_whole(
    paths: list[str], merit: Callable[[Mapping[str, Any]], float], say: Callable[[str], None]
) -> str | None:
    def known(path: str) -> float:
        try:
            return merit(outline(path))
        except CheckpointError:
            return math.inf

    for path in sorted(paths, key=known, reverse=True) if len(paths) > 1 else paths:
        fault = damage(path)
        if fault is None:
            return path
        say(f"warning: {path}: {fault}; taking another")
    return None


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """What a store behind a URL raises becomes one line; each has errors of its own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not _is_url(path):
            raise
        raise CheckpointError(f"{path}: cannot be reached ({_text(error)}); {_remedy(path)}") from error


def _write_atomically(path: Path, dump: Callable[[IO[bytes]], object]) -> None:
    for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed
        left.unlink()
    # In the same folder: a rename from another disk would be a copy, which a kill can cut short.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            dump(file)
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
    if _is_url(path):
        return f"{path}: not written ({_text(error)}); the checkpoint before it is untouched; {_remedy(path)}"
    folder = Path(path).parent
    there = next((p for p in folder.resolve().parents if p.is_dir()), Path("/")) if not folder.is_dir() else folder
    free = f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB are free there"
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        return f"{path}: not written: the folder has vanished, with the checkpoints in it; {free}"
    return f"{path}: not written ({_text(error)}); {free}; the checkpoint before it is untouched"


def _text(error: BaseException) -> str:
    if isinstance(error.__context__, OSError):
        error = error.__context__  # what torch only follows up
    return " ".join(str(error).split()) or type(error).__name__


def _remedy(place: str | Path) -> str:
    if not _is_url(place):
        return "free some space, or say checkpoints=<another folder>"
    return "see that the store is there and that its variables (AWS_…) are set, or say checkpoints=<folder or URL>"
