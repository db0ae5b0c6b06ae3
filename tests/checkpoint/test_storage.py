from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from conftest import STATE

from boltcutter.checkpoint import storage
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_newest
from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.checkpoint.storage import (
    is_within,
    open_file,
    remove_shards,
    repeat,
    shard_folders,
)


def test_a_file_at_a_url_is_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, url, fetched = AtomicCheckpointIO(), "memory://far/run/last.ckpt", list[str]()
    kind = fsspec.get_filesystem_class("memory")
    plain = kind.get_file
    monkeypatch.setattr(kind, "get_file", lambda fs, place, *a, **o: fetched.append(place) or plain(fs, place, *a, **o))
    store.save_checkpoint(STATE, url)
    found = str(find_newest("memory://far/run"))
    assert load_checkpoint(found, lazy=True)["epoch"] == store.load_checkpoint(found)["epoch"] == 3
    assert len(fetched) == 1
    store.save_checkpoint(STATE | {"epoch": 4}, url)
    assert store.load_checkpoint(url)["epoch"] == 4
    assert len(fetched) == 2
    store.remove_checkpoint(url)


@pytest.mark.parametrize("place", ["", "memory://shards"])
def test_only_the_shards_of_a_checkpoint_are_removed(tmp_path: Path, place: str) -> None:
    place = place or str(tmp_path)
    files, root = fsspec.url_to_fs(place)
    names = ("last.ckpt.shards-1", "last.ckpt.shards-2", "other.ckpt.shards-1")
    for name in names:
        files.makedirs(f"{root}/{name}/deep")
        files.pipe_file(f"{root}/{name}/deep/part", b"x")

    def left() -> list[str]:
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in files.ls(root, detail=False))

    path = f"{place}/last.ckpt"
    assert sorted(folder.rstrip("/").rpartition("/")[2] for folder in shard_folders(path)) == [*names[:2]]
    remove_shards(path, keep=names[1])
    assert left() == [*names[1:]]
    remove_shards(path)
    assert left() == [names[2]]
    assert shard_folders(f"{place}/missing/last.ckpt") == []


def test_folders_of_a_file_url_are_created(tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(STATE, f"file://{tmp_path}/new/last.ckpt")
    assert (tmp_path / "new" / "last.ckpt").is_file()


def test_listings_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFileSystem.invalidate_cache", lambda self: calls.append(self)
    )
    shard_folders("memory://listed/last.ckpt")
    assert calls


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def test_a_storage_that_fails_for_a_while_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, fails = Clock(), 0
    monkeypatch.setattr(storage, "time", clock)

    def call() -> str:
        if len(clock.slept) < fails:
            raise OSError("busy")
        return "done"

    warning = "warning: s3://bucket: the storage fails (busy); trying for 300 s\n"
    for fails in (1, 3):
        clock.slept = []
        assert repeat("s3://bucket", call) == "done"
        assert clock.slept == [1, 2, 4][:fails]
        assert capsys.readouterr() == ("", warning)
    fails = 1000
    clock.now, clock.slept = 0.0, []
    with pytest.raises(OSError, match="busy"):
        repeat("s3://bucket", call)
    assert clock.slept[:6] == [1, 2, 4, 8, 16, 30]
    assert 270 < sum(clock.slept) <= 300
    assert capsys.readouterr().err == warning
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = FileNotFoundError("gone")
    for place, error in (
        ("/tmp/local", OSError("busy")),
        ("s3://bucket", PermissionError("denied")),
        ("s3://bucket", wrapped),
    ):
        clock.slept = []

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)):
            repeat(place, fail)
        assert clock.slept == []


def test_a_file_at_a_url_is_read_in_parts_or_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://parts/file"
    fsspec.filesystem("memory").pipe_file("/parts/file", b"content")
    for _ in range(2):
        with open_file(url) as file:
            assert file is not None
            assert file.read() == b"content"
    monkeypatch.setattr(storage, "_download", lambda *unused: SimpleNamespace(read=lambda: b"downloaded"))
    with open_file(url, whole=False) as file:
        assert file is not None
        assert file.read(3) == b"con"
    with open_file("memory://parts/missing") as file:
        assert file is None


def test_a_local_file_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(storage, "_download", None)
    with open_file(tmp_path / "file") as file:
        assert file is not None
        assert file.read() == b"content"


def test_what_a_file_names_lies_in_its_folder_or_not(tmp_path: Path) -> None:
    home = tmp_path / "run"
    (home / "inner").mkdir(parents=True)
    (home / "out").symlink_to(tmp_path)
    (tmp_path / "moved").symlink_to(home)
    for name in ("a.ckpt", "inner/a.ckpt", "inner/../a.ckpt", "loss=1.0:.ckpt"):
        assert is_within(f"{home}/{name}", home), name
    assert is_within(tmp_path / "moved" / "a.ckpt", home)
    assert is_within(f"{home}/a.ckpt", f"file://{home}")
    others = [
        "",
        "/",
        str(home),
        f"{home}/",
        f"{home}/..",
        f"{home}/../x",
        f"{home}/out/x",
        f"{home}er/x",
        "~/x",
        "a\0b",
    ]
    for path in (*others, f"{home}/x::memory", f"{home}/x::s3://b/k", "s3://b/k", f"http://{home}/x"):
        assert not is_within(path, home), path
    assert is_within("s3://b/run/a.ckpt", "s3://b/run/")
    for path in (
        "s3://b/run",
        "s3://b/run/../x",
        "s3://b/runs/x",
        "s3://b/run//x",
        "http://b/run/x",
        "s3://b/run/x::gs://y",
    ):
        assert not is_within(path, "s3://b/run"), path
