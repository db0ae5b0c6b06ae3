import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.checkpoint.load import load
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.checkpoint.weights import extract_weights, incompatibility, load_weights
from boltcutter_data.regression import Regression


@pytest.mark.parametrize(
    "write",
    [
        lambda own: {"state_dict": {f"model.{k}": v for k, v in own.items()} | {"mean": torch.ones(1)}},
        lambda own: own,
        lambda own: {f"module.{k}": v for k, v in own.items()},
        lambda own: {"model": {f"_orig_mod.{k}": v for k, v in own.items()}},
        lambda own: {"state_dict": {f"model._orig_mod.module.{k}": v for k, v in own.items()}},
        lambda own: {"model_state_dict": {k.replace("0.", "0._fsdp_wrapped_module."): v for k, v in own.items()}},
    ],
    ids=["lightning", "bare", "DataParallel", "compile", "compile+ddp", "FSDP"],
)
def test_files_of_other_programs_are_loaded(tmp_path: Path, write: Any) -> None:
    given, model = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    torch.save(write(given.state_dict()), tmp_path / "model.pt")
    assert load_weights(model, tmp_path / "model.pt") == []
    assert torch.equal(model[0].weight, given[0].weight)


def test_mismatches_are_reported(tmp_path: Path) -> None:
    given = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 10), "old": nn.Linear(1, 1)})
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 2), "new": nn.Linear(1, 1)})
    torch.save(given.state_dict(), tmp_path / "model.pt")
    missing, unexpected, reshaped = load_weights(model, tmp_path / "model.pt")
    assert torch.equal(model["body"].weight, given["body"].weight)
    assert missing == "2 missing: new.weight, new.bias"
    assert unexpected == "2 unexpected: old.weight, old.bias"
    assert reshaped == "2 of another shape: head.weight [10, 3] → [2, 3], head.bias [10] → [2]"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="no weights match the model"):
        load_weights(nn.Linear(1, 1), tmp_path / "model.pt")
    assert extract_weights({"epoch": 3}) == {}


def test_another_model_or_optimizer_is_reported(tmp_path: Path) -> None:
    task = Regression(nn.Linear(3, 2), num_outputs=2, optimizer=torch.optim.Adam)
    adam = torch.optim.Adam(task.parameters())
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": task.state_dict(), "optimizer_states": [adam.state_dict()]}, path)
    assert incompatibility(load(path), task) is None
    task.optimizer = torch.optim.SGD
    assert "(dampening, momentum, nesterov)" in str(incompatibility(load(path), task))
    other = Regression(nn.Linear(3, 5), num_outputs=2, optimizer=torch.optim.Adam)
    assert incompatibility(load(path), other) == "2 weights have another shape (model.weight, model.bias)"
    assert incompatibility(load(path), nn.Sequential(task)) is not None


def test_parameters_whose_shape_is_not_known_yet_are_resumed(tmp_path: Path) -> None:
    task, later = (Regression(nn.LazyLinear(2), num_outputs=2, optimizer=torch.optim.Adam) for _ in range(2))
    task.model(torch.ones(1, 3)).sum().backward()
    adam = torch.optim.Adam(task.parameters())
    adam.step()
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": task.state_dict(), "optimizer_states": [adam.state_dict()]}, path)
    assert incompatibility(load(path), later) is None


class Mode(enum.Enum):
    MIN = "min"


def test_training_state_that_is_not_loaded_is_reported(tmp_path: Path) -> None:
    task = nn.Linear(3, 2)
    path = tmp_path / "last.ckpt"
    given = {"state_dict": task.state_dict(), "hyper_parameters": {"mode": Mode.MIN, "model": task}}
    torch.save(given | {"lr_schedulers": [{"mode": "min"}]}, path)
    assert incompatibility(load(path), task) is None
    torch.save(given | {"lr_schedulers": [{"mode": Mode.MIN}]}, path)
    assert "(lr_schedulers.0.mode is a " in str(incompatibility(load(path), task))


def test_a_pickled_model_in_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    given, model = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"model": given, "state_dict": given.state_dict()}, tmp_path / "model.pt")
    assert load_weights(model, tmp_path / "model.pt") == []
    assert torch.equal(model.weight, given.weight)
