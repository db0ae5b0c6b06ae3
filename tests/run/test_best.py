import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import QUICK, STATE, Script, flip_a_bit

from boltcutter.checkpoint import find as select
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.environment import user_key
from boltcutter.run.best import find_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose best checkpoint is in a folder of its own."""
    run = tmp_path / "here" / "run"
    scored = STATE | {"best": {"mode": "min", "score": 1.0}}
    last = STATE | {"global_step": 3}
    for name, content in (("own/top", STATE), ("checkpoints/last", last), ("checkpoints/best", scored)):
        AtomicCheckpointIO().save_checkpoint(content, run / f"{name}.ckpt")
    facts = {"id": "run", "best": "own/top.ckpt", "best_by": {"monitor": "val_acc"}}
    (run / "record.json").write_text(json.dumps(facts))
    return run


def find(run: Path, which: str = "best") -> str:
    return find_checkpoint(Settings({"folder": str(run), "checkpoints": f"{run}/checkpoints"}).place, which)


def test_the_recorded_checkpoint_is_the_best(folder: Path) -> None:
    assert find(folder) == f"{folder}/own/top.ckpt"
    assert find(folder, "last") == f"{folder}/checkpoints/last.ckpt"


def test_a_copied_run_uses_its_own(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert find(copy) == f"{copy}/own/top.ckpt"


def test_a_damaged_one_is_replaced_by_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own" / "top.ckpt").write_bytes(b"cut")
    assert find(folder) == f"{folder}/checkpoints/best.ckpt"
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("url", ["https://example.org/a.ckpt", "reference://?fo=a", "{}/checkpoints/::https://a/b"])
def test_an_address_in_the_record_is_not_contacted(folder: Path, url: str) -> None:
    facts = {"id": "run", "best": url.format(folder), "best_by": {"monitor": "val_acc"}}
    (folder / "record.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"an address that would be contacted; set trust=true"):
        find(folder)


def test_without_a_recorded_callback_the_scores_tell(folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"id": "run", "best": "own/top.ckpt", "best_by": None}))
    assert find(folder) == f"{folder}/checkpoints/best.ckpt"


SHORT = [*QUICK, "model=linear", "data.num_workers=0", "test=false"]


@pytest.fixture(scope="module")
def begun(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that keeps the checkpoint of each. Not to be changed."""
    run = tmp_path_factory.mktemp("begun") / "run"
    done = script("train", *SHORT, "callback.best.save_top_k=-1", f"folder={run}")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["resume={0}", "ckpt=best-19.ckpt"],
        ["resume={0}/checkpoints/best-19.ckpt"],
        ["resume={0}", "ckpt={0}/checkpoints/best-19.ckpt"],
    ],
)
def test_a_run_resumes_from_a_given_checkpoint(
    arguments: list[str], script: Script, begun: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    done = script("train", *(text.format(run) for text in arguments), "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "record.json").read_text())
    assert record["attempts"][-1]["resumed_from"] == f"{run}/checkpoints/best-19.ckpt"
    before = json.loads((begun / "record.json").read_text())
    assert record["metrics"]["val/loss"] == before["metrics"]["val/loss"]  # the second epoch is repeated exactly
    done = script("train", f"resume={run}", "trainer.max_epochs=3")
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "record.json").read_text())
    assert record["attempts"][-1]["resumed_from"] == f"{run}/checkpoints/last.ckpt"


@pytest.mark.slow
def test_a_damaged_last_checkpoint_is_replaced_by_the_best(script: Script, begun: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    (run / "checkpoints" / "last.ckpt").write_bytes(b"cut")
    done = script("train", f"resume={run}", "trainer.max_epochs=3")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2
    assert str(run / "checkpoints") in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume={0}", "ckpt=none.ckpt"], "ckpt=none.ckpt: no such file"),
        (["resume=/nowhere/other.ckpt"], "not in the folder of a run; use resume=<folder of the run> ckpt=<file>"),
        (["ckpt=best"], "ckpt: no such key"),
    ],
)
def test_a_wrong_checkpoint_is_one_line(
    arguments: list[str], message: str, script: Script, begun: Path, tmp_path: Path
) -> None:
    done = script("train", *(text.format(begun) for text in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_of_damaged_checkpoints_are_printed_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("last-\x1b]0;title\x07.ckpt", "best-\x1b]0;title\x07.ckpt"):
        (folder / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (folder / "checkpoints" / name).write_bytes(b"damaged")
    select.find_newest(folder / "checkpoints")
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(
        json.dumps(record | {"best": f"{folder}/checkpoints/last-\x1b]0;title\x07.ckpt"})
    )
    assert find(folder) == f"{folder}/checkpoints/best.ckpt"
    shown = "".join(capsys.readouterr())
    assert "trying another checkpoint" in shown
    assert "ckpt=best" in shown
    assert r"\x1b]0;title\x07" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_an_address_that_only_begins_like_the_checkpoints_is_not_contacted(folder: Path) -> None:
    facts = {"id": "run", "best": "https://example.org.evil/a.ckpt", "best_by": {"monitor": "val_acc"}}
    (folder / "record.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"an address that would be contacted; set trust=true"):
        find_checkpoint(Settings({"folder": str(folder), "checkpoints": "https://example.org"}).place, "best")


def test_a_checkpoint_is_found_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last, best, other = (tmp_path / "checkpoints" / f"{name}.ckpt" for name in ("last", "best", "step-5"))
    scored = {"global_step": 3, "best": {"mode": "min", "score": 1.0}}
    for path, facts in ((other, {}), (best, scored), (last, {"global_step": 4})):
        AtomicCheckpointIO().save_checkpoint(STATE | facts, path)
    for which, path in (("last", last), ("best", best), ("step-5.ckpt", other), (str(other), other)):
        assert find(tmp_path, which) == str(path)
    listed = r"\(checkpoints of the run: best\.ckpt, last\.ckpt, step-5\.ckpt\)"
    with pytest.raises(ConfigError, match=rf"^ckpt=step-6\.ckpt: no such file; did you mean step-5\.ckpt\? {listed}$"):
        find(tmp_path, "step-6.ckpt")
    flip_a_bit(other)
    with pytest.raises(ConfigError, match=rf"^ckpt=step-5\.ckpt: record .* is damaged {listed}$"):
        find(tmp_path, "step-5.ckpt")
    assert capsys.readouterr().out == ""
    flip_a_bit(last)
    assert find(tmp_path, "last") == str(best)
    assert str(best) in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ConfigError, match=r"^ckpt=best: not found \(checkpoints of the run: none yet\)$"):
        find(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"^ckpt=last: s4://bucket: cannot be reached"):
        find_checkpoint(Settings({"folder": str(tmp_path), "checkpoints": "s4://bucket"}).place, "last")


def test_without_a_best_checkpoint_the_last_is_used_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, last)
    assert find(tmp_path) == str(last)
    assert str(last) in capsys.readouterr().out


def test_only_rank_zero_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last, best = (tmp_path / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    AtomicCheckpointIO().save_checkpoint(STATE | {"global_step": 4}, last)
    AtomicCheckpointIO().save_checkpoint(STATE, best)
    flip_a_bit(last)
    monkeypatch.setenv("RANK", "1")
    assert find(tmp_path, "last") == str(best)
    assert capsys.readouterr().out == ""


def test_checkpoints_at_a_url_keep_its_form(tmp_path: Path) -> None:
    url = "memory://run-best/run"
    AtomicCheckpointIO().save_checkpoint(STATE, f"{url}/last.ckpt")
    cfg = Settings({"folder": str(tmp_path), "checkpoints": url})
    assert find_checkpoint(cfg.place, "last.ckpt") == find_checkpoint(cfg.place, "last") == f"{url}/last.ckpt"


@pytest.mark.parametrize("place", ["../other", "{}/other", "https://example.org", "checkpoints::file:///etc"])
def test_folders_elsewhere_in_a_foreign_record_are_not_searched(folder: Path, place: str) -> None:
    facts = json.loads((folder / "record.json").read_text()) | {"saved": ["own", place.format(folder.parent)]}
    (folder / "record.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"set trust=true"):
        find(folder, "last")


def test_folders_of_callbacks_are_searched(folder: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(STATE | {"global_step": 9}, folder / "own" / "newer.ckpt")
    facts = json.loads((folder / "record.json").read_text()) | {"saved": ["checkpoints", "own"]}
    (folder / "record.json").write_text(json.dumps(facts))
    assert find(folder, "last") == find(folder, "newer.ckpt") == f"{folder}/own/newer.ckpt"


def test_a_signature_does_not_make_the_entries_of_a_copy_of_somebody_else_true(
    folder: Path, tmp_path: Path, hand_over: Callable[[Path], None]
) -> None:
    config = {"folder": str(folder)}
    AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "elsewhere.ckpt")
    facts = {"config": config, "signature": user_key.sign(config), "best_by": {"monitor": "val_acc"}}
    (folder / "record.json").write_text(json.dumps(facts | {"best": str(tmp_path / "elsewhere.ckpt")}))
    assert find(folder) == str(tmp_path / "elsewhere.ckpt")
    hand_over(folder)
    with pytest.raises(ConfigError, match="elsewhere"):
        find(folder)
