import errno
import os
import stat
from pathlib import Path

import pytest

from boltcutter.checkpoint.atomic import fsync_folder, temporary_path, write_text


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
