"""Storage of checkpoints: local files, written atomically, or objects at a URL."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar

from boltcutter.checkpoint import atomic
from boltcutter.config.errors import one_line

T = TypeVar("T")

RETRY_SECONDS = 300.0  # for which a failing storage is tried again before a checkpoint is given up

_copies: dict[str, IO[bytes]] = {}  # the local copy (a temporary file) of the object last read from a URL, by its key


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is one line with path, cause and remedy."""

    hide_traceback = True  # needs no traceback


def shard_folders(path: str | Path) -> list[str]:
    """The folders with shards of a checkpoint, one of them for each time that it was written."""
    store, place = resolve_filesystem(path)
    parent, _, name = place.rpartition("/")
    entries = store.ls(parent, detail=False) if store.isdir(parent) else []
    return [entry for entry in entries if entry.rstrip("/").rpartition("/")[2].startswith(f"{name}.shards-")]


def remove_shards(path: str | Path, keep: str | None = None) -> None:
    """Remove all folders with shards of a checkpoint except ``keep``."""
    store, _ = resolve_filesystem(path)
    for folder in shard_folders(path):
        if folder.rstrip("/").rpartition("/")[2] != keep:
            with suppress(FileNotFoundError):  # removed meanwhile
                store.rm(folder, recursive=True)


def check_writable(place: str | Path) -> None:
    """Check that checkpoints can be written, before hours are spent on the first.

    Raises:
        CheckpointError: A test file could not be written.
    """
    probe = f"{place}/{atomic.temporary_path(Path('probe')).name}"
    try:
        store, path = resolve_filesystem(probe)
        if not is_url(place):
            Path(place).mkdir(parents=True, exist_ok=True)
        store.pipe_file(path, b"probe")
        store.rm_file(path)
    except Exception as error:  # each storage raises its own exceptions
        text = f"checkpoints={place}: cannot be written ({error_text(error)}); {remedy_for(place)}"
        raise CheckpointError(text) from error


def is_url(path: str | Path) -> bool:
    """Whether a path has a protocol (``s3://``)."""
    return "://" in str(path)


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Whether a path or URL that was read from a file lies in a folder, after links and ``..`` are resolved.

    What a checkpoint, a record or an index names is compared here before it is read, written or removed.
    """
    text, home = (str(place).removeprefix("file://") for place in (path, folder))
    if is_url(home):
        name = text.removeprefix(f"{home.rstrip('/')}/")
        return name != text and "::" not in name and not {"", ".", ".."}.intersection(name.split("/"))
    if is_url(text) or "::" in text.removeprefix(home) or "\0" in text:  # fsspec opens what follows ::
        return False
    found, place = os.path.realpath(text), os.path.realpath(home)
    return found != place and os.path.commonpath([found, place]) == place


def resolve_filesystem(path: str | Path) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path within it."""
    import fsspec  # takes a tenth of a second, which most commands need not wait for

    store, place = fsspec.url_to_fs(str(path))
    if str(path).startswith("file:"):
        store.auto_mkdir = True  # as in an object storage, there is no folder to be created first
    store.invalidate_cache()  # another process or thread may have written
    return store, place


def repeat(place: str | Path, call: Callable[[], T]) -> T:
    """Return the result of a call that writes or reads ``place``; at a URL, it is repeated if it fails for a while."""
    end, delay = time.monotonic() + RETRY_SECONDS, 1.0
    while True:
        try:
            return call()
        except Exception as error:  # each storage raises its own
            is_final = any(isinstance(e, FileNotFoundError | PermissionError) for e in (error, error.__cause__))
            if is_final or not is_url(place) or time.monotonic() + delay > end:
                raise
            if delay == 1.0:
                text = f"warning: {place}: the storage fails ({error_text(error)}); trying for {RETRY_SECONDS:.0f} s"
                print(text, file=sys.stderr)
        time.sleep(delay)
        delay = min(2 * delay, 30.0)


@contextmanager
def open_file(path: str | Path, *, whole: bool = True) -> Iterator[IO[bytes] | None]:
    """Open a file for reading; None if it does not exist. One at a URL is downloaded, as a whole or as it is read."""
    store, place = resolve_filesystem(path)
    if not store.isfile(place):
        yield None
    elif is_url(path) and whole:
        yield _download(store, place)
    else:
        with store.open(place, "rb", block_size=2**20) as file:
            yield file


def _download(store: Any, place: str) -> IO[bytes]:
    """Download a file, unless the last download is still current: downloads are slow, and files are read repeatedly."""
    key = str(store.ukey(place))
    if key not in _copies:
        _copies.clear()  # deletes the previous copy first
        file = NamedTemporaryFile(suffix=".ckpt")  # noqa: SIM115 - kept open
        store.get_file(place, file.name)
        _copies[key] = file
    _copies[key].seek(0)
    return _copies[key]


@contextmanager
def store_errors(path: str | Path) -> Iterator[None]:
    """Convert the exceptions of a storage at a URL to a one-line ``CheckpointError``; each raises its own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not is_url(path):
            raise
        raise CheckpointError(f"{path}: cannot be reached ({error_text(error)}); {remedy_for(path)}") from error


def error_text(error: BaseException) -> str:
    """Format an error in one line; prefer the system error that caused an error of torch."""
    if isinstance(error.__context__, OSError):
        error = error.__context__
    return one_line(error) or type(error).__name__


def remedy_for(place: str | Path) -> str:
    """Return a remedy for checkpoints that cannot be written or reached."""
    if not is_url(place):
        return "free disk space, or set checkpoints=<another folder>"
    return "check that the storage exists and its credentials are set, or set checkpoints=<folder or URL>"
