import os
from pathlib import Path

import pytest
import torch
from conftest import STATE, Script, flip_a_bit

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_best_by_score, find_newest, list_folders, list_names
from boltcutter.checkpoint.storage import CheckpointError


@pytest.mark.parametrize("names", [("last", "last-preempted"), ("last-preempted", "last")])
@pytest.mark.parametrize("mtimes", [(1, 1), (2, 1)])  # the clock of a store may have a resolution of seconds
def test_newest_is_by_step_and_damaged_files_are_skipped(
    saved: Path, names: tuple[str, str], mtimes: tuple[int, int]
) -> None:
    older, newer = (saved.with_name(f"{name}.ckpt") for name in names)
    for path, step, mtime in ((newer, 20, mtimes[1]), (older, 10, mtimes[0])):
        torch.save(STATE | {"global_step": step}, path)
        os.utime(path, (mtime, mtime))
    warnings: list[str] = []
    assert find_newest(saved.parent, warn=warnings.append) == str(newer)
    newer.write_bytes(newer.read_bytes()[:-50])
    assert find_newest(saved.parent, warn=warnings.append) == str(older)
    assert len(warnings) == 2
    assert warnings[0].startswith(f"warning: {newer}: ")


@pytest.mark.parametrize(
    "facts", [{"global_step": 10**400, "best": 1}, {"global_step": "x", "best": {}}, {"best": {"mode": 1, "score": ""}}]
)
def test_metadata_of_another_program_does_not_fail(saved: Path, facts: dict[str, object]) -> None:
    for name in ("last-1.ckpt", "best-1.ckpt", "best-2.ckpt"):
        torch.save(facts, saved.with_name(name))
    torch.save(STATE | {"global_step": 1}, saved)
    assert find_newest(saved.parent) == str(saved)
    assert find_best_by_score(saved.parent) is None


@pytest.mark.parametrize("names", ["last", "model", "0-2.64", "best"])
def test_names_do_not_matter(saved: Path, names: str) -> None:
    """The newest is of the latest attempt, of whatever step, and the best has the best score."""
    saved.unlink()
    files = {}
    for attempt, step, save, score in ((1, 10, 0, 2.0), (1, 30, 1, 1.0), (2, 20, 0, float("inf")), (2, 20, 1, 3.0)):
        facts = {"global_step": step, "boltcutter": {"attempt": attempt, "save": save}}
        files[attempt, step, save] = path = saved.with_name(f"{names}-{len(files)}.ckpt")
        torch.save(STATE | facts | {"best": {"mode": "min", "score": score}}, path)
    assert find_newest(saved.parent) == str(files[2, 20, 1])
    assert find_best_by_score(saved.parent) == str(files[1, 30, 1])


def test_training_continues_from_weights_only_if_there_is_nothing_else(saved: Path) -> None:
    weights = saved.with_name("weights.ckpt")
    torch.save(STATE | {"global_step": 9}, weights)
    torch.save(STATE | {"global_step": 1, "optimizer_states": []}, saved)
    assert find_newest(saved.parent) == str(weights)
    assert find_newest(saved.parent, resumes=True) == str(saved)
    saved.unlink()
    assert find_newest(saved.parent, resumes=True) == str(weights)


def test_a_metric_that_was_nan_makes_no_best(saved: Path) -> None:
    for mode, score in (("min", float("inf")), ("max", float("-inf")), ("min", float("nan"))):
        torch.save(STATE | {"best": {"mode": mode, "score": score}}, saved)
        assert find_best_by_score(saved.parent) is None


def test_another_is_used_if_the_newest_is_damaged(saved: Path) -> None:
    best = saved.with_name("best.ckpt")
    torch.save(STATE, best)
    torch.save(STATE | {"global_step": 5}, saved)
    warnings: list[str] = []
    assert find_newest(saved.parent, warn=warnings.append) == str(saved)
    assert not warnings
    flip_a_bit(saved)
    assert find_newest(saved.parent, warn=warnings.append) == str(best)
    assert [str(saved) in line for line in warnings] == [True, False]
    assert str(best) in warnings[1]
    flip_a_bit(best)
    assert find_newest(saved.parent, warn=lambda text: None) is None


@pytest.mark.parametrize("latest", [0, 1])
def test_of_equal_steps_the_most_recently_written_is_the_newest(saved: Path, latest: int) -> None:
    paths = [saved.with_name(f"last{suffix}.ckpt") for suffix in ("", "-preempted")]
    for number, path in enumerate(paths):
        torch.save(STATE | {"global_step": 10}, path)
        os.utime(path, (1 + (number == latest),) * 2)
    assert find_newest(saved.parent) == str(paths[latest])


@pytest.mark.parametrize(("mode", "order"), [("min", [1, 2, 3]), ("max", [3, 2, 1])])
def test_damaged_best_checkpoints_are_skipped(saved: Path, mode: str, order: list[int]) -> None:
    for score in (2, 1, 3):
        state = STATE | {"best": {"monitor": "m", "mode": mode, "score": float(score)}}
        torch.save(state, saved.with_name(f"best-{score}.ckpt"))
    warnings: list[str] = []
    for count, score in enumerate(order):
        path = saved.with_name(f"best-{score}.ckpt")
        assert find_best_by_score(saved.parent, warn=warnings.append) == str(path)
        assert len(warnings) == sum(range(2, count + 2)) if count else not warnings
        flip_a_bit(path)
    assert find_best_by_score(saved.parent, warn=warnings.append) is None


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "[!a]", "a b {c}"])
def test_folder_names_are_not_patterns(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path / name, tmp_path / "a1", tmp_path / "ab"):
        AtomicCheckpointIO().save_checkpoint(STATE, folder / "last.ckpt")
        AtomicCheckpointIO().save_checkpoint(STATE, folder / "best-v[1].ckpt")
    folder = tmp_path / name
    assert find_newest(folder) in (str(folder / "last.ckpt"), str(folder / "best-v[1].ckpt"))
    assert list_names(folder) == ["best-v[1].ckpt", "last.ckpt"]
    store = AtomicCheckpointIO()
    store.save_checkpoint(STATE, folder / "best-v[1].ckpt")
    store.remove_checkpoint(folder / "best-v[1].ckpt")
    assert list_names(folder) == ["last.ckpt"]
    assert list_names(tmp_path / "a1") == ["best-v[1].ckpt", "last.ckpt"]


def test_links_that_lead_nowhere_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    (tmp_path / "gone.ckpt").symlink_to("nothing")
    assert list_names(tmp_path) == []


def test_a_folder_that_is_missing_has_none(tmp_path: Path) -> None:
    assert list_names(tmp_path / 'it\'s "new" \\' / "checkpoints") == []


@pytest.mark.parametrize("name", ["50%", "a%20b", "x%41y", "%zz", "a [b]", "c*?", "q'\"", "#=&", "ü日"])
def test_a_folder_of_any_name_has_its_checkpoints(tmp_path: Path, name: str) -> None:
    assert list_names(tmp_path / name) == []
    (tmp_path / name).mkdir()
    (tmp_path / name / "last.ckpt").write_bytes(b"")
    assert list_names(tmp_path / name) == ["last.ckpt"]
    assert list_names(tmp_path / name / "gone" / "checkpoints") == []


@pytest.mark.parametrize("folder", ["run/checkpoints", "bucket/run/checkpoints"])  # some stores name no bucket
def test_a_missing_bucket_is_no_missing_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(missing)

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", fail)
    missing = folder
    assert list_names("memory://bucket/run/checkpoints") == []
    missing = "bucket"
    with pytest.raises(CheckpointError, match=r"^memory://bucket/run/checkpoints: cannot be reached \(bucket\); check"):
        list_names("memory://bucket/run/checkpoints")


@pytest.mark.parametrize("left", [b"", b"PK", b"hello"])
def test_a_file_damaged_by_a_crash_is_skipped(saved: Path, left: bytes) -> None:
    saved.with_name("last-v1.ckpt").write_bytes(left)
    warnings: list[str] = []
    assert find_newest(saved.parent, warn=warnings.append) == str(saved)
    assert warnings[0].startswith(f"warning: {saved.with_name('last-v1.ckpt')}: ")


def test_checkpoints_that_are_folders_are_listed(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt" / "checkpoint").mkdir(parents=True)
    torch.save(STATE, tmp_path / "best.ckpt")
    assert list_folders(tmp_path) == [str(tmp_path / "last.ckpt")]
    assert list_folders(tmp_path / "missing") == []


def test_a_checkpoint_without_step_or_score_comes_last(saved: Path) -> None:
    for name, facts, mtime in (("last-a", {"global_step": 1}, 1), ("last-b", {}, 2)):
        torch.save(STATE | facts, saved.with_name(f"{name}.ckpt"))
        os.utime(saved.with_name(f"{name}.ckpt"), (mtime, mtime))
    saved.unlink()
    assert find_newest(saved.parent) == str(saved.with_name("last-a.ckpt"))
    for mode in ("min", "max"):
        best = {"monitor": "m", "mode": mode, "score": 1e30 if mode == "min" else -1e30}
        for name, facts, mtime in (("best-a", {"best": best}, 1), ("best-b", {}, 2)):
            torch.save(STATE | facts, saved.with_name(f"{name}.ckpt"))
            os.utime(saved.with_name(f"{name}.ckpt"), (mtime, mtime))
        assert find_best_by_score(saved.parent) == str(saved.with_name("best-a.ckpt"))


def test_checkpoints_at_a_url_keep_its_form() -> None:
    url = "memory://select/run"
    AtomicCheckpointIO().save_checkpoint(STATE, f"{url}/last.ckpt")
    for place in (url, f"{url}/"):
        assert find_newest(place) == f"{url}/last.ckpt"
    assert list_names(url) == ["last.ckpt"]


def test_a_run_with_checkpoints_of_deepspeed_is_not_started_over(script: Script, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last.ckpt" / "checkpoint").mkdir(parents=True)
    done = script("train", "logger=null", f"folder={tmp_path}")
    assert done.returncode == 2
    assert "last.ckpt" in done.stderr
    assert "init_from=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
