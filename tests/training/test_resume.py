import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from boltcutter.assembly.assemble import Components
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.data.module import DataModule, Splits
from boltcutter.task.regression import Regression
from boltcutter.training.resume import (
    check_limits,
    check_restored_paths,
    explain_restoring,
    load_initial_state,
    restore_data_state,
)

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


@pytest.mark.parametrize("key", ["kth_best_model_path", "last_model_path", "best_k_models", "best_model_path"])
@pytest.mark.parametrize("to", ["{folder}/checkpoints/../../precious", "{folder}/link/precious", "s3://theirs/x"])
def test_paths_in_a_checkpoint_stay_in_the_folder_of_the_callback(
    single: Path, tmp_path: Path, key: str, to: str
) -> None:
    folder = shutil.copytree(single, tmp_path / "run")
    (tmp_path / "precious" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    path = to.format(folder=folder)
    callback = ModelCheckpoint(dirpath=folder / "checkpoints", save_top_k=1)
    state = callback.state_dict() | {key: {path: torch.tensor(1.0)} if key == "best_k_models" else path}
    callback.load_state_dict(state)
    trainer = L.Trainer(callbacks=[callback], logger=False, enable_progress_bar=False)
    if key == "best_model_path":  # of another place, where the run was before
        check_restored_paths(trainer)
        assert callback.best_model_path == ""
    else:
        with pytest.raises(CheckpointError, match=r"ModelCheckpoint names .*(precious|theirs)"):
            check_restored_paths(trainer)


def test_a_checkpoint_removes_no_folder_elsewhere(script: Script, single: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(single, tmp_path / "run")
    (tmp_path / "precious" / "inner").mkdir(parents=True)
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    (name,) = [name for name in content["callbacks"] if name.startswith("BestCheckpoint")]
    state, place = content["callbacks"][name], folder / "checkpoints"
    worst = f"{place}/../../precious"
    state |= {"dirpath": str(place), "best_k_models": {worst: torch.tensor(1e9)}, "kth_best_model_path": worst}
    state |= {"kth_value": torch.tensor(1e9)}
    torch.save(content, folder / "checkpoints" / "last.ckpt")
    done = script("train", f"resume={folder}", "trainer.max_epochs=3")
    assert done.returncode != 0
    assert "BestCheckpoint names" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "precious" / "inner").is_dir()


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
    cfg = Settings({"checkpoints": str(checkpoints), "folder": "run", "init_from": None})
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


SAVED = {"loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 2}}}}, "global_step": 10}


@pytest.mark.parametrize(
    ("saved", "max_epochs", "max_steps", "reached"),
    [
        (SAVED, 3, -1, ""),
        (SAVED, -1, 11, ""),
        (SAVED, 2, -1, "trainer.max_epochs=2"),
        (SAVED, None, 10, "trainer.max_steps=10"),
        (SAVED, 2, 10, "trainer.max_epochs=2"),
        (SAVED | {"callbacks": {"StochasticWeightAveraging": {}}}, 1, -1, "trainer.max_epochs=1"),  # one more epoch
        ({}, None, -1, ""),
        ({}, 0, -1, "trainer.max_epochs=0"),
        ({"loops": {"fit_loop": {"epoch_progress": {}}}}, None, 0, "trainer.max_steps=0"),
    ],
)
def test_the_limit_that_is_reached_is_named(
    saved: dict[str, Any], max_epochs: int | None, max_steps: int, reached: str
) -> None:
    trainer: Any = SimpleNamespace(max_epochs=max_epochs, max_steps=max_steps)
    assert check_limits(trainer, saved) == reached


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "message"),
    [
        (1, -1, "trainer.max_epochs=1: the run has already done 2; set trainer.max_epochs=2 or more"),
        (2, 9, "trainer.max_steps=9: the run has already done 10; set trainer.max_steps=10 or more"),
    ],
)
def test_a_limit_that_is_passed_is_an_error(max_epochs: int, max_steps: int, message: str) -> None:
    trainer: Any = SimpleNamespace(max_epochs=max_epochs, max_steps=max_steps)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_limits(trainer, SAVED)


class Data(DataModule):
    """Data without files, whose fingerprint is given."""

    def __init__(self, found: str) -> None:
        super().__init__(batch_size=1)
        self.found, self.loaded = found, list[str]()

    def load(self) -> Splits:
        raise AssertionError("not needed")

    def fingerprint(self) -> str:
        return self.found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict.get("position"):
            raise ValueError("no position; start a new run")
        self.loaded.append(state_dict["position"])

    def train_dataloader(self) -> Any:
        self.loaded.append("loader")


def test_the_position_in_the_data_is_restored_and_changed_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"data": "abc"}))
    cfg = Settings({"folder": str(tmp_path), "resume_exact": True})
    saved = {"Data": {"position": "third"}}
    same, other = Data("abc"), Data("def")
    restore_data_state(same, cfg, saved)
    assert (same.loaded, same.resume_exact) == (["third", "loader"], True)
    same.loaded.clear()
    restore_data_state(same, cfg, {})
    assert same.loaded == []
    with pytest.raises(ConfigError, match=r"^no position; start a new run$"):
        restore_data_state(same, cfg, {"Data": {"position": ""}})
    message = (
        rf"^resume={tmp_path}: the data has changed \(fingerprint def, was abc\); restore it, or set resume_exact=f"
    )
    with pytest.raises(ConfigError, match=message):
        restore_data_state(other, cfg, saved)
    cfg = cfg.changed({"resume_exact": False})
    restore_data_state(other, cfg, saved)
    assert other.resume_exact is False
    restore_data_state(L.LightningDataModule(), Settings({}), {})  # Lightning restores its state
    (tmp_path / "record.json").write_text("{}")
    cfg = cfg.changed({"resume_exact": True})
    restore_data_state(other, cfg, saved)


def _restore_modules_and_callbacks() -> None:
    raise KeyError("weight")


def restore_training_state(error: Exception) -> None:
    raise error


def test_an_error_while_state_is_restored_is_one_line() -> None:
    failing = partial(restore_training_state, ValueError("two\nlines"))
    restorers: list[Callable[[], None]] = [_restore_modules_and_callbacks, failing]
    for restore in restorers:
        text = r"\(KeyError in test_resume\.py:\d+: 'weight'\)|\(ValueError in test_resume\.py:\d+: two lines\)"
        with (
            pytest.raises(ConfigError, match=rf"^a\.ckpt: not restored ({text}); use another checkpoint"),
            explain_restoring("a.ckpt"),
        ):
            restore()
    with pytest.raises(KeyError), explain_restoring("a.ckpt"):  # an error of training
        raise KeyError("weight")
    with pytest.raises(CheckpointError, match="has a line of its own"), explain_restoring("a.ckpt"):
        restore_training_state(CheckpointError("has a line of its own"))


class Late(L.LightningModule):
    """Its parameters are not compared with those of the checkpoint."""

    def configure_model(self) -> None: ...


@pytest.mark.parametrize("max_epochs", [2, 3])
@pytest.mark.parametrize("note", [None, "it had stopped early"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_resumed_run_continues_with_is_printed_by_rank_zero(
    single: Path, tmp_path: Path, max_epochs: int, note: str | None, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    state = {"monitors": ["val/loss"]}
    keeping = SimpleNamespace(state_key="Keeping", restores_monitors=True, load_state_dict=given.append)
    others = [SimpleNamespace(state_key=key, load_state_dict=given.append) for key in ("Keeping", "Other")]
    new = SimpleNamespace(state_key="New", restores_monitors=True, load_state_dict=given.append)
    path = tmp_path / "last.ckpt"
    torch.save(
        torch.load(single / "checkpoints" / "last.ckpt", weights_only=True) | {"callbacks": {"Keeping": state}}, path
    )
    trainer = SimpleNamespace(
        is_global_zero=rank == 0,
        checkpoint_callbacks=[],
        callbacks=[keeping, *others, new],
        max_epochs=max_epochs,
        max_steps=-1,
        limit_train_batches=1.0,
        accumulate_grad_batches=1,
    )
    cfg = Settings({"folder": str(tmp_path / "run"), "test": False, "resume_exact": True})
    ending: Any = SimpleNamespace(resume=lambda saved: note, finished=False)
    changes: Any = SimpleNamespace(resume=lambda saved, *, ends, planned: [f"ends={ends}"])
    found: Any = Components(trainer, L.LightningDataModule(), Late(), None)  # type: ignore[arg-type]
    load_initial_state(found, cfg, str(path), ending, changes)
    assert given == [state]
    complete = "training is complete (trainer.max_epochs=2); to continue, set trainer.max_epochs=<more>"
    lines = [note or complete, "ends=True"] if max_epochs == 2 else [*([note] if note else []), "ends=False"]
    expected = "".join(f"resume={cfg.folder}: {line}\n" for line in lines) if rank == 0 else ""
    assert capsys.readouterr().out == expected
    ending.finished = True
    load_initial_state(found, cfg, str(path), ending, changes)
    assert rank == 1 or capsys.readouterr().out.endswith("ends=True\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_do_not_match_are_printed_by_rank_zero(
    tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = nn.Linear(3, 2)
    torch.save({"weight": weights.weight}, tmp_path / "start.pt")
    native = Regression(nn.Linear(3, 2), num_outputs=2, optimizer=torch.optim.Adam)
    plain = nn.Linear(3, 2)
    tasks: list[tuple[Any, Any]] = [(native, native.model), (plain, plain)]
    for task, model in tasks:
        trainer: Any = SimpleNamespace(is_global_zero=rank == 0, checkpoint_callbacks=[])
        cfg = Settings({"init_from": str(tmp_path / "start.pt")})
        unused: Any = None
        load_initial_state(Components(trainer, unused, task, unused), cfg, None, unused, unused)
        assert torch.equal(model.weight, weights.weight)
        assert capsys.readouterr().out == ("init_from: 1 missing: bias\n" if rank == 0 else "")
