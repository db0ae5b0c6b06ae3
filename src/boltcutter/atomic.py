"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO


def temporary_path(path: Path) -> Path:
    """A name beside ``path`` that no other process chooses; numbers of processes repeat in other containers."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def write_text(path: Path, text: str) -> None:
    """Write text, as ``write`` does."""
    write(path, lambda file: file.write(text.encode()))


def write(path: Path, dump: Callable[[IO[bytes]], object]) -> None:
    """Write beside the file, flush it to the disk, and then give it its name."""
    # In the same folder: a rename from another disk would be a copy, which a kill can cut short.
    draft = temporary_path(path)
    try:
        with open(draft, "wb") as file:
            dump(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder, where its file system can; some refuse it, and lose nothing else."""
    with suppress(OSError):
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
