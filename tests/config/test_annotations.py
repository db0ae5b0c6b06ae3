import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Optional

import pytest
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from boltcutter.config.annotations import coerce, follow_annotations, matches, type_name
from boltcutter.config.settings import Settings
from boltcutter.config.values import as_yaml, has_written, read_value, read_yaml


class Tool: ...


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (1, float, True),
        (1.0, int, True),
        (2**64 - 1, int, True),
        (2**64, int | float, False),
        ("1", int | str, True),
        ("1", float | None, False),
        (True, int | bool, True),
        (True, float | Tool, False),
        ("a/b", Path, True),
        (3, Path, False),
        (3, str, True),
        ([1, 2], tuple[int, ...], True),
        ([1, "2"], Sequence[int], False),
        ([True], list[float], False),
        ({"a": "1"}, dict[str, int], False),
        ("auto", int | Literal["auto"], True),
        ("x", "an invalid annotation", True),
        (None, Any, True),
        ({"_target_": "boltcutter.assembly.data_values.of_data"}, dict[str, int], True),  # it returns Any
        ({"_target_": "torch.optim.Adam", "_partial_": True}, Optimizer, True),
        ({"_target_": "torch.optim.Adam", "_partial_": True}, Callable[..., Optimizer], True),
        ({"_target_": "torch.optim.Adam", "_partial_": True}, partial, True),
        ({"_target_": "torch.optim.Adam", "_partial_": True}, nn.Module, False),
        ({"_target_": "torch.nn.Linear", "_partial_": True}, dict[str, nn.Module], False),
        ({"a": {"_target_": "torch.nn.Linear", "_partial_": True}}, dict[str, nn.Module], True),
        ({"_target_": "torch.nn.ReLU", "_partial_": True}, nn.Module, False),  # which lacks nothing
    ],
)
def test_matches(value: Any, wanted: Any, expected: bool) -> None:
    assert matches(value, wanted) is expected


MADE = """
from __future__ import annotations
from torch import nn

def make() -> nn.Linear: ...
def make_any(): ...
def make_unknown() -> NoSuchClass: ...
def make_list() -> list[int]: ...
"""


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("make", nn.Module, True),
        ("make", nn.Linear, True),
        ("make", nn.ReLU, False),
        ("make", int, False),
        ("make_any", nn.ReLU, True),
        ("make_unknown", nn.ReLU, True),
        ("make_list", nn.ReLU, True),
    ],
)
def test_the_annotation_of_a_function_says_what_it_returns(
    monkeypatch: pytest.MonkeyPatch, name: str, wanted: Any, expected: bool
) -> None:
    made = ModuleType("made")
    exec(compile(MADE, "made.py", "exec"), made.__dict__)
    monkeypatch.setitem(sys.modules, "made", made)
    for value, kind in (({}, wanted), ([{}], list[wanted]), ({"a": {}}, dict[str, wanted])):
        filled = {"_target_": f"made.{name}"}
        placed = filled if value == {} else [filled] if isinstance(value, list) else {"a": filled}
        assert matches(placed, kind) is expected


def test_a_module_as_annotation_is_no_reason_to_warn() -> None:
    assert matches(1, lr_scheduler)
    assert coerce(1, lr_scheduler) == 1


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (int | None, "int | null"),
        (Optional[Path], "Path | null"),  # noqa: UP045
        (Literal["a", 1], "'a' | 1"),
        (Callable[[int], Tool], "Callable[[int], Tool]"),
        (dict[str, Path], "dict[str, Path]"),
        ("torch.nn.Module", "Module"),
        (type(None), "null"),
        (Tool, "Tool"),
    ],
)
def test_type_name(wanted: Any, text: str) -> None:
    assert type_name(wanted) == text


@pytest.mark.parametrize(
    ("made", "wanted", "expected"),
    [
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ("a/b", Path, Path("a/b")),
        ("x", int, "x"),
        ([1], "unreadable", [1]),
        (1000.0, str | int, 1000),
        (7, str, "7"),
    ],
)
def test_coerce(made: Any, wanted: Any, expected: Any) -> None:
    assert coerce(made, wanted) == expected
    assert type(coerce(made, wanted)) is type(expected)


def component(
    name: str,
    tags: list[str],
    rate: float,
    both: str | float,
    maybe: str | None,
    by_name: dict[str, str],
    by_rate: dict[float, int],
    flag: bool,
    place: Path,
    anything: Any,
) -> None:
    """Takes values of several types."""


@pytest.mark.parametrize(
    "text", ["1.10", "1e5", "007", "12:30", "0x1F", "1_000", "no", "on", "12e4567", "true", "NULL"]
)
def test_text_is_kept_as_typed_where_text_is_annotated(text: str) -> None:
    arguments = {"name": text, "tags": f"[{text}]", "by_name": f"{{{text}: {text}}}", "place": text}
    for source in (
        {key: read_value(key, value) for key, value in arguments.items()},
        read_yaml("\n".join(f"{key}: {value}" for key, value in arguments.items())),
    ):
        cfg = Settings(source)
        cfg = follow_annotations(cfg, component)
        assert cfg.written == {"name": text, "tags": [text], "by_name": {text: text}, "place": text}
        assert read_yaml(as_yaml(cfg.written)) == cfg.written


def test_numbers_and_booleans_stay_where_annotated() -> None:
    cfg = Settings(read_yaml("rate: 1e-3\nboth: 1e-3\nmaybe: NULL\nby_rate: {1e-3: 1}\nflag: off\nanything: 1.10"))
    cfg = follow_annotations(cfg, component)
    found = cfg.written
    assert found == {
        "rate": 0.001,
        "both": 0.001,
        "maybe": None,
        "by_rate": {0.001: 1},
        "flag": False,
        "anything": 1.1,
    }


def test_a_reference_gives_the_text_of_its_target() -> None:
    cfg = Settings({"other": read_value("other", "1.10"), "name": "${other}", "rate": "${other}"})
    cfg = follow_annotations(cfg, component)
    assert (cfg.name, cfg.get("rate")) == ("1.10", 1.1)


def test_keys_are_read_as_annotated_where_no_value_is_ambiguous() -> None:
    cfg = Settings({"by_rate": {"1e-3": 1}})
    cfg = follow_annotations(cfg, component)
    assert cfg.written == {"by_rate": {0.001: 1}}


def test_a_class_is_imported_only_for_what_is_ambiguous() -> None:
    unknown = {"_target_": "no_such_package.Thing", "rate": 0.1, "name": "${name}"}
    cfg = Settings({"name": read_value("name", "plain"), "tags": read_value("tags", "[1.10]"), "other": unknown})
    assert not has_written(cfg._content._get_node("other"))
    cfg = follow_annotations(cfg, component)
    assert cfg.written["tags"] == ["1.10"]
