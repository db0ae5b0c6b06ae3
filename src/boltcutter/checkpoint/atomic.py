"""Atomic writes: a file is either complete or absent, even after a power failure."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from boltcutter import files


def temporary_path(path: Path) -> Path:
    """Return a unique path in the folder of ``path``; the process id alone may repeat in another container."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_atomically(
    path: Path, dump: Callable[[IO[bytes]], object], verify: Callable[[IO[bytes]], object] | None = None
) -> None:
    """Write a file atomically: to a temporary file, which is flushed to disk and then renamed.

    Args:
        path: Path of the file.
        dump: Writes the contents to a file that is open for reading and writing.
        verify: Reads the contents before they replace an existing file, and raises an error if they are damaged.
    """
    # In the same folder: moving a file between file systems copies it, which is not atomic. The folder is held open, so
    # that nobody who may change a folder above can lead the file elsewhere.
    place = files.open_parent(path)
    temporary = temporary_path(path).name
    try:
        with open(temporary, "w+b", opener=partial(os.open, mode=0o666, dir_fd=place)) as file:
            dump(file)
            file.flush()
            os.fsync(file.fileno())
        if verify and _exists(path.name, place):
            with open(temporary, "rb", opener=partial(os.open, dir_fd=place)) as file:
                verify(file)
        os.replace(temporary, path.name, src_dir_fd=place, dst_dir_fd=place)
        with suppress(OSError):  # file systems that do not support it
            os.fsync(place)
    except OSError as error:
        if error.filename != temporary:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the name in an unnamed folder
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=place)
        os.close(place)


def _exists(name: str, place: int) -> bool:
    try:
        os.stat(name, dir_fd=place)
    except FileNotFoundError:
        return False
    return True


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk; ignored by file systems that do not support it."""
    with suppress(OSError):
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
