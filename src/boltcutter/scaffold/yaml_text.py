"""YAML text of other projects: read within limits, changed so that comments stay, and written."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from boltcutter.config.errors import ConfigError, one_line

MAX_SIZE, MAX_EXPANDED = 1 << 18, 1 << 18  # characters of a file, and its nodes
SCALARS = {"unicode": "tag:yaml.org,2002:str", "none": "tag:yaml.org,2002:null"}

Rows = list[tuple[str, str, str]]  # file, what it became, and a note


def read_yaml(file: Path) -> dict[str, Any]:
    """The contents of a YAML file.

    Raises:
        ConfigError: It is not valid.
    """
    try:
        found = parse(file.read_text()) if file.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}; correct it", kind="invalid_file") from error
    return found if isinstance(found, dict) else {}


class _Loader(yaml.SafeLoader):
    """Reads also the tags with which Python's tuples and other plain values are saved."""


def _construct_python(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    kind = suffix.partition(":")[0]
    if kind in ("tuple", "list") and isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    if kind == "dict" and isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if kind in ("str", "unicode", "int", "float", "bool", "none") and isinstance(node, yaml.ScalarNode):
        return loader.construct_object(yaml.ScalarNode(SCALARS.get(kind, f"tag:yaml.org,2002:{kind}"), node.value))
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"!!python/{suffix} is an object; write the path of its class as class_path or _target_",
        node.start_mark,
    )


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _construct_python)


def parse(text: str) -> Any:
    """Parse YAML; a Python tuple becomes a list.

    Raises:
        ValueError: It is not valid, or too large, with its aliases expanded.
        RecursionError: It is nested too deeply.
    """
    try:
        if len(text) > MAX_SIZE or expanded_size(yaml.compose(text, _Loader), {}) > MAX_EXPANDED:
            raise ValueError("too large")
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(one_line(error, 300)) from error


def expanded_size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """The number of nodes below one of a YAML document with its aliases expanded; infinite if it contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(expanded_size(part, known) for part in inner)
    return known[id(node)]


def dump(values: dict[str, Any]) -> str:
    """Format values as YAML, in their order."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=200)


def write_yaml(file: Path, text: str) -> None:
    """Write a file, in a new folder if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.lstrip("\n"))


def replace_all(text: str, replacements: dict[str, str]) -> str:
    """Replace each match of a pattern, in order, by a text that is taken as it is."""
    for pattern, new in replacements.items():
        text = re.sub(pattern, lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def without(text: str, *keys: str) -> str:
    """Remove top-level keys from YAML text, so that comments of the others stay."""
    for key in keys:
        text = re.sub(rf"^{re.escape(key)}:.*\n?(?:[ \t-].*\n?|(?:(?:#.*)?\n)+(?=[ \t-]))*", "", text, flags=re.M)
    return text
