import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Optional

import pytest
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from boltcutter.config.annotations import coerce, matches, type_name


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
    [([1, 2], tuple[float, ...], (1.0, 2.0)), ("a/b", Path, Path("a/b")), ("x", int, "x"), ([1], "unreadable", [1])],
)
def test_coerce(made: Any, wanted: Any, expected: Any) -> None:
    assert coerce(made, wanted) == expected
    assert type(coerce(made, wanted)) is type(expected)
