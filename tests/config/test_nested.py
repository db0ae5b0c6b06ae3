import argparse
import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal, Optional, TypedDict

import pytest
from omegaconf import DictConfig
from pydantic import BaseModel, Field
from torch import nn

from boltcutter.config.annotations import coerce
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build, find_mistakes
from boltcutter.config.nested import NestedSettings
from boltcutter.config.settings import Settings


@dataclass
class Block:
    width: int = 8
    name: str = "b"


@dataclass
class Config:
    size: int
    block: Block = field(default_factory=Block)
    blocks: list[Block] = field(default_factory=list)


class Typed(TypedDict):
    size: int


class Model(BaseModel):
    size: int = Field(gt=0)


class Color(Enum):
    RED = "red"
    BLUE = 2


class Network:
    def __init__(
        self,
        cfg: Optional[Config] = None,  # noqa: UP045
        model: Optional[Model] = None,  # noqa: UP045
        either: Block | Config | None = None,
        color: Color = Color.RED,
        colors: list[Color] | None = None,
        names: dict[int, str] | None = None,
        layer: type[nn.Module] = nn.ReLU,
        function: Callable[..., Any] = len,
        one: Literal[1, 2] = 1,
    ) -> None:
        self.cfg, self.model, self.either, self.color, self.colors = cfg, model, either, color, colors
        self.names, self.layer, self.function, self.one = names, layer, function, one


def root(net: Network) -> None:
    """Takes a network."""


@pytest.mark.parametrize("kind", [Model, DictConfig, argparse.Namespace, SimpleNamespace, Any])
def test_a_mapping_becomes_what_is_annotated(kind: Any) -> None:
    made = coerce({"size": 3}, kind)
    assert made.size == 3
    assert kind is Any or isinstance(made, kind)


def test_nested_dataclasses() -> None:
    made = coerce({"size": 3, "block": {"width": 2}, "blocks": [{"name": "c"}]}, Config | None)
    assert made == Config(3, Block(2), [Block(name="c")])
    assert coerce({"size": 3}, Typed) == {"size": 3}


def test_settings_have_attributes_at_any_depth() -> None:
    made = coerce({"a": {"b": 1}, "c": [{"d": 2}]}, Any)
    assert (made.a.b, made["a"]["b"], made.c[0].d) == (1, 1, 2)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert isinstance(copy.deepcopy(made).a, NestedSettings)
    with pytest.raises(AttributeError, match=r"^bb is not set"):
        _ = made.bb
    with pytest.raises(KeyError, match=r"^bb is not set"):
        _ = made.a["bb"]
    assert not hasattr(made, "bb")
    assert made.get("bb") is None


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"cfg": {}}, r"net\.cfg\.size: missing"),
        ({"cfg": {"size": "x"}}, r"net\.cfg\.size=x: expected int"),
        ({"cfg": {"size": 1, "block": {"widht": 1}}}, r"net\.cfg\.block\.widht: .*width"),
        ({"cfg": {"size": 1, "blocks": [{}, {"width": "x"}]}}, r"net\.cfg\.blocks\.1\.width=x: expected int"),
        ({"model": {"size": -1}}, r"net\.model\.size: .*greater than 0"),
        ({"cfg": 5}, r"net\.cfg=5: expected Config"),
        ({"either": {"q": 1}}, r"net\.either\.q: Block has no such field"),
        ({"color": "green"}, r"net\.color=green: expected Color \(RED, BLUE\)$"),
        ({"names": {"a": "b"}}, r"net\.names\.a: the key a is no int; rename it"),
        (
            {"layer": "torch.nn.GELU"},
            r"net\.layer=.*; write net\.layer\._target_=torch\.nn\.GELU net\.layer\._partial_=true",
        ),
        (
            {"layer": {"_target_": "torch.optim.SGD", "_partial_": True}},
            r"net\.layer=torch\.optim\.SGD: expected type\[Module\]",
        ),
        ({"function": "torch.relu"}, r"net\.function=torch\.relu: .*; write net\.function\._target_="),
        ({"one": "1"}, r"net\.one='1': expected 1 \| 2; did you mean 1\?"),
    ],
)
def test_a_mistake_inside_has_its_full_path(given: dict[str, Any], mistake: str) -> None:
    net = {"_target_": f"{__name__}.Network", **given}
    found = find_mistakes(Settings({"net": net}), root)
    assert len(found) == 1
    assert re.match(mistake, found[0])


def test_build() -> None:
    net = build({"_target_": f"{__name__}.Network", "cfg": {"size": 1}, "model": {"size": 2}})
    assert (net.cfg, net.model) == (Config(1), Model(size=2))


@pytest.mark.parametrize(
    ("key", "given", "made"),
    [
        ("either", {"size": 3}, Config(3)),  # the class that has these fields
        ("either", {"width": 3}, Block(3)),
        ("color", "red", Color.RED),
        ("color", "BLUE", Color.BLUE),  # by name, as in structured configurations and Lightning CLI
        ("colors", ["BLUE", "red"], [Color.BLUE, Color.RED]),
        ("layer", {"_target_": "torch.nn.GELU", "_partial_": True}, nn.GELU),
    ],
)
def test_classes_and_members_are_found(key: str, given: Any, made: Any) -> None:
    net = {"_target_": f"{__name__}.Network", key: given}
    assert find_mistakes(Settings({"net": net}), root) == []
    assert getattr(build(net), key) == made


class Reader:
    def __init__(self, cfg) -> None:  # type: ignore[no-untyped-def]
        self.rate = cfg.optimizer.rate
        self.sizes = [block["size"] for block in cfg.blocks]


@pytest.mark.parametrize(
    ("cfg", "mistake"),
    [
        ({"optimizer": {"rates": 1}}, r"net\.cfg\.optimizer\.rate: not set.*rates"),
        ({}, r"net\.cfg\.optimizer: not set.*\+net\.cfg\.optimizer="),
        ({"optimizer": {"rate": 1}, "blocks": [{"size": 1}, {}]}, r"net\.cfg\.blocks\.1\.size: not set"),
    ],
)
def test_a_key_that_is_read_but_not_set(cfg: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake):
        build({"_target_": f"{__name__}.Reader", "cfg": cfg}, "net")
