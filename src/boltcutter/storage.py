"""Where checkpoints lie: local files, written in one step, or what is behind a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import fsspec

from boltcutter import atomic

_copy: tuple[str, IO[bytes]] | None = None  # of what was last read behind a URL: which it is, and a file that goes away


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; one line says which, why, and what to do."""

    hide_traceback = True  # needs no traceback


def check_writable(place: str | Path) -> None:
    """See that checkpoints can be written, before hours are spent on the first.

    Raises:
        CheckpointError: They cannot.
    """
    probe = f"{place}/{atomic.temporary_path(Path('probe')).name}"
    try:
        store, path = resolve_filesystem(probe)
        if not is_url(place):
            Path(place).mkdir(parents=True, exist_ok=True)
        store.pipe_file(path, b"can be written")
        store.rm_file(path)
    except Exception as error:  # each store has its own
        raise CheckpointError(
            f"checkpoints={place}: cannot be written ({error_text(error)}); {remedy_for(place)}"
        ) from error


def is_url(path: str | Path) -> bool:
    """Whether a path has a protocol (``s3://``)."""
    return "://" in str(path)


def resolve_filesystem(path: str | Path) -> tuple[Any, str]:
    """The file system that a path or URL is on, and the path there."""
    store, place = fsspec.url_to_fs(str(path))
    store.invalidate_cache()  # what another process, or another thread, has written
    return store, place


@contextmanager
def open_file(path: str | Path, *, whole: bool = True) -> Iterator[IO[bytes] | None]:
    """A file to read, or None; what is behind a URL is fetched at once, or only those parts that are asked for."""
    store, place = resolve_filesystem(path)
    if not store.isfile(place):
        yield None
    elif is_url(path) and whole:
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


@contextmanager
def store_errors(path: str | Path) -> Iterator[None]:
    """What a store behind a URL raises becomes one line; each has errors of its own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not is_url(path):
            raise
        raise CheckpointError(f"{path}: cannot be reached ({error_text(error)}); {remedy_for(path)}") from error


def write_atomically(path: Path, dump: Callable[[IO[bytes]], object]) -> None:
    """Write as ``atomic.write`` does, and remove what an earlier write left that was killed."""
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}."):  # by a process that was killed
            left.unlink()
    atomic.write(path, dump)


def error_text(error: BaseException) -> str:
    """An error in one line; of torch's, the system error behind it."""
    if isinstance(error.__context__, OSError):
        error = error.__context__  # what torch only follows up
    return " ".join(str(error).split()) or type(error).__name__


def remedy_for(place: str | Path) -> str:
    """What to do where checkpoints cannot be written or reached."""
    if not is_url(place):
        return "free some space, or say checkpoints=<another folder>"
    return "see that the store is there and that its variables (AWS_…) are set, or say checkpoints=<folder or URL>"
