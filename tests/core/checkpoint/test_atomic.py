import errno
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from boltcutter.checkpoint.atomic import fsync_folder, temporary_path, write, write_text


def test_temporary_paths_are_unique(tmp_path: Path) -> None:
    assert temporary_path(tmp_path / "a") != temporary_path(tmp_path / "a")


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "before")

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="refused"):
        write_text(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_and_then_its_entry_in_the_folder_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flush, flushed = tmp_path / "a", os.fsync, []

    def record(file: int) -> None:
        flush(file)
        content = path.read_text() if path.exists() else None
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        flushed.append((is_folder or os.fstat(file).st_size, content))

    monkeypatch.setattr(os, "fsync", record)
    opened = len(os.listdir("/proc/self/fd"))
    for text, before in (("one", None), ("three", "one")):
        write_text(path, text)
        assert flushed == [(len(text), before), (True, text)]  # all of it, before it replaces the file
        flushed.clear()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_file_is_verified_before_it_replaces_another(tmp_path: Path) -> None:
    path, read = tmp_path / "a", list[bytes]()

    def refuse(file: IO[bytes]) -> None:
        read.append(file.read())
        raise ValueError("damaged")

    write(path, lambda file: file.write(b"first"), refuse)
    assert (path.read_bytes(), read) == (b"first", [])  # nothing to replace
    with pytest.raises(ValueError, match="damaged"):
        write(path, lambda file: file.write(b"second"), refuse)
    assert (path.read_bytes(), read) == (b"first", [b"second"])
    write(path, lambda file: file.write(b"third"), lambda file: read.append(file.read()))
    assert (path.read_bytes(), read[1:]) == (b"third", [b"third"])
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_cannot_flush_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, flushed = os.fsync, []

    def refuse_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not for folders")
        flush(file)
        flushed.append(file)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    fsync_folder(tmp_path)
    fsync_folder(tmp_path / "missing")
    write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    assert len(flushed) == 1
