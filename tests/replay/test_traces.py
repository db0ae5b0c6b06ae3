import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from boltcutter.replay.step_trace import FILE, StepTrace
from boltcutter.replay.traces import Entry, first_places, read_traces


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


class Stub:
    """What a trace needs of a trainer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizers, self.callbacks = [optimizer], list[Any]()


INPUTS = torch.arange(12.0).view(4, 3).sin()


def trace(folder: Path, module: Any = None, inputs: Any = INPUTS, factor: float = 1.0, **options: Any) -> list[Entry]:
    """The trace of one step."""
    module = copy.deepcopy(module or Net())
    settings = {"lr": 0.1} | options
    clip, indices = settings.pop("clip", None), settings.pop("indices", [5, 6, 7, 8])
    each = [*module.parameters()]
    groups = [
        {"params": part, **more} for part, more in zip((each[2:], each[:2]), settings.pop("groups", ()), strict=False)
    ]
    optimizer = torch.optim.Adam(groups or each, **settings)
    stub: Any = Stub(optimizer)
    found = StepTrace(module, folder, 0)
    found.begin(stub, [inputs, torch.ones(4)], indices)
    loss = module.net(inputs).square().mean() * factor
    found.note_loss(loss)
    loss.backward()
    found.before_step()
    if clip:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    found.after_step(stub, 1)
    (entries,) = read_traces(folder, 1, 1)
    return entries


def changed(**new: Any) -> Net:
    module = Net()
    for name, value in new.items():
        setattr(module.net[1] if name == "momentum" else module, name, value)
    return module


def inputs_with(row: int, column: int) -> Any:
    found = INPUTS.clone()
    found[row, column] += 1e-6
    return found


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.net)
        self.net = nn.Sequential()
        parts = list(Net().net)
        for name, part in zip(("one", "norm", "act", "two"), parts, strict=True):
            self.net.add_module(name, part)


def deeper() -> Net:
    module = Net()
    module.net.insert(3, nn.Dropout(0.0))
    return module


def other_weights() -> Net:
    module = Net()
    with torch.no_grad():
        module.net[0].weight[2, 1] += 1e-6
    return module


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"indices": [5, 6, 8, 7]}, "samples", "indices"),
        ({"inputs": inputs_with(2, 1)}, "input", "input_0"),
        ({"module": other_weights()}, "initial weight", "net.0.weight"),
        ({"module": deeper()}, "module", "net.3"),
        ({"factor": 1.5}, "loss", "loss"),
        ({"lr": 0.2}, "option", "lr of optimizer 0, group 0"),
        ({"groups": ({}, {"weight_decay": 0.1})}, "option", "weight_decay of optimizer 0, group 1"),
        ({"clip": 1e-3}, "used gradient", "net.0.weight"),
        ({"module": changed(momentum=0.3)}, "buffer", "net.1.running_mean"),
    ],
)
def test_the_first_difference_of_a_step_is_named(tmp_path: Path, options: Any, kind: str, name: str) -> None:
    (tmp_path / "b").mkdir()
    one = trace(tmp_path)
    (place,) = first_places([one], [trace(tmp_path / "b", **options)])
    assert (place.kind, place.name) == (kind, name)
    assert place.index == {"samples": 8, "input": 7}.get(kind)
    assert first_places([one], [trace(tmp_path / "b")]) == []


def test_a_renamed_module_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert first_places([trace(tmp_path)], [trace(tmp_path / "b", Renamed())]) == []


def test_a_second_group_of_equal_options_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, other = [trace(tmp_path)], [trace(tmp_path / "b", groups=({}, {}))]
    assert first_places(one, other) == first_places(other, one) == []


def test_samples_and_weights_do_not_follow_from_each_other(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = trace(tmp_path / "b", other_weights(), inputs_with(0, 0), indices=[4, 6, 7, 8])
    found = first_places([[], trace(tmp_path)], [[], other])
    assert [(place.kind, place.rank) for place in found] == [("samples", 1), ("initial weight", 1)]


def test_a_rank_without_a_trace_has_none(tmp_path: Path) -> None:
    trace(tmp_path)
    assert [len(entries) > 0 for entries in read_traces(tmp_path, 1, 2)] == [True, False]
    assert (tmp_path / FILE.format(0, 1)).is_file()
