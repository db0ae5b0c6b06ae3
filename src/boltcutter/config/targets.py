"""Compare the targets of two calls as classes: one class has several dotted paths."""

from __future__ import annotations

import inspect
from typing import Any

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import locate

TRAINER = "Trainer"  # whose subclasses take its arguments


def same_target(one: Any, other: Any) -> bool:
    """Whether two dotted paths name the same class or function."""
    if one == other:
        return True
    # Aliases have the same name, which decides without an import in almost all cases.
    return str(one).rpartition(".")[2] == str(other).rpartition(".")[2] and _locate(one) is _locate(other)


def keeps_arguments(old: Any, new: Any) -> bool:
    """Whether ``new`` takes the arguments of ``old``: the same target, or a subclass of Lightning's trainer."""
    if old is None or same_target(old, new):
        return old is not None
    if str(old).rpartition(".")[2] != TRAINER:
        return False
    before, now = _locate(old), _locate(new)
    return inspect.isclass(before) and inspect.isclass(now) and issubclass(now, before)


def _locate(path: Any) -> Any:
    """The target; the path itself if it does not exist, which is reported when values are checked."""
    try:
        return locate(str(path))
    except ConfigError:
        return path
