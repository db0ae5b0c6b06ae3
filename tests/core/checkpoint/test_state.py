import copy
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
    ((*EPOCHS, "total", "x\x1b[2J\n"), "2", r"x\x1b[2J is a str, not a int"),
    (("loops", "test_loop"), [], "loops.test_loop is a list, not a dict"),
    (("callbacks",), [1], "callbacks is a list, not a dict"),
    (("callbacks", "EarlyStopping"), "x", "callbacks.EarlyStopping is a str, not a dict"),
    (("callbacks", "EarlyStopping"), {"wait_count": "x"}, "callbacks.EarlyStopping.wait_count is a str, not a int"),
    (("callbacks", "ModelCheckpoint"), {"best_k_models": [1]}, "best_k_models is a list, not a dict"),
    (("callbacks", "ModelCheckpoint"), {"best_k_models": {1: 2}}, "has the key 1, which is no text"),
    (("callbacks", "ModelCheckpoint"), {"last_model_path": 1}, "last_model_path is a int, not a str"),
    (("optimizer_states",), None, "optimizer_states is missing"),
    (("optimizer_states",), {}, "optimizer_states is a dict, not a list"),
    (("optimizer_states",), [3], "optimizer_states.0 is a int, not a dict"),
    (("optimizer_states", 0, "state"), None, "optimizer_states.0.state is missing"),
    (("optimizer_states", 0, "param_groups"), [[]], "optimizer_states.0.param_groups.0 is a list, not a dict"),
    (("optimizer_states", 0, "param_groups", 0, "params"), 1, "params is a int, not a list"),
    (("lr_schedulers",), None, "lr_schedulers is missing"),
    (("lr_schedulers",), [None], "lr_schedulers.0 is a NoneType, not a dict"),
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
    check_state({"state_dict": {}}, "best.ckpt")  # enough to evaluate


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("loops", "fit_loop"), None),
        (("loops", "test_loop"), 3),
        (("callbacks",), 1),
        (("optimizer_states",), [{}]),
        (("state_dict",), [1]),
    ],
)
def test_no_command_passes_state_of_another_type_to_lightning(
    script: Script, run: Path, tmp_path: Path, keys: tuple[str, ...], value: Any
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for path in (folder / "checkpoints").glob("*.ckpt"):
        torch.save(change(torch.load(path, weights_only=True), keys, value), path)
    for command in (("train", f"resume={folder}", "trainer.max_epochs=2"), ("evaluate", f"run={folder}")):
        done = script(*command)
        assert done.returncode in (1, 2), done.stderr
        assert "Traceback" not in done.stderr
        assert ".".join(keys) in done.stderr.splitlines()[-1]
