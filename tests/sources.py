"""The source, parsed once for all tests that read it; they are in one group, so that one process runs them."""

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted(SRC.rglob("*.py"))

in_one_process = pytest.mark.xdist_group("sources")


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(parsed(file)))
