import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import QUICK, STATE, Script, environment
from forkserver import Forked, ForkServer

from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.checkpoint.load import find_damage
from boltcutter.checkpoint.select import find_best, find_newest
from boltcutter.checkpoint.storage import CheckpointError, check_writable


def test_a_saved_checkpoint_is_loaded(saved: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(saved)
    assert found["epoch"] == 3
    assert torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]
    assert [path.name for path in saved.parent.iterdir()] == ["last.ckpt"]  # no draft is left


def test_checkpoints_at_a_url() -> None:
    store, url = AtomicCheckpointIO(), "memory://bucket/run/last.ckpt"
    store.save_checkpoint(STATE, url)
    assert store.load_checkpoint(url)["epoch"] == 3
    assert store.load_checkpoint(str(find_newest("memory://bucket/run")))["epoch"] == 3
    store.remove_checkpoint(url)
    assert find_newest("memory://bucket/run") is None


SAVING = """
import sys, torch
from boltcutter.checkpoint.io import AtomicCheckpointIO
store, folder = AtomicCheckpointIO(asynchronous=sys.argv[1] == "True"), sys.argv[2]
for step in range(10**6):
    store.save_checkpoint({"state_dict": {"w": torch.randn(1_000_000)}}, f"{folder}/last-{step}.ckpt")
    store.remove_checkpoint(f"{folder}/last-{step - 1}.ckpt")
    if step == 1:
        print("saved", flush=True)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_while_writing_keeps_the_previous_file(forks: ForkServer, tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    for delay in (0.0, 0.005, 0.011, 0.017, 0.023, 0.031):
        out, to_out = os.pipe()
        argv = [str(tmp_path / "saving.py"), str(asynchronous), str(tmp_path)]
        with open(out) as stdout, forks.start(argv, environment(), to_out, 2) as process:
            os.close(to_out)
            assert stdout.readline() == "saved\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        left = list(tmp_path.glob("last-*.ckpt"))
        assert left
        assert [find_damage(path) for path in left] == [None] * len(left)
        for path in left:
            path.unlink()


def test_temporary_files_of_killed_processes_are_removed(saved: Path) -> None:
    saved.with_name(".last.ckpt.1").write_text("half")
    AtomicCheckpointIO().save_checkpoint(STATE, saved)
    assert [path.name for path in saved.parent.iterdir()] == ["last.ckpt"]


def test_asynchronous_saves_are_snapshots_in_order(tmp_path: Path) -> None:
    store, state = AtomicCheckpointIO(asynchronous=True), {"w": torch.zeros(10**6)}
    for step in range(3):
        state["w"].fill_(step)
        store.save_checkpoint({"state_dict": state, "global_step": step}, tmp_path / f"{step}.ckpt")
        state["w"].fill_(-1.0)
    store.remove_checkpoint(tmp_path / "0.ckpt")
    assert store.load_checkpoint(tmp_path / "2.ckpt")["state_dict"]["w"].unique().tolist() == [2.0]
    store.teardown()
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["1.ckpt", "2.ckpt"]
    plain = AtomicCheckpointIO()
    plain.save_checkpoint({"state_dict": {"w": torch.full((10**6,), 2.0)}, "global_step": 2}, tmp_path / "plain.ckpt")
    found, other = (torch.load(tmp_path / name, weights_only=True) for name in ("2.ckpt", "plain.ckpt"))
    assert torch.equal(found["state_dict"]["w"], other["state_dict"]["w"])


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_reported_and_keeps_the_previous_file(tmp_path: Path, asynchronous: bool) -> None:
    store = AtomicCheckpointIO(asynchronous=asynchronous)

    def save_too_much() -> None:
        store.save_checkpoint({"state_dict": {"w": torch.zeros(10**6)}}, disk / "new.ckpt")
        store.remove_checkpoint(disk / "last.ckpt")  # not, since nothing has replaced it
        store.wait()

    with small_disk(tmp_path / "disk") as disk:
        store.save_checkpoint(STATE, disk / "last.ckpt")
        with pytest.raises(CheckpointError, match=r" MiB are free; "):
            save_too_much()
        assert store.load_checkpoint(disk / "last.ckpt")["epoch"] == 3
        assert [path.name for path in disk.iterdir()] == ["last.ckpt"]


def test_a_folder_without_write_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"last\.ckpt: not written"):
        AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "file" / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"^checkpoints=.*: cannot be written .*; .* or set checkpoints="):
        check_writable(tmp_path / "file" / "checkpoints")
    check_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_removed_folder_is_reported(saved: Path) -> None:
    store = AtomicCheckpointIO()
    store.save_checkpoint(STATE, saved)
    shutil.rmtree(saved.parent)
    with pytest.raises(CheckpointError, match=r" removed.* MiB are free"):
        store.save_checkpoint(STATE, saved)


def test_an_error_of_an_asynchronous_write_is_raised_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    store = AtomicCheckpointIO(asynchronous=True)
    store.save_checkpoint(STATE, tmp_path / "file" / "last.ckpt")
    with pytest.raises(CheckpointError, match="not written"):
        store.save_checkpoint(STATE, tmp_path / "last.ckpt")
    store.save_checkpoint(STATE, tmp_path / "file" / "last.ckpt")
    with pytest.raises(CheckpointError, match="not written"):
        store.teardown()
    store.save_checkpoint(STATE, tmp_path / "file" / "last.ckpt")
    with pytest.raises(ValueError, match="of the training"):  # which is what ended it
        end_training(store)
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/file/last.ckpt: not written")


def end_training(store: AtomicCheckpointIO) -> None:
    try:
        raise ValueError("of the training")
    except ValueError:
        store.teardown()
        raise


def test_a_run_with_checkpoints_at_a_url_resumes_after_a_kill(
    forks: ForkServer, script: Script, bucket: str, tmp_path: Path
) -> None:
    folder, place = tmp_path / "run", bucket
    store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    overrides = [*QUICK, "model=mlp", "trainer.max_epochs=4", "callback.best.save_top_k=2", f"folder={folder}"]
    overrides += [f"checkpoints={place}", "checkpoint_io.asynchronous=true"]
    with forks.start(["scripts/train.py", *overrides], environment(), 2, 2) as process:
        wait_for(process, lambda: store.exists(f"{place}/last.ckpt"))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    resumed = script("train", f"resume={folder}")
    assert resumed.returncode == 0, resumed.stderr
    left = {path.rpartition("/")[2] for path in store.ls(place)}
    assert "last.ckpt" in left
    assert len(left) == 3
    for protocol in ("s3:", "s3a:"):
        assert find_newest(place.replace("s3:", protocol)) == f"{place}/last.ckpt".replace("s3:", protocol)
    assert f"best           {find_best(place)}" in resumed.stdout
    assert script("evaluate", f"run={folder}").returncode == 0
    again = script("train", *overrides[:-2], f"checkpoints={place}", f"folder={tmp_path}/other")
    assert again.returncode == 2
    assert again.stderr.startswith(f"error: checkpoints={place} holds a run; use resume=<its folder> ")
    assert again.stderr.count("\n") == 1


def test_a_run_resumes_in_a_moved_folder_and_never_overwrites_its_checkpoints(script: Script, tmp_path: Path) -> None:
    overrides = [*QUICK, "model=linear", "test=false", "callback.best.save_top_k=2"]
    folder = tmp_path / "run[1] *?"
    done = script("train", *overrides, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    folder = folder.rename(tmp_path / "moved[2]")
    resumed = script("train", f"resume={folder}", "trainer.max_epochs=4")
    assert resumed.returncode == 0, resumed.stderr
    assert "dirpath" not in resumed.stderr
    record = json.loads((folder / "record.json").read_text())
    assert record["attempts"][-1]["resumed_from"] == f"{folder}/checkpoints/last.ckpt"
    assert not (tmp_path / "run[1] *?").exists()
    kept = {str(path) for path in (folder / "checkpoints").iterdir()}
    states = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    (state,) = (state for name, state in states.items() if name.startswith("Best"))
    assert len(state["best_k_models"]) == 2
    assert kept == state["best_k_models"].keys() | {f"{folder}/checkpoints/last.ckpt"}
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"")
    for again in ([f"resume={folder}"], [*overrides, f"folder={folder}"]):
        refused = script("train", *again)
        assert refused.returncode == 2
        assert "has saved checkpoints" in refused.stderr
        assert f"use reproduce={folder}" in refused.stderr
        assert (folder / "checkpoints" / "last.ckpt").read_bytes() == b""


def wait_for(process: Forked, condition: Any) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def test_missing_storage_is_reported_in_one_line(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where nobody is known either
    for place, why in (("s3://other/run", "bucket does not exist"), ("s4://bucket", "Protocol not known: s4")):
        for call in (check_writable, find_newest, find_best):
            with pytest.raises(
                CheckpointError, match=rf"{place}.*: cannot be .*{why}\); check that the storage exists"
            ):
                call(place)
        with pytest.raises(CheckpointError, match=rf"{place}/last\.ckpt: not written .*{why}"):
            AtomicCheckpointIO().save_checkpoint(STATE, f"{place}/last.ckpt")
    assert find_newest("s3://bucket/nothing") is None
    with pytest.raises(CheckpointError, match="no such file"):
        AtomicCheckpointIO().load_checkpoint("s3://bucket/nothing/last.ckpt")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="credentials"):
        find_newest("s3://bucket/run")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_previous_checkpoint_is_kept_until_the_new_one_is_verified(
    saved: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    writer = AtomicCheckpointIO(asynchronous=asynchronous)
    monkeypatch.setattr(torch, "save", lambda state, file: file.write(before[:-9]))

    def save() -> None:
        writer.save_checkpoint(STATE, saved)
        writer.wait()

    with pytest.raises(CheckpointError, match="read back, not a checkpoint, or truncated"):
        save()
    writer.teardown()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
