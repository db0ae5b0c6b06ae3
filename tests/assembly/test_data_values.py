import json
from pathlib import Path
from typing import Any

import pytest

from boltcutter.assembly.assemble import _build_data_and_task, read_config
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build
from boltcutter.project import Project

PROJECT = Project.find(__file__)
SOURCE = """
import lightning as L
import torch


class Argument(L.LightningDataModule):
    def __init__(self, num_classes: int = 3, shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()


class Attribute(L.LightningDataModule):
    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.shape = (4,)


class Property(L.LightningDataModule):
    num_classes = property(lambda self: 3)
    shape = property(lambda self: (4,))


class Holder(L.LightningDataModule):
    num_classes, made = 3, 0

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.index, self.noise = (4,), {"size": 5}, torch.rand(1)
        Holder.made += 1


class Holding(L.LightningModule):
    def __init__(self, index: dict[str, int], size: int, rate: float = 0.1) -> None:
        super().__init__()
        self.index, self.size, self.weight = index, size, torch.rand(1)


class Later(L.LightningDataModule):
    num_classes = property(lambda self: len(self.found))
    shape = None
"""


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "others_data.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def compose(name: str, *overrides: str) -> Any:
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"_target_: others_data.{name}\n")
        return read_config(PROJECT, [f"data={file}", "model=mlp", "logger=null", *overrides])

    return compose


@pytest.mark.parametrize("name", ["Argument", "Attribute", "Property"])
def test_a_value_that_only_the_class_of_the_data_has_is_used(compose: Any, name: str) -> None:
    cfg = compose(name)
    assert [*cfg.model["input_shape"]] == [4]
    assert (
        cfg.model["num_classes"]
        == cfg.task["metrics"]["accuracy"]["num_classes"]
        == cfg.task["metrics"]["f1"]["num_classes"]
        == 3
    )


def test_a_value_that_is_given_counts(compose: Any) -> None:
    assert compose("Argument", "data.num_classes=5").model["num_classes"] == 5
    assert compose("Attribute", "model.num_classes=5").model["num_classes"] == 5


def test_settings_without_a_value_are_listed(compose: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("Later")
    first, second = sorted(str(caught.value).splitlines())
    assert first.startswith("model.input_shape: ${data.shape}")
    assert all(text in second for text in ("Later", "self.num_classes", "model.num_classes=", "task.metrics.f1.num_cl"))
    values = ["model.num_classes", "task.metrics.accuracy.num_classes", "task.metrics.f1.num_classes"]
    assert compose("Later", "model.input_shape=[4]", *(f"{value}=3" for value in values)).model["num_classes"] == 3


def test_a_mistake_in_the_settings_of_the_data_is_what_is_reported(compose: Any) -> None:
    with pytest.raises(ConfigError, match=r"^data\.batch_size"):
        compose("Attribute", "+data.batch_size=8")


def test_an_object_is_that_of_the_data_which_the_task_is_built_with(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"_target_": "others_data.Holding", "index": "${data.index}", "size": "${data.num_classes}"}
    (tmp_path / "holding.yaml").write_text(json.dumps(task))
    cfg = compose("Holder", f"task={tmp_path / 'holding.yaml'}", "model=null")
    assert cfg.task["size"] == 3
    assert cfg.task["index"]["_target_"] == "boltcutter.assembly.data_values.of_data"
    data, made = _build_data_and_task(cfg)
    assert made.index is data.index
    assert build(cfg.task, "task").index == data.index  # where no data is built, such as for an estimate
    monkeypatch.setitem(cfg.task["index"], "name", "vocab")
    with pytest.raises(ConfigError, match="data: Holder has no attribute vocab when it is made"):
        build(cfg.task, "task")
