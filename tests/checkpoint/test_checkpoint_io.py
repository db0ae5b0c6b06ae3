import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from conftest import QUICK, STATE, Script, environment, flip_a_bit
from forkserver import Forked, ForkServer

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_best_by_score, find_newest
from boltcutter.checkpoint.load import find_damage
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


def test_weights_that_a_launcher_of_lightning_passes_from_a_rank_are_read_and_removed(tmp_path: Path) -> None:
    path = tmp_path / ".temp.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.ones(1)}, path)  # in the rank
    store = AtomicCheckpointIO()
    assert store.load_checkpoint(path) == {"weight": torch.ones(1)}
    store.remove_checkpoint(path)
    store.wait()
    assert not path.exists()
    AtomicCheckpointIO().save_checkpoint(STATE, path)  # of somebody else, under this name
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]
    with pytest.raises(CheckpointError, match="not removed, since no checkpoint was saved to its folder"):
        AtomicCheckpointIO().remove_checkpoint(path)


def test_folders_are_created(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/b/d"):
        AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "a" / "b" / f"{name}.ckpt")
        assert find_damage(tmp_path / "a" / "b" / f"{name}.ckpt") is None


def test_a_file_of_weights_is_no_checkpoint_to_resume(tmp_path: Path, saved: Path) -> None:
    torch.save(STATE["state_dict"], tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match=r"weights\.ckpt: holds weights .*init_from=.*/weights\.ckpt$"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "weights.ckpt")
    found = AtomicCheckpointIO().load_checkpoint(saved, lazy=True)
    assert torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]
    flip_a_bit(saved)
    with pytest.raises(CheckpointError, match=r"last\.ckpt: record .* is damaged; use another checkpoint$"):
        AtomicCheckpointIO().load_checkpoint(saved, lazy=True)


class Foreign:
    """A class that a checkpoint must not hold."""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_objects_in_a_checkpoint_are_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    path = tmp_path / "last.ckpt"
    unread = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")
    torch.save(STATE | {key: {"net": Foreign()} for key in unread} | {"callbacks": {"plain": {"a": 1}}}, path)
    assert AtomicCheckpointIO().load_checkpoint(path)["callbacks"] == {"plain": {"a": 1}}
    assert capsys.readouterr().err == ""
    callbacks = {"plain": {"a": 1}, "one": {"x": Foreign(), "y": Foreign()}, "other": [Foreign()]}
    torch.save(STATE | {"callbacks": callbacks}, path)
    assert AtomicCheckpointIO().load_checkpoint(path)["callbacks"] == {"plain": {"a": 1}}
    warning = capsys.readouterr().err
    if rank == "0":
        assert warning.startswith(f"warning: {path}: callbacks.one.x ")
        assert " (and 1 more) and is not loaded; set trust=true " in warning
    else:
        assert warning == ""


def with_best(place: object, *names: str, **others: Any) -> dict[str, Any]:
    """A checkpoint with the state of a ModelCheckpoint whose folder was ``place``."""
    state = {"monitor": "m", "dirpath": str(place), "best_k_models": {f"{place}/{n}": i for i, n in enumerate(names)}}
    state |= {"best_model_path": f"{place}/{names[0]}" if names else "", "last_model_path": "", "best_model_score": 0}
    return STATE | {"callbacks": {"odd": {"best_k_models": 1}, "best": state | others, "other": {"dirpath": "x"}}}


@pytest.mark.parametrize("is_url", [False, True])
def test_paths_in_the_checkpoint_of_a_moved_folder_are_updated(tmp_path: Path, is_url: bool) -> None:
    here = "memory://moved/new" if is_url else str(tmp_path / "new")
    store = AtomicCheckpointIO()

    def loaded(checkpoint: dict[str, Any]) -> Any:
        store.save_checkpoint(checkpoint, f"{here}/last.ckpt")
        return store.load_checkpoint(f"{here}/last.ckpt")["callbacks"]

    for name in ("a.ckpt", "b.ckpt", "../a.ckpt"):
        store.save_checkpoint(STATE, f"{here}/{name}")
    there = "memory://moved/old" if is_url else "/old"
    assert loaded(with_best(there, "a.ckpt", "b.ckpt")) == with_best(here, "a.ckpt", "b.ckpt")["callbacks"]
    assert loaded(with_best(there, "b.ckpt")) == with_best(here, "b.ckpt")["callbacks"]
    alone = {"best_k_models": {}, "best_model_path": f"{there}/a.ckpt"}
    assert loaded(with_best(there, **alone))["best"]["best_model_path"] == f"{here}/a.ckpt"
    for unchanged in (
        with_best(there, "../a.ckpt"),
        with_best(here, "a.ckpt"),
        with_best(there, "a.ckpt", "missing.ckpt"),
        with_best(there, best_model_path=f"{there}/missing.ckpt"),
        with_best(there, "a.ckpt", best_model_path="/elsewhere/a.ckpt"),
        with_best(there, "a.ckpt", kth_best_model_path=f"{there}er/a.ckpt"),
        with_best(there),
    ):
        assert loaded(unchanged) == unchanged["callbacks"]
        both = STATE | {
            "callbacks": {**unchanged["callbacks"], "next": with_best(there, "a.ckpt")["callbacks"]["best"]}
        }
        assert loaded(both)["next"]["dirpath"] == here


@pytest.mark.parametrize("place", ["", "memory://removed"])
def test_checkpoints_are_removed(tmp_path: Path, place: str) -> None:
    place = place or str(tmp_path)
    store = AtomicCheckpointIO()
    for name in ("a.ckpt", "b.ckpt", "folder.ckpt/part"):
        store.save_checkpoint(STATE, f"{place}/{name}")
    for name in ("a.ckpt", "folder.ckpt", "missing.ckpt"):
        store.remove_checkpoint(f"{place}/{name}")
    files, root = fsspec.url_to_fs(place)
    assert [str(path).rpartition("/")[2] for path in files.find(root)] == ["b.ckpt"]


def test_what_no_checkpoint_was_saved_beside_is_not_removed(tmp_path: Path) -> None:
    store, place = AtomicCheckpointIO(), tmp_path / "run" / "checkpoints"
    precious = tmp_path / "precious.ckpt"
    (precious / "inner").mkdir(parents=True)
    (place / "data").mkdir(parents=True)
    (place / "elsewhere").symlink_to(tmp_path)
    fsspec.filesystem("memory").pipe_file("/precious/a.ckpt", b"x")
    store.save_checkpoint(STATE, place / "a.ckpt")
    outside = [f"{place}/../../precious.ckpt", f"{place}/elsewhere/precious.ckpt", str(precious), "s3://x/a.ckpt"]
    for path in (*outside, f"{place}/data", f"{place}/..", "memory://precious/a.ckpt", "http://127.0.0.1:9/a.ckpt"):
        with pytest.raises(CheckpointError, match="not removed"):
            store.remove_checkpoint(path)
    assert (precious / "inner").is_dir()
    assert (place / "data").is_dir()
    assert fsspec.filesystem("memory").exists("/precious/a.ckpt")


def test_what_does_not_exist_is_removed_without_an_error(tmp_path: Path) -> None:
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "on_exception.ckpt")


def test_a_path_of_the_configuration_may_be_removed(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / name)
    store = AtomicCheckpointIO()
    store.permit_removal(str(tmp_path / "a.ckpt"))
    store.remove_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="not removed"):
        store.remove_checkpoint(tmp_path / "b.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


def test_folders_of_other_writers_are_removed(tmp_path: Path) -> None:
    for name in ("zero_to_fp32.py", ".metadata"):  # of DeepSpeed and of torch.distributed.checkpoint
        (tmp_path / "a.ckpt").mkdir()
        (tmp_path / "a.ckpt" / name).touch()
        AtomicCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "memory://index"])
def test_shards_are_removed_when_the_file_that_replaces_them_is_written(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place or str(tmp_path)
    files, root = fsspec.url_to_fs(place)

    def save(checkpoint: dict[str, Any], path: str, orders: Any) -> Any:
        if not checkpoint:
            raise OSError("disk failure")
        files.makedirs(f"{root}/{checkpoint['folder']}")
        files.pipe_file(f"{root}/{checkpoint['folder']}/part", b"x")
        return None if checkpoint["folder"] == "other" else {"shards": checkpoint}

    def left() -> list[str]:
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in files.ls(root, detail=False))

    monkeypatch.setattr("boltcutter.checkpoint.checkpoint_io.sharded_checkpoint", SimpleNamespace(save=save))
    store, path = AtomicCheckpointIO(), f"{place}/last.ckpt"
    for number in (1, 2):
        store.save_sharded({"folder": f"last.ckpt.shards-{number}"}, path, {})
        assert left() == ["last.ckpt", f"last.ckpt.shards-{number}"]
    with pytest.raises(CheckpointError, match=rf"^{re.escape(path)}: not written \(disk failure\)"):
        store.save_sharded({}, path, {})
    store.remove_checkpoint(path)
    assert left() == []
    store.save_sharded({"folder": "other"}, path, {})  # as on the second rank
    assert left() == ["other"]


def test_a_checkpoint_is_mapped_only_on_request(saved: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(saved)
    assert str(saved) not in Path("/proc/self/maps").read_text()
    lazy = AtomicCheckpointIO().load_checkpoint(saved, lazy=True)
    assert str(saved) in Path("/proc/self/maps").read_text()
    assert torch.equal(lazy["state_dict"]["weight"], found["state_dict"]["weight"])


def test_the_thread_that_writes_ends_with_training(tmp_path: Path) -> None:
    store = AtomicCheckpointIO(asynchronous=True)
    for _ in range(2):  # fit, then test
        store.save_checkpoint(STATE, tmp_path / "last.ckpt")
        assert any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
        store.teardown()
        assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
    assert find_damage(tmp_path / "last.ckpt") is None


def test_a_failing_storage_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no access")

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", refuse)
    with pytest.raises(
        CheckpointError, match=r"^memory://x/a\.ckpt: not written \(no access\); the previous .* is unchanged; check"
    ):
        AtomicCheckpointIO().save_checkpoint(STATE, "memory://x/a.ckpt")


SAVING = """
import sys, torch
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_reported_and_keeps_the_previous_file(small_disk: Path, asynchronous: bool) -> None:
    store = AtomicCheckpointIO(asynchronous=asynchronous)

    def save_too_much() -> None:
        store.save_checkpoint({"state_dict": {"w": torch.zeros(10**6)}}, small_disk / "new.ckpt")
        store.remove_checkpoint(small_disk / "last.ckpt")  # not, since nothing has replaced it
        store.wait()

    store.save_checkpoint(STATE, small_disk / "last.ckpt")
    with pytest.raises(CheckpointError, match=r" MiB are free; "):
        save_too_much()
    assert store.load_checkpoint(small_disk / "last.ckpt")["epoch"] == 3
    assert [path.name for path in small_disk.iterdir()] == ["last.ckpt"]


def test_a_folder_without_write_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("last.ckpt", "deep/last.ckpt", "deep/er/last.ckpt"):
        path = tmp_path / "file" / name
        with pytest.raises(CheckpointError, match=r"last\.ckpt: not written \(.*\); .* MiB are free;") as error:
            AtomicCheckpointIO().save_checkpoint(STATE, path)
        (free,) = re.findall(r"([\d,]+) MiB", str(error.value))
        assert int(free.replace(",", "")) == pytest.approx(shutil.disk_usage(tmp_path).free / 2**20, rel=0.1)
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


@pytest.mark.slow
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
    assert f"best           {find_best_by_score(place)}" in resumed.stdout
    assert script("evaluate", f"run={folder}").returncode == 0
    again = script("train", *overrides[:-2], f"checkpoints={place}", f"folder={tmp_path}/other")
    assert again.returncode == 2
    assert again.stderr.startswith(f"error: checkpoints={place} holds a run; use resume=<its folder> ")
    assert again.stderr.count("\n") == 1


@pytest.mark.slow
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
        for call in (check_writable, find_newest, find_best_by_score):
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
