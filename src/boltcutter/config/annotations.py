"""Match values of the configuration against type annotations."""

from __future__ import annotations

import inspect
import re
import types
import warnings
from collections.abc import Collection, Iterator
from functools import lru_cache, partial, reduce
from operator import or_
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, StrictBool, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import adapter, is_left_out, locate, parameters

UNKNOWN = object()


def matches(value: Any, wanted: Any) -> bool:
    """Whether ``value``, once instantiated, matches the annotation ``wanted``."""
    placeholder = _placeholder(value)
    if placeholder is UNKNOWN:
        return True
    try:
        try:
            adapted = _strict_adapter(wanted)
        except TypeError:  # it cannot be hashed
            adapted = _strict_adapter.__wrapped__(wanted)
        adapted.validate_python(placeholder)
    except ValidationError:
        return False
    except Exception:  # an annotation that pydantic cannot read: the call itself will fail if it does not match
        return True
    return True


def _strictly(wanted: Any) -> Any:
    """Make an annotation strict: str and bool are no numbers, and only bool is a bool."""
    if wanted in (int, float):
        return Annotated[wanted, BeforeValidator(_number)]
    if wanted is bool:
        return StrictBool
    origin, inner = get_origin(wanted), tuple(map(_strictly, get_args(wanted)))
    if origin in (Union, types.UnionType):
        return reduce(or_, inner)
    return origin[inner] if is_subclass(origin, Collection) else wanted


def _number(value: Any) -> Any:
    if isinstance(value, str | bool):
        raise ValueError(f"{value!r} is not a number")
    if is_too_large(value):
        raise ValueError(f"{value} has more than 64 bits")
    return value


def is_too_large(value: Any) -> bool:
    """Whether an integer has more than 64 bits, which neither torch nor NumPy take."""
    return isinstance(value, int) and not -(2**63) <= value < 2**64  # seeds of torch have no sign


def _placeholder(value: Any) -> Any:
    """``value`` with a placeholder of the right class wherever an object will be instantiated."""
    if isinstance(value, list):
        items = [_placeholder(v) for v in value]
        return UNKNOWN if any(item is UNKNOWN for item in items) else items
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        filled = {k: _placeholder(v) for k, v in value.items() if not is_left_out(v)}
        return UNKNOWN if any(item is UNKNOWN for item in filled.values()) else filled
    try:
        target = locate(value["_target_"])
    except ConfigError:
        return UNKNOWN  # reported elsewhere
    if value.get("_partial_"):
        missing = any(p.default is p.empty and n not in value for n, p in parameters(target).items())
        return _PartialCall(target) if missing and inspect.isclass(target) else partial(target)
    returned = target if inspect.isclass(target) else getattr(target, "__annotations__", {}).get("return")
    if isinstance(returned, str):
        try:
            returned = get_type_hints(target).get("return")
        except Exception:  # evaluating annotations of another module may raise anything
            return UNKNOWN
    # Python 3.10 takes list[int] for a class.
    return UNKNOWN if not inspect.isclass(returned) or get_args(returned) or adapter(returned) else _Instance(returned)


class _Instance:
    """Placeholder for an instance of a class: it has the class and its attributes, and may be called."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Never called; objects whose class is not known to be callable are accepted for callables."""


class _PartialCall(partial[Any]):
    """Placeholder for a call that lacks arguments, such as an optimizer without parameters; an instance of its class.

    Modules annotate such an argument as a callable or as the class.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.func


def coerce(value: Any, wanted: Any) -> Any:
    """Convert plain data to the annotated type, such as a Path, tuple or float; unchanged if it cannot be converted."""
    try:
        typed = _adapter(wanted).validate_python(value)
    except (ValidationError, PydanticUserError):
        return value
    return value if isinstance(typed, Iterator) else typed


def _adapter(wanted: Any) -> TypeAdapter[Any]:
    with warnings.catch_warnings():
        # It warns about an annotation that is no type, such as the module torch.optim.lr_scheduler.
        warnings.filterwarnings("ignore", "(?s).* is not a Python type", UserWarning)
        return TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True))


@lru_cache(1000)
def _strict_adapter(wanted: Any) -> TypeAdapter[Any]:
    return _adapter(_strictly(wanted))


def is_subclass(origin: Any, base: type) -> bool:
    """Whether ``origin`` is a class and a subclass of ``base``."""
    return inspect.isclass(origin) and issubclass(origin, base)


def literal_values(wanted: Any) -> list[Any]:
    """Return the values of every Literal inside an annotation."""
    inner = get_args(wanted)
    return list(inner) if get_origin(wanted) is Literal else [c for a in inner for c in literal_values(a)]


def type_name(wanted: Any) -> str:
    """Format an annotation for error messages, such as ``int | null``."""
    if get_origin(wanted) in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in get_args(wanted))
    if get_origin(wanted) is Literal:
        return " | ".join(map(repr, get_args(wanted)))
    if wanted is type(None):
        return "null"
    if inspect.isclass(wanted) and not get_args(wanted):
        return wanted.__qualname__
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(wanted))
