import pickle
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import RunPlace, Settings, TopLevel

CONTENT = {
    "name": "a",
    "folder": None,
    "checkpoints": "${folder}/checkpoints",
    "size": 3,
    "model": {"width": "${size}", "other": "${no.such}"},
    "task": {"model": {"width": "${size}"}},
    "logger": {"w": {"key": "${oc.env:NO_SUCH_VARIABLE}"}},
}


def test_attributes_are_plain_values_with_references_resolved() -> None:
    cfg = Settings(CONTENT)
    assert (cfg.name, cfg.get("size"), cfg.task) == ("a", 3, {"model": {"width": 3}})
    assert cfg.written["task"] == {"model": {"width": "${size}"}}
    assert type(cfg.task) is dict


def test_what_is_not_there_has_the_default_of_the_top_level() -> None:
    cfg = Settings({})
    assert (cfg.seed, cfg.test, cfg.runs, cfg.resume) == (0, True, "runs", None)
    assert (cfg.data, cfg.optimizer) == ({}, None)
    assert {each.name for each in fields(TopLevel)} - {"tags"} <= get_type_hints(Settings).keys()


def test_a_reference_to_nothing_is_an_error_where_it_is_used() -> None:
    cfg = Settings(CONTENT)
    with pytest.raises(ConfigError, match=r"^model\.other: \$\{no\.such\} refers to nothing"):
        _ = cfg.model
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE is not set"):
        _ = cfg.logger


def test_settings_do_not_change() -> None:
    cfg = Settings(CONTENT)
    with pytest.raises(AttributeError, match="use changed"):
        cfg.name = "b"
    other = cfg.changed({"size": 4, "folder": "run"})
    assert (other.task["model"]["width"], cfg.task["model"]["width"]) == (4, 3)
    assert (other.place, cfg.folder) == (RunPlace(Path("run"), "run/checkpoints"), None)
    assert "logger" not in other.without("logger")
    assert "logger" in other


def test_settings_are_pickled_for_spawned_ranks() -> None:
    cfg = Settings(CONTENT)
    assert cfg.task
    assert pickle.loads(pickle.dumps(cfg)).written == cfg.written
