from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from torch import nn
from torch.optim import Optimizer

from boltcutter.config.annotations import coerce, matches, type_name


class Tool: ...


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (1, float, True),
        (1.0, int, True),
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


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (int | None, "int | null"),
        (Optional[Path], "Path | null"),  # noqa: UP045
        (Literal["a", 1], "'a' | 1"),
        (Callable[[int], Tool], "Callable[[int], Tool]"),
        (dict[str, Path], "dict[str, Path]"),
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
