"""References such as ``${data.num_classes}``, of which the settings of a data module of any kind have no value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from boltcutter.config.errors import ConfigError, Mistake
from boltcutter.config.instantiate import build
from boltcutter.config.locate import locate, parameters
from boltcutter.config.settings import Settings

REFERENCE = re.compile(r"\$\{data\.(\w+)\}")
BUILT: ContextVar[Any] = ContextVar("built", default=None)  # the data module that a task is built for


def of_data(name: str, data: Any) -> Any:
    """Return an attribute of the data module: of the one that the task is built for, else of one that is built for it.

    Args:
        name: The attribute, such as ``tokenizer`` or ``hparams.size``.
        data: Settings of the data module.

    Raises:
        ConfigError: It does not have the attribute.
    """
    owner = BUILT.get()
    if owner is None:
        with isolate_rng():
            owner = build(Settings({"data": data}).data, "data")
    try:
        return attrgetter(name)(owner)
    except AttributeError as error:
        cls = type(owner).__name__
        raise ConfigError(f"data: {cls} has no attribute {name} when it is made; set it in its constructor") from error


def node_of(name: str) -> dict[str, Any]:
    """The setting whose value is that attribute of the data module."""
    target = f"{of_data.__module__}.{of_data.__name__}"
    return {"_target_": target, "_recursive_": False, "name": name, "data": "${data}"}


def complete_references(cfg: Settings, find_mistakes: Callable[[Settings], list[Mistake]]) -> Settings:
    """Return the configuration with values to which it refers, but which only the class of the data has.

    A value is the default of an argument of that name, or else an attribute of the class or of the data module, which
    takes the place of the reference. An attribute that is an object, such as a tokenizer, is that of the data module
    which is built with the task.

    Args:
        cfg: The configuration.
        find_mistakes: Lists the mistakes in a configuration; the data is made only without any in its settings.

    Raises:
        ConfigError: There is neither, or the settings of the data have mistakes.
    """
    settings = cfg.written
    data = settings["data"]
    wanted = {*REFERENCE.findall(str(settings))}
    missing = sorted(name for name in wanted if data and data.get(name) is None)
    try:
        target = locate(str(data["_target_"])) if missing else None
    except (ConfigError, KeyError):  # which is reported with the other mistakes
        return cfg
    if not missing:
        return cfg
    known = parameters(target)
    defaults = {
        name: known[name].default
        for name in missing
        if name not in data and name in known and known[name].default is not known[name].empty
    }
    cfg = cfg.changed({"data": {name: value for name, value in defaults.items() if _is_plain(value)}})
    missing = [name for name in missing if cfg.data.get(name) is None]
    if hasattr(target, "infer_settings"):
        # Null is inferred from the data: what remains is no argument of its class.
        missing = [name for name in missing if name not in cfg.data]
    found = _read(target, missing)
    others = {key: value for key, value in settings.items() if key != "data"}
    if len(found) < len(missing):
        without = cfg.changed(dict(_replaced(others, dict.fromkeys(missing))))
        if mistakes := [mistake for mistake in find_mistakes(without) if str(mistake).startswith("data.")]:
            raise ConfigError(*mistakes)
        owner = build(cfg.data, "data")
        found = _objects(owner, missing) | _read(owner, missing) | found
    if unknown := [name for name in missing if name not in found]:
        raise ConfigError(*(_describe(name, settings, target) for name in unknown), kind="unresolved_reference")
    return cfg.changed(dict(_replaced(others, found)))


def _read(owner: Any, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with suppress(Exception):  # a property may need what `setup` makes
            value = getattr(owner, name)
            if value is not None and _is_plain(value):
                found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _objects(owner: Any, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with suppress(Exception):
            if (value := getattr(owner, name)) is not None and not inspect.ismethod(value):
                found[name] = node_of(name)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _replaced(node: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries that refer to one of the values, with the value in place of the reference."""
    for key, inner in node.items():
        found = REFERENCE.fullmatch(inner) if isinstance(inner, str) else None
        if found and found[1] in values:
            yield key, values[found[1]]
        elif isinstance(inner, dict) and (below := dict(_replaced(inner, values))):
            yield key, below


def _places(node: Any, name: str, prefix: str = "") -> Iterator[str]:
    """Settings that refer to a value of the data."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _places(inner, name, f"{prefix}.{key}".lstrip("."))
    elif name in REFERENCE.findall(str(node)):
        yield prefix


def _describe(name: str, settings: dict[str, Any], target: Any) -> str:
    places, cls = [*_places(settings, name)], getattr(target, "__name__", str(target))
    what = "is null, and" if name in settings["data"] else f"is no argument of {cls}, and"
    return (
        f"{places[0]}: ${{data.{name}}} {what} no attribute that its constructor sets; write self.{name} = … there, or "
        f"give {' '.join(f'{place}=…' for place in places)}"
    )
