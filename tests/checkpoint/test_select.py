import os
from pathlib import Path

import pytest
import torch
from conftest import STATE, Script, flip_a_bit

from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.checkpoint.select import find_best, find_newest, list_folders, list_names


def test_newest_is_by_step_and_damaged_files_are_skipped(saved: Path) -> None:
    older, newer = saved, saved.with_name("last-preempted.ckpt")
    for path, step in ((newer, 20), (older, 10)):
        torch.save(STATE | {"global_step": step}, path)
        os.utime(path, (1, 1))  # the clock of a store may have a resolution of seconds
    warnings: list[str] = []
    assert find_newest(saved.parent, warnings.append) == str(newer)
    newer.write_bytes(newer.read_bytes()[:-50])
    assert find_newest(saved.parent, warnings.append) == str(older)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: {newer}: ")


def test_the_best_is_used_if_the_last_is_damaged(saved: Path) -> None:
    best = saved.with_name("best.ckpt")
    torch.save(STATE, best)
    warnings: list[str] = []
    assert find_newest(saved.parent, warnings.append) == str(saved)
    assert not warnings
    flip_a_bit(saved)
    assert find_newest(saved.parent, warnings.append) == str(best)
    assert len(warnings) == 2
    assert warnings[1] == f"warning: {saved.parent} has no valid last checkpoint; using {best}"
    flip_a_bit(best)
    assert find_newest(saved.parent, lambda text: None) is None


@pytest.mark.parametrize(("mode", "order"), [("min", [1, 2, 3]), ("max", [3, 2, 1])])
def test_damaged_best_checkpoints_are_skipped(saved: Path, mode: str, order: list[int]) -> None:
    for score in (2, 1, 3):
        state = STATE | {"best": {"monitor": "m", "mode": mode, "score": float(score)}}
        torch.save(state, saved.with_name(f"best-{score}.ckpt"))
    warnings: list[str] = []
    for count, score in enumerate(order):
        path = saved.with_name(f"best-{score}.ckpt")
        assert find_best(saved.parent, warnings.append) == str(path)
        assert len(warnings) == sum(range(count + 1))
        flip_a_bit(path)
    assert find_best(saved.parent, warnings.append) == str(saved)


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "[!a]", "a b {c}"])
def test_folder_names_are_not_patterns(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path / name, tmp_path / "a1", tmp_path / "ab"):
        AtomicCheckpointIO().save_checkpoint(STATE, folder / "last.ckpt")
        AtomicCheckpointIO().save_checkpoint(STATE, folder / "best-v[1].ckpt")
    folder = tmp_path / name
    assert find_newest(folder) == str(folder / "last.ckpt")
    assert find_best(folder) == str(folder / "best-v[1].ckpt")
    assert list_names(folder) == ["best-v[1].ckpt", "last.ckpt"]
    store = AtomicCheckpointIO()
    store.save_checkpoint(STATE, folder / "best-v[1].ckpt")
    store.remove_checkpoint(folder / "best-v[1].ckpt")
    assert list_names(folder) == ["last.ckpt"]
    assert list_names(tmp_path / "a1") == ["best-v[1].ckpt", "last.ckpt"]


def test_a_folder_that_is_missing_has_none(tmp_path: Path) -> None:
    assert list_names(tmp_path / 'it\'s "new" \\' / "checkpoints") == []


@pytest.mark.parametrize("left", [b"", b"PK", b"hello"])
def test_a_file_damaged_by_a_crash_is_skipped(saved: Path, left: bytes) -> None:
    saved.with_name("last-v1.ckpt").write_bytes(left)
    warnings: list[str] = []
    assert find_newest(saved.parent, warnings.append) == str(saved)
    assert warnings[0].startswith(f"warning: {saved.with_name('last-v1.ckpt')}: ")


def test_a_run_with_checkpoints_of_deepspeed_is_not_started_over(script: Script, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last.ckpt" / "checkpoint").mkdir(parents=True)
    assert list_folders(tmp_path / "checkpoints") == [str(tmp_path / "checkpoints" / "last.ckpt")]
    done = script("train", "logger=null", f"folder={tmp_path}")
    assert done.returncode == 2
    assert "last.ckpt" in done.stderr
    assert "init_from=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    torch.save(STATE, tmp_path / "checkpoints" / "best.ckpt")
    assert list_folders(tmp_path / "checkpoints") == [str(tmp_path / "checkpoints" / "last.ckpt")]
