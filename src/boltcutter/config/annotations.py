"""Match values of the configuration against type annotations."""

from __future__ import annotations

import inspect
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache, lru_cache, partial, reduce
from operator import or_
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, ConfigDict, StrictBool, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import adapter, locate, parameters
from boltcutter.config.nested import as_settings, fields, make, takes_mapping, takes_other_keys
from boltcutter.config.settings import Settings
from boltcutter.config.values import SPECIAL, Written, children, has_written, is_map, raw_node, read_scalar

UNKNOWN = object()


def matches(value: Any, wanted: Any, *, numbers_as_text: bool = True) -> bool:
    """Whether ``value``, once instantiated, matches the annotation ``wanted``; text is also given as a number."""
    placeholder = _placeholder(value, wants_class(wanted))
    if placeholder is UNKNOWN:
        return True
    if takes_mapping(wanted):  # whose fields are checked one by one
        return isinstance(placeholder, wanted) or isinstance(value, dict)
    try:
        try:
            adapted = _strict_adapter(wanted, numbers_as_text)
        except TypeError:  # it cannot be hashed
            adapted = _strict_adapter.__wrapped__(wanted, numbers_as_text)
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
    if is_subclass(wanted, Enum):
        return Annotated[wanted, BeforeValidator(partial(_as_member, wanted))]
    origin, inner = get_origin(wanted), tuple(map(_strictly, get_args(wanted)))
    if origin in (Union, types.UnionType):
        return reduce(or_, inner)
    return origin[inner] if is_subclass(origin, Collection) else wanted


def member_named(wanted: Any, name: Any) -> Any:
    """The member of an enumeration in an annotation that a text names and that none has as its value; None if none."""
    for kind in (wanted, *get_args(wanted)):
        if is_subclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
            return None if any(each.value == name for each in kind) else kind[name]
    return None


def _as_member(wanted: Any, value: Any) -> Any:
    member = member_named(wanted, value)
    return value if member is None else member


def wants_class(wanted: Any) -> bool:
    """Whether an annotation takes a class itself, such as ``type[nn.Module]``."""
    return any(get_origin(kind) is type for kind in (wanted, *get_args(wanted)))


def _number(value: Any) -> Any:
    if isinstance(value, str | bool):
        raise ValueError(f"{value!r} is not a number")
    if is_too_large(value):
        raise ValueError(f"{value} has more than 64 bits")
    return value


def is_too_large(value: Any) -> bool:
    """Whether an integer has more than 64 bits, which neither torch nor NumPy take."""
    return isinstance(value, int) and not -(2**63) <= value < 2**64  # seeds of torch have no sign


def _placeholder(value: Any, as_class: bool = False) -> Any:
    """``value`` with a placeholder of the right class wherever an object will be instantiated."""
    if isinstance(value, list):
        items = [_placeholder(v) for v in value]
        return UNKNOWN if any(item is UNKNOWN for item in items) else items
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        filled = {k: _placeholder(v) for k, v in value.items()}
        return UNKNOWN if any(item is UNKNOWN for item in filled.values()) else filled
    try:
        target = locate(value["_target_"])
    except ConfigError:
        return UNKNOWN  # reported elsewhere
    if value.get("_partial_"):
        if as_class and inspect.isclass(target) and value.keys() == {"_target_", "_partial_"}:
            return target
        missing = any(p.default is p.empty and n not in value for n, p in parameters(target).items())
        return _PartialCall(target) if missing and inspect.isclass(target) else partial(target)
    returned = target if inspect.isclass(target) else getattr(target, "__annotations__", {}).get("return")
    if isinstance(returned, str):
        try:
            returned = get_type_hints(target).get("return")
        except Exception:  # evaluating annotations of another module may raise anything
            return UNKNOWN
    if returned in (Any, object):  # of which Python 3.11 takes Any for a class
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


def nested_class(wanted: Any, given: Collection[str] = ()) -> type | None:
    """The class in an annotation that a mapping is converted to; None if it stays a mapping.

    Of several, it is the first that has the fields of the ``given`` keys, or else the first.
    """
    if get_origin(wanted) in (Union, types.UnionType):
        found = [kind for member in get_args(wanted) if (kind := nested_class(member))]
        return next(
            (kind for kind in found if takes_other_keys(kind) or {*given} <= {*fields(kind)}), [*found, None][0]
        )
    origin = get_origin(wanted) or wanted
    return origin if takes_mapping(origin) else None


def holds_nested(wanted: Any) -> bool:
    """Whether an annotation has a class that a mapping is converted to, also in a container."""
    return nested_class(wanted) is not None or any(holds_nested(inner) for inner in get_args(wanted))


def coerce(value: Any, wanted: Any) -> Any:
    """Convert plain data to the annotated type, such as a Path, tuple or float; unchanged if it cannot be converted.

    A mapping becomes an object of an annotated class of settings, and has its keys as attributes without an annotation.

    Raises:
        ValueError: A class of settings refuses a value.
    """
    if wanted is Any:
        return as_settings(value)
    if not isinstance(value, dict | list | str | int | float | None):
        return value  # an object
    if isinstance(value, dict | list):
        kind = nested_class(wanted, value) if isinstance(value, dict) else None
        receiver: Any = kind or wanted
        if isinstance(value, dict):
            value = {key: _inner(inner, element(receiver, key)) for key, inner in value.items()}
        else:
            value = [_inner(inner, element(receiver, index)) for index, inner in enumerate(value)]
        if kind:
            return make(kind, value)
    if (named := member_named(wanted, value)) is not None:
        return named
    for numbers_as_text in (False, True):  # 1e3 is an integer for ``str | int``, and a text only for ``str``
        with suppress(ValidationError, PydanticUserError):
            typed = _adapter(wanted, numbers_as_text).validate_python(value)
            return value if isinstance(typed, Iterator) else typed
    return value


def _inner(value: Any, wanted: Any) -> Any:
    return value if wanted is Any else coerce(value, wanted)


def _adapter(wanted: Any, numbers_as_text: bool) -> TypeAdapter[Any]:
    with warnings.catch_warnings():
        # It warns about an annotation that is no type, such as the module torch.optim.lr_scheduler.
        warnings.filterwarnings("ignore", "(?s).* is not a Python type", UserWarning)
        config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=numbers_as_text)
        return TypeAdapter(wanted, config=config)


@lru_cache(1000)
def _strict_adapter(wanted: Any, numbers_as_text: bool) -> TypeAdapter[Any]:
    return _adapter(_strictly(wanted), numbers_as_text)


def is_subclass(origin: Any, base: type) -> bool:
    """Whether ``origin`` is a class and a subclass of ``base``."""
    return inspect.isclass(origin) and issubclass(origin, base)


def follow_annotations(cfg: Settings, root: Callable[..., Any]) -> Settings:
    """Return the settings with texts in place of values, such as 1.10 of 1.1, wherever the annotation takes text only.

    Args:
        cfg: Settings.
        root: Callable whose parameters are the top-level keys.
    """
    if not cfg.has_texts:
        return cfg
    node = DictConfig(cfg.texts)
    _follow_all(node, root)
    return Settings(node)


def _follow_all(cfg: DictConfig, root: Callable[..., Any]) -> None:
    known = parameters(root)
    references = list[tuple[Any, Any]]()
    for key, inner in sorted(children(cfg), key=lambda child: child[0] not in known or is_map(child[1])):
        if has_written(inner):  # values first, which components refer to
            _follow(inner, known[key].annotation if key in known else Any, references)
    for node, wanted in references:  # now that the values themselves follow their own annotations
        with suppress(OmegaConfBaseException, RecursionError):  # reported when the reference is resolved
            found = node._dereference_node()
            if isinstance(found, Written) and (meant := _meant(found, wanted)) != found._value():
                node._set_value(meant)


def _follow(node: Any, wanted: Any, references: list[tuple[Any, Any]]) -> None:
    if isinstance(node, Written):
        node.decide(_meant(node, wanted))
        return
    if node is not None and node._is_interpolation() and wanted is not Any:
        references.append((node, wanted))
    if isinstance(node, DictConfig):
        _follow_keys(node, wanted)
    # Only what is ambiguous needs its annotation: a class may import torch, which ``--print`` is too fast for.
    ambiguous = [(key, inner) for key, inner in children(node) if has_written(inner)]
    receiver: Callable[[Any], Any] = partial(element, wanted)
    target = raw_node(node, "_target_") if ambiguous else None
    if target is not None and isinstance(target._value(), str):
        receiver = _receiver(target._value())
    for key, inner in ambiguous:
        _follow(inner, receiver(key), references)


def _receiver(target: str) -> Callable[[Any], Any]:
    """What tells the annotation of each argument of a call."""
    try:
        known = parameters(locate(target))
    except Exception:  # an import can raise anything; it is reported when values are checked
        return lambda key: Any
    rest = next((p.annotation for p in known.values() if p.kind is p.VAR_KEYWORD), Any)
    each = [p.annotation for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    annotations = {name: p.annotation for name, p in known.items()} | {
        "_args_": tuple.__class_getitem__((*each,)) if each else Any
    }
    return lambda key: Any if key in SPECIAL[:-1] else annotations.get(key, rest)


def _meant(written: Written, wanted: Any) -> Any:
    """The first of the value, the text and the other readings that an annotation takes; the value if none is."""
    value = written._value()
    is_unset = value is None and written.text == "null"
    readings = (value, *([] if is_unset else [written.text]), *written.readings)
    return next((reading for reading in readings if _takes(wanted, reading)), value)


def _takes(wanted: Any, value: Any) -> bool:
    """Whether an annotation takes a plain value as it is: no number for text."""
    return matches(value, wanted, numbers_as_text=False)


def _follow_keys(node: DictConfig, wanted: Any) -> None:
    """Convert keys such as 1e-3 to numbers where the annotation of a mapping says so."""
    maps = [a for a in (wanted, *get_args(wanted)) if is_subclass(get_origin(a), Mapping)]
    for key, _ in list(children(node)) if maps else ():
        value = read_scalar(key) if isinstance(key, str) else key
        value = value._value() if isinstance(value, Written) else value
        if not isinstance(value, str) and not _takes(get_args(maps[0])[0], key) and _takes(get_args(maps[0])[0], value):
            inner = node._get_node(key)
            del node[key]
            node[value] = inner


@cache
def element(wanted: Any, key: Any) -> Any:
    """The annotation of an element of a container, or of a field of a class, at an index or key; ``Any`` if unknown."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return element(args[0], key)
    if origin in (Union, types.UnionType):
        found = [inner for member in args if (inner := element(member, key)) is not Any]
        return reduce(or_, found) if found else Any
    if origin is tuple and args[1:] != (...,):
        return args[key] if isinstance(key, int) and key < len(args) else Any
    if is_subclass(origin, Mapping):
        return args[1] if len(args) > 1 else Any
    if is_subclass(origin, Collection):
        return args[0] if isinstance(key, int) else Any
    return fields(wanted).get(key, (Any, False))[0] if takes_mapping(wanted) else Any


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
        members = f" ({', '.join(wanted.__members__)})" if issubclass(wanted, Enum) else ""
        return f"{wanted.__qualname__}{members}"
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(wanted))
