import errno
import os
import secrets
import stat
from pathlib import Path
from typing import IO

import pytest

from boltcutter.checkpoint.atomic import fsync_folder, temporary_path, write_atomically, write_text


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

    write_atomically(path, lambda file: file.write(b"first"), refuse)
    assert (path.read_bytes(), read) == (b"first", [])  # nothing to replace
    with pytest.raises(ValueError, match="damaged"):
        write_atomically(path, lambda file: file.write(b"second"), refuse)
    assert (path.read_bytes(), read) == (b"first", [b"second"])
    write_atomically(path, lambda file: file.write(b"third"), lambda file: read.append(file.read()))
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


@pytest.mark.parametrize("when", ["before the file is opened", "while it is written"])
def test_a_folder_that_is_exchanged_meanwhile_does_not_lead_the_file_elsewhere(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by somebody who waits for the check of a run folder of theirs, and then changes it."""
    folder, elsewhere = tmp_path / "run" / "evaluation", tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")

    def exchange(_: object) -> str:
        if not folder.is_symlink():
            folder.rename(tmp_path / "run" / "before")
            folder.symlink_to(elsewhere)
        return "1"

    if when == "while it is written":
        write_atomically(folder / "metrics.json", exchange)
    else:
        monkeypatch.setattr(secrets, "token_hex", exchange)
        write_text(folder / "metrics.json", "text")
    assert not list(elsewhere.iterdir())
    assert [path.name for path in (tmp_path / "run" / "before").iterdir()] == ["metrics.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a link of another user")
def test_no_link_of_another_user_in_the_folder_of_a_run_is_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "evaluation").mkdir(parents=True)
    elsewhere.mkdir()
    (run / "record.json").write_text("{}")
    (run / "evaluation" / "test").symlink_to(elsewhere)
    write_text(run / "evaluation" / "test" / "metrics.json", "by a link of this user")
    os.lchown(run / "evaluation" / "test", 54321, 54321)
    with pytest.raises(OSError, match="link of another user"):
        write_text(run / "evaluation" / "test" / "metrics.json", "text")
    assert (elsewhere / "metrics.json").read_text() == "by a link of this user"
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="link of another user"):
        write_text(run / "evaluation" / "test" / "metrics.json", "text")
    assert len(os.listdir("/proc/self/fd")) == opened
