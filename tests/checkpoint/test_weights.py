import copy
import enum
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.checkpoint.weights import extract_weights, incompatibility, load_weights
from boltcutter.task.regression import Regression


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
    assert incompatibility(load_checkpoint(path), task) is None
    task.optimizer = torch.optim.SGD
    assert "(dampening, momentum, nesterov)" in str(incompatibility(load_checkpoint(path), task))
    other = Regression(nn.Linear(3, 5), num_outputs=2, optimizer=torch.optim.Adam)
    assert incompatibility(load_checkpoint(path), other) == "2 weights have another shape (model.weight, model.bias)"
    assert incompatibility(load_checkpoint(path), nn.Sequential(task)) is not None


def test_parameters_whose_shape_is_not_known_yet_are_resumed(tmp_path: Path) -> None:
    task, later = (Regression(nn.LazyLinear(2), num_outputs=2, optimizer=torch.optim.Adam) for _ in range(2))
    task.model(torch.ones(1, 3)).sum().backward()
    adam = torch.optim.Adam(task.parameters())
    adam.step()
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": task.state_dict(), "optimizer_states": [adam.state_dict()]}, path)
    assert incompatibility(load_checkpoint(path), later) is None


class Mode(enum.Enum):
    MIN = "min"


def test_training_state_that_is_not_loaded_is_reported(tmp_path: Path) -> None:
    task = nn.Linear(3, 2)
    path = tmp_path / "last.ckpt"
    given = {"state_dict": task.state_dict(), "hyper_parameters": {"mode": Mode.MIN, "model": task}}
    torch.save(given | {"lr_schedulers": [{"mode": "min"}]}, path)
    assert incompatibility(load_checkpoint(path), task) is None
    torch.save(given | {"lr_schedulers": [{"mode": Mode.MIN}]}, path)
    assert "(lr_schedulers.0.mode is a " in str(incompatibility(load_checkpoint(path), task))


@pytest.mark.parametrize("entry", ["state_dict", "optimizer_states", "lr_schedulers", "loops"])
def test_objects_in_any_part_of_the_training_state_are_reported(tmp_path: Path, entry: str) -> None:
    torch.save({"state_dict": {}, entry: {"mode": Mode.MIN}}, tmp_path / "last.ckpt")
    assert f"1 values are objects, which are not loaded ({entry}.mode is a " in str(
        incompatibility(load_checkpoint(tmp_path / "last.ckpt"), nn.Identity())
    )


@pytest.mark.parametrize("scheduler", [partial(StepLR, step_size=1), partial(OneCycleLR, max_lr=0.1), None])
def test_each_entry_of_optimizer_and_scheduler_is_compared(scheduler: Any) -> None:
    task = Regression(nn.Linear(3, 5), num_outputs=5, optimizer=torch.optim.Adam, scheduler=scheduler)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.1)
    is_cycle = scheduler and scheduler.func is OneCycleLR
    rates: Any = OneCycleLR(optimizer, 0.1, total_steps=9) if is_cycle else StepLR(optimizer, 1)
    task.model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"state_dict": task.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    state["lr_schedulers"] = [rates.state_dict()]
    assert incompatibility(state, task) is None

    def changed(entry: str, value: Any) -> str | None:
        """What is reported if an entry of the training state has another value."""
        other = copy.deepcopy(state)
        *keys, last = (int(key) if key.isdecimal() else key for key in entry.split("."))
        inner: Any = other
        for key in keys:
            inner = inner[key]
        inner[last] = value
        return incompatibility(other, task)

    momentum = "optimizer_states.0.state.1.exp_avg"
    for value in (torch.ones(7), "x", [1.0]):
        assert changed(momentum, value) == "1 entries of the optimizer are of another type (state.1.exp_avg)"
    assert changed(momentum, torch.ones(5, 3)) is None  # of another parameter
    for value in (torch.ones(1), torch.tensor(2.0), 2, None):  # of other versions of torch
        assert changed("optimizer_states.0.state.0.step", value) is None
    group = "optimizer_states.0.param_groups.0"
    assert changed("optimizer_states.0.state.0.step", torch.ones(2)) is not None
    assert changed(f"{group}.params", ["x"]) is None  # checked with the weights
    assert changed(f"{group}.unknown", "x") is None
    for key, value, name in (("betas", "x", "betas"), ("betas", [0.9, "x"], "betas.1"), ("lr", "x", "lr")):
        fault = f"1 entries of the optimizer are of another type (param_groups.0.{name})"
        assert changed(f"{group}.{key}", value) == fault
    for key, value, name in (("last_epoch", "x", "last_epoch"), ("_last_lr", [None, []], "_last_lr.1")):
        fault = f"1 entries of the scheduler are of another type ({name})" if scheduler else None
        assert changed(f"lr_schedulers.0.{key}", value) == fault


def test_an_optimizer_that_cannot_be_tried_is_compared_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("needs a device")

    monkeypatch.setattr("torch.optim.SGD.step", fail)
    task = Regression(nn.Linear(3, 2), num_outputs=2, optimizer=torch.optim.SGD)
    saved = torch.optim.SGD(task.parameters()).state_dict()
    state = {"state_dict": task.state_dict(), "optimizer_states": [saved]}
    assert incompatibility(state, task) is None
    del saved["param_groups"][0]["momentum"]
    assert incompatibility(state, task) == "1 optimizer settings are missing (momentum)"


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_load_checkpoint"])
def test_weights_that_a_module_changes_before_loading_are_not_compared(hook: str) -> None:
    module = type("Late", (L.LightningModule,), {hook: lambda self, *arguments: None})()
    plain = L.LightningModule()
    content = {"state_dict": {"weight": torch.ones(1)}}
    assert incompatibility(content, plain) == "1 weights are unexpected (weight)"
    assert incompatibility(content, module) is None
    plain.strict_loading = False
    assert incompatibility(content, plain) is None


def test_at_most_three_names_are_listed(tmp_path: Path) -> None:
    for names in ("abc", "abcd"):
        content = {"state_dict": dict.fromkeys(names, torch.ones(1))}
        listed = "a, b, c" if names == "abc" else "a, b, c …"
        assert incompatibility(content, nn.Identity()) == f"{len(names)} weights are unexpected ({listed})"
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(CheckpointError, match=r"no weights match the model \(the file has a, b, c …\)"):
            load_weights(nn.Linear(1, 1), tmp_path / "model.pt")
    assert incompatibility({}, nn.Linear(1, 1)) == "2 weights are missing (weight, bias)"


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_files_of_keras_are_loaded_by_models_of_keras_only(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^init_from={name}: only a Keras model loads Keras files"):
        load_weights(nn.Identity(), name)


def test_weights_of_a_bare_model_are_loaded_into_a_task(tmp_path: Path) -> None:
    given, task = nn.Linear(3, 2), nn.ModuleDict({"model": nn.Linear(3, 2)})
    torch.save(given.state_dict(), tmp_path / "model.pt")
    assert load_weights(task, tmp_path / "model.pt") == []
    assert torch.equal(task["model"].weight, given.weight)


def test_a_pickled_model_in_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    given, model = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"model": given, "state_dict": given.state_dict()}, tmp_path / "model.pt")
    assert load_weights(model, tmp_path / "model.pt") == []
    assert torch.equal(model.weight, given.weight)


def test_a_file_of_any_size_that_is_none_of_safetensors_takes_no_memory(tmp_path: Path) -> None:
    with (path := tmp_path / "a.safetensors").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: not a safetensors file"):
        load_weights(nn.Linear(2, 3), path)


def test_a_file_of_safetensors_is_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, model = tmp_path / "a.safetensors", nn.Linear(2, 3)
    save_file({"weight": torch.ones(3, 2), "other": torch.ones(1)}, path)
    assert load_weights(model, path) == ["1 missing: bias", "1 unexpected: other"]
    assert torch.equal(model.weight, torch.ones(3, 2))
    path.write_bytes(path.read_bytes()[:-4])
    for bad in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(CheckpointError, match=rf"^init_from={bad}: .*; use another") as error:
            load_weights(model, bad)
        assert "\n" not in str(error.value)
