import json
import shutil
from pathlib import Path

import pytest
from conftest import STATE

from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.config.compose import DictConfig
from boltcutter.run.best import find_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose best checkpoint is in a folder of its own."""
    run = tmp_path / "here" / "run"
    for name in ("own/top.ckpt", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        AtomicCheckpointIO().save_checkpoint(STATE, run / name)
    facts = {"id": "run", "best": f"{run}/own/top.ckpt", "best_by": {"monitor": "val_acc"}}
    (run / "record.json").write_text(json.dumps(facts))
    return run


def find(run: Path, which: str = "best") -> str:
    return find_checkpoint(DictConfig({"folder": str(run), "checkpoints": f"{run}/checkpoints"}), which)


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


def test_without_a_callback_of_the_user_the_folder_tells(folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"id": "run", "best": f"{folder}/own/top.ckpt", "best_by": None}))
    assert find(folder) == f"{folder}/checkpoints/best.ckpt"
