from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.hydra_defaults import Entry, entries, expand, is_plain, merged

FILES = {
    "model/small.yaml": "defaults: [base, {encoder: default}, {/optim@optimizer: sgd}, _self_]\n"
    "width: 2\nencoder: {d: 9}\n",
    "model/base.yaml": "width: 1\ndepth: 3\n",
    "model/encoder/default.yaml": "_target_: E\nd: 1\nk: 2\n",
    "model/encoder/deep.yaml": "# @package model.inner\n_target_: D\n",
    "model/first.yaml": "defaults: [_self_, base]\nwidth: 7\n",
    "model/wide.yaml": "# @package _global_\ndefaults: [/model/base, {optional encoder: absent}]\n"
    "model: {width: 8}\nseed: 1\n",
    "optim/sgd.yaml": "_target_: S\nlr: 0.1\n",
}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_groups_inside_of_groups_are_merged_in_order(configs: Path) -> None:
    assert merged(expand(configs, "model", "small", ("model",))) == {
        "model": {
            "width": 2,
            "depth": 3,
            "encoder": {"_target_": "E", "d": 9, "k": 2},
            "optimizer": {"_target_": "S", "lr": 0.1},
        }
    }
    assert merged(expand(configs, "model", "first", ("model",)))["model"] == {"width": 1, "depth": 3}


def test_packages(configs: Path) -> None:
    assert merged(expand(configs, "model/encoder", "deep", ("model", "encoder"))) == {
        "model": {"inner": {"_target_": "D"}}
    }
    assert merged(expand(configs, "model", "wide", ("model",))) == {
        "width": 1,
        "depth": 3,
        "model": {"width": 8},
        "seed": 1,
    }


def test_an_option_that_is_not_there_is_named(configs: Path) -> None:
    (configs / "model" / "bad.yaml").write_text("defaults: [{encoder: none}]\n")
    with pytest.raises(ConfigError, match="model/encoder: no option none"):
        expand(configs, "model", "bad", ("model",))


def test_entries_of_a_defaults_list() -> None:
    values = {
        "defaults": ["base.yaml", "_self_", {"override /model": "x"}, {"optional local": "y"}, {"/a/b@c": None}, "d@e"]
    }
    assert entries(values) == [
        Entry("", "base"),
        Entry("model", "x", is_absolute=True, is_override=True),
        Entry("local", "y", is_optional=True),
        Entry("a/b", None, "c", is_absolute=True),
        Entry("", "d", "e"),
    ]


@pytest.mark.parametrize(
    ("defaults", "plain"),
    [(["base"], True), (["base", "_self_"], True), (["_self_", "base"], False), ([{"a": "b"}], False)],
)
def test_what_is_merged(defaults: list[object], plain: bool) -> None:
    assert is_plain({"defaults": defaults}) == plain
