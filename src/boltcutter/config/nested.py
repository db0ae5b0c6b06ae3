"""Nested settings: the objects that a mapping of the configuration becomes for a constructor that takes one.

Research code takes ``cfg`` or ``hparams``. The annotation decides what it gets: a dataclass, an attrs class, a pydantic
model, a ``TypedDict``, a ``DictConfig`` or a namespace. Without an annotation it is a ``NestedSettings``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
from typing import Any, get_origin, get_type_hints, is_typeddict

from omegaconf import DictConfig

from boltcutter.config.errors import hint
from boltcutter.config.locate import parameters

NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


class MissingSettingError(AttributeError, KeyError):
    """A key that nested settings do not have was read.

    Args:
        settings: The mapping without the key.
        key: The key.
    """

    def __init__(self, settings: NestedSettings, key: str) -> None:
        super().__init__(f"{key} is not set", name=key, obj=settings)
        self.near = hint(key, settings)

    def __str__(self) -> str:
        return f"{self.name} is not set{self.near}"

    def __reduce__(self) -> Any:
        return MissingSettingError, (self.obj, self.name)

    def key_in(self, value: Any, path: str) -> str | None:
        """The dotted key that is missing, if the mapping without it is in ``value``, which is at ``path``."""
        if value is self.obj:
            return f"{path}.{self.name}"
        if not isinstance(value, dict | list):
            return None
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (self.key_in(inside, f"{path}.{key}") for key, inside in inner)), None)


class NestedSettings(dict[str, Any]):
    """A mapping whose keys are attributes as well, at any depth."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: as_settings(value) for key, value in values.items()})

    def __reduce__(self) -> Any:
        return NestedSettings, (dict(self),)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, key: str) -> Any:
        raise MissingSettingError(self, key)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def as_settings(value: Any) -> Any:
    """Return plain values in which each mapping is a ``NestedSettings``."""
    if type(value) is dict:
        return NestedSettings(value)
    return [as_settings(inner) for inner in value] if type(value) is list else value


def is_pydantic(kind: Any) -> bool:
    """Whether a class is a model of pydantic 2."""
    return inspect.isclass(kind) and hasattr(kind, "model_validate") and hasattr(kind, "model_fields")


def takes_mapping(kind: Any) -> bool:
    """Whether a mapping can be converted to a class."""
    if not inspect.isclass(kind) or get_origin(kind) is not None:  # list[int] is a class in Python 3.10
        return False
    is_known = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or is_pydantic(kind)
    return is_known or is_typeddict(kind) or issubclass(kind, (DictConfig, *NAMESPACES))


def fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The annotation of each field of a class that a mapping is converted to, and whether it must be given.

    A ``DictConfig`` or a namespace takes any keys, so it has none.
    """
    if issubclass(kind, (DictConfig, *NAMESPACES)) and not dataclasses.is_dataclass(kind):
        return {}
    try:
        hints = get_type_hints(kind)
    except Exception:  # evaluating annotations can raise anything
        hints = {}
    if is_typeddict(kind):
        required = vars(kind)["__required_keys__"]
        return {name: (wanted, name in required) for name, wanted in hints.items()}
    if is_pydantic(kind):
        found: dict[str, Any] = vars(kind).get("__pydantic_fields__") or {}
        return {str(f.alias or name): (f.annotation, f.is_required()) for name, f in found.items()}
    known = {n: p for n, p in parameters(kind).items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {n: (hints.get(n, p.annotation), p.default is p.empty) for n, p in known.items()}


def make(kind: type, values: dict[str, Any]) -> Any:
    """Convert a mapping, whose values are converted already, to an object of a class.

    Raises:
        ValueError: The class refuses a value.
    """
    if is_typeddict(kind):
        return values
    if is_pydantic(kind):
        return kind.model_validate(values)  # type: ignore[attr-defined]
    if issubclass(kind, NAMESPACES):
        return kind(**{key: as_settings(value) for key, value in values.items()})
    if issubclass(kind, DictConfig):
        return kind(values, flags={"allow_objects": True})
    return kind(**values)


def takes_other_keys(kind: type) -> bool:
    """Whether a class takes keys that are no fields."""
    if is_typeddict(kind):
        return False
    if is_pydantic(kind):
        config: dict[str, Any] = kind.model_config  # type: ignore[attr-defined]
        return config.get("extra", "ignore") == "allow" or bool(config.get("populate_by_name"))
    return not fields(kind)


def invalid_fields(kind: Any, values: dict[str, Any]) -> list[tuple[list[str], str]]:
    """The keys of values that a pydantic model refuses, and why."""
    from pydantic import ValidationError  # slow import

    try:
        kind.model_validate(values)
    except ValidationError as error:
        return [([str(part) for part in found["loc"]], found["msg"]) for found in error.errors()]
    return []
