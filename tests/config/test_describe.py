from pathlib import Path
from typing import Any, Literal

import pytest

from boltcutter.config.describe import describe
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings


class Tool:
    """A tool.

    Args:
        size: How large.
        kind: Which
            (one of two).
        path: Where.
    """

    def __init__(self, size: int, kind: Literal["saw", "axe"] = "saw", path: Path | None = None) -> None: ...


class Box:
    """A box."""

    def __init__(self, tool: Tool, **rest: Any) -> None: ...


def root(box: Box, n: int = 1, other: Tool | None = None) -> None:
    """The top.

    Args:
        box: A box.
        n: A number.
    """


def cfg(**top: Any) -> Settings:
    tool = {"_target_": f"{__name__}.Tool", "size": 3}
    return Settings({"box": {"_target_": f"{__name__}.Box", "tool": tool}} | top)


def test_every_key_has_its_value_type_and_documentation() -> None:
    lines = list(describe(cfg(n=2, other="${box.tool}"), root))
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    assert [cell.strip() for cell in cells[0]] == ["box", f"{__name__}.Box(…)", "Box", "A box."]
    assert [cell.strip() for cell in cells[2]] == ["box.tool.size", "3", "int", "How large."]
    assert [cell.strip() for cell in cells[3]] == ["box.tool.kind", "saw", "'saw' | 'axe'", "Which (one of two)."]
    assert any(line.startswith("other ") and "${box.tool}" in line for line in lines)
    starts = {line.index(line.split()[1]) for line in lines}
    assert len(starts) == 1


def test_one_place() -> None:
    assert list(describe(cfg(), root, "box.tool.size")) == ["box.tool.size  3  int  How large."]
    lines = list(describe(cfg(other="${box.tool}"), root, "other.kind"))
    assert lines == ["box.tool.kind  saw  'saw' | 'axe'  Which (one of two)."]


def test_a_place_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"box\.tol: no such key; did you mean box\.tool\?"):
        list(describe(cfg(), root, "box.tol"))
