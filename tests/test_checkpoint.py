import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.checkpoint import AtomicCheckpointIO, CheckpointError, damage, newest

STATE = {"state_dict": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}, "epoch": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "deep" / "last.ckpt")
    return tmp_path / "deep" / "last.ckpt"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def test_what_is_saved_is_read(saved: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(saved)
    assert found["epoch"] == 3
    assert torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]
    assert [path.name for path in saved.parent.iterdir()] == ["last.ckpt"]  # no draft is left


def test_stores_behind_a_url_are_the_same() -> None:
    store, url = AtomicCheckpointIO(), "memory://bucket/run/last.ckpt"
    store.save_checkpoint(STATE, url)
    assert store.load_checkpoint(url)["epoch"] == 3
    assert store.load_checkpoint(str(newest("memory://bucket/run")))["epoch"] == 3
    store.remove_checkpoint(url)
    assert newest("memory://bucket/run") is None


def test_a_kill_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    code = """
import sys, torch
from boltcutter.checkpoint import AtomicCheckpointIO
while True:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.randn(1_000_000)}}, sys.argv[1])
    print("saved", flush=True)
"""
    path = tmp_path / "last.ckpt"
    for delay in (0.0, 0.005, 0.011, 0.017, 0.023):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        assert damage(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True, timeout=20)
    try:
        AtomicCheckpointIO().save_checkpoint(STATE, disk / "last.ckpt")
        with pytest.raises(
            CheckpointError, match=r"not written .* MiB are free there; the checkpoint before it is untouched"
        ):
            AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(10**6)}}, disk / "last.ckpt")
        assert AtomicCheckpointIO().load_checkpoint(disk / "last.ckpt")["epoch"] == 3
        assert [path.name for path in disk.iterdir()] == ["last.ckpt"]
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=20)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"last\.ckpt: not written"):
        AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "file" / "last.ckpt")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(STATE["state_dict"]["weight"].numpy().tobytes()) + 5] ^= 1  # type: ignore[index]
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("hello"), "not a checkpoint, or cut short (5 bytes)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a checkpoint, or cut short"),
        (flipped, "damaged at its record"),
        (lambda path: torch.save({"state_dict": Evil()}, path), "holds more than tensors and plain types"),
        (lambda path: path.write_bytes(pickle.dumps(Evil())), "not a checkpoint"),
        (lambda path: torch.save([1, 2], path), "holds a list, not a checkpoint"),
        (lambda path: torch.save({"weight": torch.ones(1)}, path), "load them with init_from="),
    ],
    ids=["gone", "empty", "text", "truncated", "flipped", "malicious", "pickle", "list", "bare"],
)
def test_a_bad_file_is_told_in_one_line(saved: Path, spoil: Any, message: str) -> None:
    spoil(saved)
    with pytest.raises(CheckpointError) as error:
        AtomicCheckpointIO().load_checkpoint(saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("/tmp/never").exists()


def test_a_damaged_newest_gives_way_to_the_one_before(saved: Path) -> None:
    newer = saved.with_name("last-preempted.ckpt")
    torch.save(STATE, newer)
    os.utime(saved, (1, 1))
    told: list[str] = []
    assert newest(saved.parent, told.append) == str(newer)
    newer.write_bytes(newer.read_bytes()[:-50])
    assert newest(saved.parent, told.append) == str(saved)
    assert len(told) == 1
    assert "cut short" in told[0]
