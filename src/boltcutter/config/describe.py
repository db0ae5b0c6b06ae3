"""List every key that can be set, with its value, type and documentation."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from boltcutter.config.annotations import type_name
from boltcutter.config.errors import ConfigError, hint
from boltcutter.config.locate import locate, parameters
from boltcutter.config.settings import Settings
from boltcutter.config.values import format_value
from boltcutter.formatting import aligned
from boltcutter.project import BUILTIN_CONFIGS, Project

RUN = "boltcutter.assembly.assemble.Config"
COLUMNS = (None, 44, 36, 110)  # maximum widths of key, value, type and documentation in a terminal


def print_keys(project: Project, cfg: Settings, prefix: str, root: Callable[..., Any] | None = None) -> None:
    """Print a line for every key below ``prefix``, and the options of a group."""
    print("\n".join(describe(cfg, root or locate(RUN), prefix)))  # imports torch
    if project.has_group(prefix):
        print("", *project.help_lines(prefix), sep="\n")


def describe(cfg: Settings, root: Callable[..., Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for every key below ``prefix``: its value, type and documentation.

    Raises:
        ConfigError: There is no such key.
    """
    place = cfg.target_of(prefix)
    every = list(_describe(cfg.redacted, cfg.written, root, ""))
    rows = [row for row in every if not place or f"{row[0]}.".startswith(f"{place}.")]
    if not rows:
        raise ConfigError(f"{prefix}: no such key{hint(prefix, [row[0] for row in every])}", kind="unknown_key")
    limits = COLUMNS if len(rows) > 1 and sys.stdout.isatty() else (None,) * 4
    cut = [[_shorten(text, limit) for text, limit in zip(row, limits, strict=True)] for row in rows]
    yield from aligned(cut)


def _describe(node: Any, raw: Any, target: Callable[..., Any], path: str) -> Iterator[tuple[str, str, str, str]]:
    texts = argument_texts(target)
    for n, p in parameters(target).items():
        later = node.get("_partial_") and p.default is p.empty and n not in node
        if later or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        is_unset = p.default is p.empty or str(p.default) == "<factory>"  # of a dataclass
        value, written = node.get(n, "" if is_unset else p.default), raw.get(n)
        yield f"{path}{n}", _summary(value, written), type_name(p.annotation), texts.get(n, "")
        if isinstance(value, dict) and not isinstance(written, str):
            yield from _describe_map(value, written, f"{path}{n}")


def _describe_map(node: Any, raw: Any, path: str) -> Iterator[tuple[str, str, str, str]]:
    if "_target_" in node:
        yield from _describe(node, raw, locate(str(node["_target_"])), f"{path}.")
        return
    for key, value in node.items():
        if isinstance(value, dict) and "_target_" in value and not isinstance(raw[key], str):
            target = locate(str(value["_target_"]))
            text = (inspect.getdoc(target) or "").split("\n")[0]
            yield f"{path}.{key}", _summary(value, raw[key]), getattr(target, "__name__", ""), text
            yield from _describe(value, raw[key], target, f"{path}.{key}.")


def _summary(value: Any, written: Any) -> str:
    """Format a value on one line; a reference to an object stays unresolved."""
    if not isinstance(value, dict):
        return format_value(value)
    if isinstance(written, str):
        return written
    return f"{value['_target_']}(…)" if "_target_" in value else f"{{{', '.join(map(str, value))}}}"


def _shorten(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def argument_texts(target: Callable[..., Any]) -> dict[str, str]:
    """Parse the ``Args:`` sections of Google-style docstrings of a class and its bases, or of a function.

    The settings of a run are explained in ``train.yaml``.
    """
    sources = [target, *(f for c in getattr(target, "__mro__", ()) for f in (vars(c).get("__init__"), c))]
    text = "\n".join(inspect.getdoc(source) or "" for source in sources)
    found = re.findall(r"^ {4}(\w+)(?: \([^\n]*?\))?:\s*((?:.|\n(?= {5,}|\n {5,}))*)", text, re.M)
    if f"{target.__module__}.{target.__qualname__}" == RUN:
        found += re.findall(r"^(?:  )?(\w+):.* # (.*)", (BUILTIN_CONFIGS / "train.yaml").read_text(), re.M)
    return {name: " ".join(text.split()) for name, text in reversed(found)}
