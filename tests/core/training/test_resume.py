import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from boltcutter.assembly.assemble import Components
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError
from boltcutter.training.resume import load_initial_state

PLAIN = [*QUICK, "model=mlp"]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())  # type: ignore[no-any-return]


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoints" / f"{which}.ckpt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if "metrics" not in name and "means" not in name}


@pytest.fixture(scope="module")
def single(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    done = script("train", *PLAIN, f"folder={folder}", "seed=5")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_complete_run_that_is_resumed_is_only_tested(script: Script, single: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(single, tmp_path / "run")
    done = script("train", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    message = (
        "training is complete (trainer.max_epochs=2); it is only tested; to continue, set trainer.max_epochs=<more>"
    )
    assert f"resume={folder}: {message}\n" in done.stdout
    assert record(folder)["test"] == record(single)["test"]


def test_limits_below_the_progress_of_the_run_are_refused(script: Script, single: Path) -> None:
    before = record(single)
    steps = torch.load(single / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    for name, done in (("max_epochs", 2), ("max_steps", steps)):
        refused = script("train", f"resume={single}", f"trainer.{name}=1")
        assert refused.returncode == 2
        message = f"trainer.{name}=1: the run has already done {done}; set trainer.{name}={done} or more"
        assert refused.stderr.startswith(f"error: resume={single}: {message}")
    assert record(single) == before


def test_a_run_starts_from_given_weights(script: Script, single: Path, tmp_path: Path) -> None:
    start = f"init_from={single}/checkpoints/best.ckpt"
    still = ["optimizer=sgd", "optimizer.lr=0", "scheduler=null", "trainer.max_epochs=1"]
    done = script("train", *PLAIN, *still, start, f"folder={tmp_path}/run", "seed=5")
    assert done.returncode == 0, done.stderr
    assert "init_from" not in done.stdout  # all weights matched
    ours, theirs = weights(tmp_path / "run"), weights(single, "best")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def load_state(
    task: nn.Module, checkpoints: Path, checkpoint: Path | None = None, *, is_rank_zero: bool = True, saves: bool = True
) -> None:
    """Load the initial state of a run that has got no further than that."""
    cfg = DictConfig({"checkpoints": str(checkpoints), "folder": "run", "init_from": None})
    trainer = SimpleNamespace(is_global_zero=is_rank_zero, checkpoint_callbacks=[ModelCheckpoint()] if saves else [])
    found: Any = Components(trainer, None, task, None)  # type: ignore[arg-type]
    unused: Any = None
    load_initial_state(found, cfg, checkpoint and str(checkpoint), unused, unused)


def test_a_place_for_checkpoints_is_tried_by_the_rank_that_writes_them(tmp_path: Path) -> None:
    blocked = tmp_path / "file" / "checkpoints"
    blocked.parent.touch()
    with pytest.raises(ConfigError, match=rf"^checkpoints={blocked}: cannot be written .*; "):
        load_state(nn.Linear(1, 1), blocked)
    load_state(nn.Linear(1, 1), blocked, is_rank_zero=False)
    load_state(nn.Linear(1, 1), blocked, saves=False)
    load_state(nn.Linear(1, 1), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_state_of_training_that_is_incomplete_is_refused(single: Path, tmp_path: Path) -> None:
    content = torch.load(single / "checkpoints" / "last.ckpt", weights_only=True)
    del content["global_step"]
    torch.save(content, tmp_path / "last.ckpt")
    message = rf"^resume=run: {tmp_path}/last\.ckpt: global_step is missing; use another checkpoint"
    with pytest.raises(ConfigError, match=message):
        load_state(nn.Linear(1, 1), tmp_path / "new", tmp_path / "last.ckpt")


def test_shards_are_left_for_each_rank_to_read(single: Path, tmp_path: Path) -> None:
    content = torch.load(single / "checkpoints" / "last.ckpt", weights_only=True)
    files = {"folder": "last.ckpt.shards-0", "files": {"__0_0.distcp": [1, 1]}, "orders": {}}
    torch.save({**content, "shards": files}, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"does not match the task: .* weights are missing"):  # read no further
        load_state(nn.Linear(1, 1), tmp_path / "new", tmp_path / "last.ckpt")
