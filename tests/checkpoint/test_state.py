import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, Script

from boltcutter.checkpoint.state import check_state
from boltcutter.checkpoint.storage import CheckpointError

EPOCHS = ("loops", "fit_loop", "epoch_progress")
MISFITS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state_dict",), ["x"], "state_dict is a list, not a dict"),
    (("state_dict", 3), torch.ones(1), "state_dict has the key 3, which is no text"),
    (("epoch",), None, "epoch is missing"),
    (("epoch",), "1", "epoch is a str, not a int"),
    (("global_step",), float("inf"), "global_step is a float, not a int"),
    (("global_step",), -2, "global_step=-2 is no count"),
    (("global_step",), 10**30, "global_step=1e+30 is no count"),
    (("loops",), None, "loops is missing"),
    (("loops",), 3, "loops is a int, not a dict"),
    (("loops", "fit_loop"), None, "loops.fit_loop is missing"),
    ((*EPOCHS, "current"), None, "loops.fit_loop.epoch_progress.current is missing"),
    ((*EPOCHS, "current", "processed"), "2", "loops.fit_loop.epoch_progress.current.processed is a str, not a int"),
    ((*EPOCHS, "total", "x\x1b[2J\n"), "2", r"x\x1b[2J is no count"),
    (("loops", "test_loop"), [], "loops.test_loop is a list, not a dict"),
    (("callbacks",), [1], "callbacks is a list, not a dict"),
    (("callbacks", "EarlyStopping"), "x", "callbacks.EarlyStopping is a str, not a dict"),
    (("callbacks", "EarlyStopping"), {"wait_count": "x"}, "callbacks.EarlyStopping.wait_count is a str, not a int"),
    (("callbacks", "ModelCheckpoint"), {"best_k_models": [1]}, "best_k_models is a list, not a dict"),
    (("callbacks", "ModelCheckpoint"), {"best_k_models": {1: 2}}, "has the key 1, which is no text"),
    (("callbacks", "ModelCheckpoint"), {"last_model_path": 1}, "last_model_path is a int, not a str"),
    (("callbacks", "BestCheckpoint"), {"best_model_path": 1}, "BestCheckpoint.best_model_path is a int, not a str"),
    (("callbacks", "LastCheckpoint"), {"patience": "1"}, "LastCheckpoint.patience is a str, not a int"),
    (("optimizer_states",), None, "optimizer_states is missing"),
    (("optimizer_states",), {}, "optimizer_states is a dict, not a list"),
    (("optimizer_states",), [3], "optimizer_states.0 is a int, not a dict"),
    (("optimizer_states", 0, "state"), None, "optimizer_states.0.state is missing"),
    (("optimizer_states", 0, "param_groups"), [[]], "optimizer_states.0.param_groups.0 is a list, not a dict"),
    (("optimizer_states", 0, "param_groups", 0, "params"), 1, "params is a int, not a list"),
    (("lr_schedulers",), None, "lr_schedulers is missing"),
    (("lr_schedulers",), [None], "lr_schedulers.0 is a NoneType, not a dict"),
    (("pytorch-lightning_version",), None, "pytorch-lightning_version is missing"),
    (("pytorch-lightning_version",), ["x"], "pytorch-lightning_version is a list, not a str"),
    (("pytorch-lightning_version",), "x\x1b[2J", r"=x\x1b[2J has another state of training"),
    (("pytorch-lightning_version",), "1.5.0" + "0" * 10**6, "has another state of training"),
    (("pytorch-lightning_version",), "2.6.0" + "0" * 100, "has another state of training"),
    (("pytorch-lightning_version",), "1.5.0", "has another state of training"),
    ((*EPOCHS, "current", "increment_ready"), 2, "loops.fit_loop.epoch_progress.current.increment_ready is no count"),
]


@pytest.fixture(scope="module")
def run(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "run"
    done = script("train", *QUICK, "model=mlp", f"folder={folder}", "trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    return folder


def change(content: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at a path of keys; without it for None."""
    inner = content = copy.deepcopy(content)
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return content


def test_state_of_another_type_is_one_line(run: Path) -> None:
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    check_state(content, "last.ckpt", resumes=True)
    for keys, value, fault in MISFITS:
        with pytest.raises(CheckpointError) as caught:
            check_state(change(content, keys, value), "last.ckpt", resumes=True)
        message = str(caught.value)
        assert fault in message
        assert message.startswith("last.ckpt: ")
        assert message.endswith("; use another checkpoint, or start a new run")
        assert message.isprintable()
        evaluated = change(content, keys, value)
        if keys[0] != "state_dict":  # enough to evaluate
            check_state(evaluated, "last.ckpt")
            assert evaluated["state_dict"].keys() == content["state_dict"].keys()
            assert isinstance(evaluated["callbacks"], dict)
            assert not evaluated.keys() & {"loops", "optimizer_states", "lr_schedulers"}
    check_state({"state_dict": {}}, "best.ckpt")


def written_by_lightning_1(content: dict[str, Any], *, without_loops: bool) -> dict[str, Any]:
    """The checkpoint as Lightning 1.9 wrote it, or 1.4, without the state of loops."""
    old = copy.deepcopy(content) | {"pytorch-lightning_version": "1.4.9" if without_loops else "1.9.5"}
    if without_loops:
        del old["loops"]
        return old
    fit = old["loops"].pop("fit_loop")
    progress = fit.pop("epoch_loop.val_loop.batch_progress")
    fit |= {
        "epoch_loop.batch_loop.state_dict": {},
        "epoch_loop.batch_loop.manual_loop.state_dict": fit.pop("epoch_loop.manual_optimization.state_dict"),
        "epoch_loop.batch_loop.manual_loop.optim_step_progress": fit.pop(
            "epoch_loop.manual_optimization.optim_step_progress"
        ),
        "epoch_loop.batch_loop.optimizer_loop.state_dict": fit.pop("epoch_loop.automatic_optimization.state_dict"),
        "epoch_loop.batch_loop.optimizer_loop.optim_progress": {
            "optimizer_position": 0,
            **fit.pop("epoch_loop.automatic_optimization.optim_progress"),
        },
        "epoch_loop.val_loop.dataloader_progress": {"total": progress["total"], "current": progress["current"]},
        "epoch_loop.val_loop.epoch_loop.state_dict": {},
        "epoch_loop.val_loop.epoch_loop.batch_progress": progress,
    }
    return {**old, "loops": {"fit_loop": fit}}


def test_state_that_an_earlier_lightning_did_not_have_is_that_of_a_new_run(run: Path) -> None:
    old = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    none = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
    begun = {"total": none, "current": none, "is_last_batch": False}
    for loop in ("validate_loop", "test_loop", "predict_loop"):
        del old["loops"][loop]
    check_state(old, "last.ckpt", resumes=True)
    for loop in ("validate_loop", "test_loop", "predict_loop"):
        assert old["loops"][loop] == {"state_dict": {}, "batch_progress": begun}
    old = written_by_lightning_1(old, without_loops=False)
    progress = old["loops"]["fit_loop"]["epoch_loop.val_loop.epoch_loop.batch_progress"]
    check_state(old, "last.ckpt", resumes=True)
    assert old["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"] in (progress, begun)


@pytest.mark.parametrize("without_loops", [False, True])
def test_a_checkpoint_of_an_earlier_lightning_is_resumed_and_evaluated(
    script: Script, run: Path, tmp_path: Path, without_loops: bool
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for path in (folder / "checkpoints").glob("*.ckpt"):
        old = written_by_lightning_1(torch.load(path, weights_only=True), without_loops=without_loops)
        torch.save(old, path)
    done = script("evaluate", f"run={folder}")
    assert done.returncode == 0, done.stderr
    done = script("train", f"resume={folder}", "trainer.max_epochs=2")
    if without_loops:  # Lightning 1.4 counted epochs and steps in another way
        assert (done.returncode, "Traceback" in done.stderr) in {(0, False), (1, False), (2, False)}, done.stderr
        return
    assert done.returncode == 0, done.stderr
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["epoch"] == 1
    assert saved["loops"]["fit_loop"]["epoch_progress"]["total"]["processed"] == 2


MOMENT = ("optimizer_states", 0, "state", 1, "exp_avg")


STATES = [  # of another type, in each part of a checkpoint
    (("loops", "fit_loop"), None),
    (MOMENT, torch.ones(7)),
    (MOMENT, 1e308),
    (("train_metrics", 0, "train/f1", "tp"), []),
    (("lr_schedulers", 0, "last_epoch"), "x"),
    (("hyper_parameters",), 3),
    (("state_dict",), [1]),
]
OTHER_STATES = [
    (("loops", "test_loop"), 3),
    (("callbacks",), 1),
    (("optimizer_states",), [{}]),
    (MOMENT, "x"),
    (("optimizer_states", 0, "param_groups", 0, "amsgrad"), True),
    (("train_metrics", 0, "mean", "mean_value"), torch.zeros(2, 3)),
    (("train_metrics", 0, "pending"), [[torch.zeros(3)]]),
    (("stopped_early",), 3),
    (("optimizer_states", 0, "param_groups", 0, "betas"), "x"),
    (("lr_schedulers", 0, "base_lrs"), [None, []]),
    (("train_metrics", 0, "mean", "_update_count"), "x"),
    (("train_metrics", 0, "mean", "update"), torch.ones(1)),
    (("train_metrics",), 3),
    (("pytorch-lightning_version",), None),
]


@pytest.mark.parametrize(
    ("keys", "value"), [*STATES, *(pytest.param(*state, marks=pytest.mark.slow) for state in OTHER_STATES)]
)
def test_no_command_passes_state_of_another_type_to_lightning(
    script: Script, run: Path, tmp_path: Path, keys: tuple[str, ...], value: Any
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for path in (folder / "checkpoints").glob("*.ckpt"):
        torch.save(change(torch.load(path, weights_only=True), keys, value), path)
    done = script("evaluate", f"run={folder}")
    assert done.returncode == (keys == ("state_dict",)), done.stderr  # which needs no other state
    assert "Traceback" not in done.stderr
    done = script("train", f"resume={folder}", "trainer.max_epochs=2")
    assert "Traceback" not in done.stderr
    if keys != ("hyper_parameters",):
        assert done.returncode in (1, 2), done.stderr
        assert re.search(rf"last.ckpt.*({re.escape(str(keys[-1]))}|not restored)", done.stderr)
