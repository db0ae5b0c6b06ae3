"""Compose options of Hydra's groups, so that what their defaults lists select is in one file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.yaml_text import parse

Package = tuple[str, ...]
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.M)


@dataclass(frozen=True)
class Entry:
    """An entry of a defaults list.

    Args:
        group: The group that it selects from, from the root of the configuration; empty for the list's own group.
        option: What it selects; None for nothing.
        package: Where the values are placed, from the place of the list; None: where the group says.
        is_absolute: Whether the group is written with a slash.
        is_override: Whether it replaces what another list selects.
        is_optional: Whether the option may be missing.
    """

    group: str
    option: Any
    package: str | None = None
    is_absolute: bool = False
    is_override: bool = False
    is_optional: bool = False


def entries(values: dict[str, Any]) -> list[Entry]:
    """The entries of a file's defaults list, without ``_self_``."""
    return [_entry(each) for each in values.get("defaults") or [] if each != "_self_"]


def _entry(each: Any) -> Entry:
    key, option = next(iter(each.items())) if isinstance(each, dict) else ("", each)
    words = str(key).split()
    name, _, package = (words[-1] if words else "").partition("@")
    option = [_stem(one) for one in option] if isinstance(option, list) else _stem(option)
    if not isinstance(each, dict) and "@" in str(option):
        option, _, package = str(option).partition("@")
    if not isinstance(each, dict) and str(option).startswith("/"):  # a file of another group
        name, _, option = str(option).rpartition("/")
        package = package or "_global_"
    is_absolute = name.startswith("/")
    return Entry(
        name.strip("/"), option, package or None, is_absolute, "override" in words[:-1], "optional" in words[:-1]
    )


def _stem(option: Any) -> Any:
    return None if option is None else str(option).removesuffix(".yaml")


def is_plain(values: dict[str, Any]) -> bool:
    """Whether a file inherits from options of its own group only, and overrides them."""
    listed = values.get("defaults") or []
    own_is_last = "_self_" not in listed or listed[-1] == "_self_"
    return own_is_last and all(not e.group and e.package is None and not e.is_absolute for e in entries(values))


def expand(configs: Path, group: str, option: str, package: Package) -> list[tuple[Package, dict[str, Any]]]:
    """The values of an option and of what its defaults list selects, in the order in which they are merged.

    Args:
        configs: Folder of the configuration.
        group: Group of the option, such as ``model/optimizer``.
        option: Its name.
        package: Where its values are placed, unless the file says it.

    Raises:
        ConfigError: There is no such option.
    """
    file = configs / group / f"{option}.yaml"
    if not file.is_file():
        raise ConfigError(f"{configs.name}/{group}: no option {option}, which a list of defaults selects; correct it")
    return expand_file(configs, file, group, package)


def expand_file(configs: Path, file: Path, group: str, package: Package) -> list[tuple[Package, dict[str, Any]]]:
    """As ``expand``, of a file.

    Raises:
        ConfigError: What its list selects is not there.
    """
    text = file.read_text()
    values = parse(text) or {}
    own: Any = values
    if header := PACKAGE.search(text):
        package = () if header[1] == "_global_" else _package(header[1].removeprefix("_global_."), group)
    if isinstance(values, list):  # it replaces what is below it
        return [(package, own)]
    own = {key: value for key, value in values.items() if key != "defaults"}
    out = list[tuple[Package, dict[str, Any]]]()
    listed = values.get("defaults") or []
    for each in [*listed, *([] if "_self_" in listed else ["_self_"])]:
        if each == "_self_":
            out.append((package, own))
            continue
        entry = _entry(each)
        if entry.is_override or entry.option is None or entry.option == "???":
            continue
        below = entry.group if entry.is_absolute or not group or not entry.group else f"{group}/{entry.group}"
        below = below or group
        inner = tuple(entry.group.split("/")) if entry.group else ()
        place = inner if entry.is_absolute else (*package, *inner)
        if entry.package is not None:
            place = package if entry.package == "_here_" else _at(entry.package, package)
        for option in entry.option if isinstance(entry.option, list) else [entry.option]:
            if not (entry.is_optional and not (configs / below / f"{option}.yaml").is_file()):
                out += expand(configs, below, option, place)
    return out


def place_of(entry: Entry) -> Package:
    """Where a list at the root of the configuration places what an entry selects."""
    return _at(entry.package, ()) if entry.package is not None else tuple(entry.group.split("/"))


def _package(text: str, group: str) -> Package:
    return tuple(group.split("/")) if text == "_group_" else tuple(text.split("."))


def _at(text: str, package: Package) -> Package:
    if text == "_global_" or text.startswith("_global_."):
        return tuple(text.split(".")[1:])
    return (*package, *text.split("."))


def merged(contributions: list[tuple[Package, dict[str, Any]]]) -> dict[str, Any]:
    """The values of all contributions, from the root of the configuration."""
    found: dict[str, Any] = {}
    for package, values in contributions:
        nested: Any = values
        for key in reversed(package):
            nested = {key: nested}
        found = merge_all(found, nested)
    return found


def merge_all(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge as Hydra does: arguments stay, also below another ``_target_``."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge_all(out[key], value) if both else value
    return out
