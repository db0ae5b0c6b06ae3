"""Unpickle checkpoints as data: tensors and plain values are built, objects of all other classes become placeholders.

Hyperparameters of a LightningModule may be modules, functions, enums or data frames. They belong in the file, because
``load_from_checkpoint`` needs them, but training and evaluation do not. Nothing that a file names is imported or
called here, except what ``torch.load(weights_only=True)`` accepts and the plain types listed below.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch import _weights_only_unpickler as torchs

BLOCKED = ("os", "posix", "nt", "sys")  # not even named, as for torch
# A call to any other function or class of the standard library is not skipped but refused: it is an attack.
SKIPPABLE_CALLS = {
    *("argparse", "array", "collections", "dataclasses", "datetime", "decimal", "enum", "fractions", "inspect"),
    *("ipaddress", "numbers", "pathlib", "pathlib._local", "random", "string", "typing", "uuid", "zoneinfo"),
    *("builtins.getattr", "builtins.object", "builtins.type", "copyreg._reconstructor", "functools.partial"),
    *("operator.attrgetter", "operator.itemgetter", "operator.methodcaller", "re._compile"),
    *("types.GenericAlias", "types.MappingProxyType", "types.SimpleNamespace"),
}
TYPES = {f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, str, tuple)}  # never called
SIMPLE_DTYPE = re.compile(r"[?biufc]\d{0,2}|[SU]\d+")


@dataclass(eq=False)
class Placeholder:
    """Stands for an object that was not built, or for a class or function; it does nothing.

    Args:
        name: Of the class or function, with its module.
        built: Whether it stands for an object.
    """

    name: str
    built: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"


class _DType(Placeholder):
    """A NumPy type; ``value`` is None where an array of it may hold objects."""

    value: np.dtype[Any] | None = None


class _Array(Placeholder):
    """A NumPy array before its contents are known."""


class Unpickler(pickle._Unpickler):  # the one written in Python: each instruction can be replaced
    """Builds tensors and plain values, and placeholders for everything else.

    Raises:
        UnpicklingError: The file is damaged, or calls what could execute code.
    """

    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def load(self) -> Any:
        """Read the whole pickle."""
        try:
            return super().load()
        except (pickle.UnpicklingError, RuntimeError, MemoryError):
            raise
        except Exception as error:  # what an instruction does to a stack that does not fit it
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def find_class(self, module: str, name: str) -> Any:
        """What a file may name, else a placeholder; nothing is imported."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if module.partition(".")[0] in BLOCKED:
            raise pickle.UnpicklingError(f"it names {path}")
        if path in _accepted():
            return _accepted()[path]
        return CONSTRUCTORS.get(path) or TYPES.get(path) or Placeholder(path)

    def persistent_load(self, pid: Any) -> Any:
        """Replaced by torch, which reads the bytes of a tensor."""
        raise pickle.UnpicklingError("it refers to data outside of the file")

    def _load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        self.stack[-1] = _call(function, arguments)

    def _load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(_call(kind, arguments))

    def _load_newobj_ex(self) -> None:
        keywords, arguments, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Placeholder):
            raise pickle.UnpicklingError(f"it calls {kind!r} with keywords")
        self.append(_call(kind, (*arguments, keywords)))

    def _load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, _DType):
            built.value = _ordered(built.value, state)
        elif isinstance(built, _Array):
            self._replace(built, _array(state))
        elif isinstance(built, Placeholder):
            return  # its state stays unread
        elif type(built) is OrderedDict and isinstance(state, dict):  # of weights: _metadata
            vars(built).update({key: value for key, value in state.items() if not _holds_placeholder(value)})
        else:
            raise pickle.UnpicklingError(f"it sets the state of a {type(built).__name__}")

    def _replace(self, built: Any, value: Any) -> None:
        """Put ``value`` where ``built`` is, which came to the stack just now."""
        self.stack[-1] = value
        for place in reversed(self.memo):
            if self.memo[place] is built:
                self.memo[place] = value
                return

    def _load_append(self) -> None:
        self._extend([self.stack.pop()])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _load_additems(self) -> None:
        items, target = self.pop_mark(), self._target(set)
        if target is not None:
            target.update(items)

    def _extend(self, items: list[Any]) -> None:
        if (target := self._target(list, deque)) is not None:
            target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        if (target := self._target(dict, OrderedDict, Counter, defaultdict)) is not None:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[key] = value

    def _target(self, *kinds: type) -> Any:
        """The container on top of the stack; None for a placeholder, which takes no items."""
        target = self.stack[-1]
        if type(target) in kinds:
            return target
        if isinstance(target, Placeholder):
            return None
        raise pickle.UnpicklingError(f"it puts items into a {type(target).__name__}")

    def _load_binpersid(self) -> None:
        pid = self.stack.pop()
        if type(pid) is not tuple or not pid or pid[0] not in ("storage", b"storage") or _holds_placeholder(pid):
            raise pickle.UnpicklingError("it refers to data outside of the file")
        self.append(self.persistent_load(pid))


_DATA = (  # instructions that only build numbers, text and containers, or move them about
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT"),
    *("EMPTY_SET", "FROZENSET", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL"),  # both ask find_class
)
_OWN = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS", "BINPERSID")
# All others (INST, OBJ, EXT1, PERSID, …) are unknown here.
Unpickler.dispatch = {
    **{code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _DATA)},
    **{getattr(pickle, name)[0]: getattr(Unpickler, f"_load_{name.lower()}") for name in _OWN},
}


def reject_legacy_format(file: IO[bytes], **options: Any) -> Any:
    """In place of ``pickle.load``, which only formats older than torch 1.6 need.

    Raises:
        UnpicklingError: Always.
    """
    raise pickle.UnpicklingError("it is of an old format")


PICKLE_MODULE = SimpleNamespace(
    Unpickler=Unpickler, load=reject_legacy_format, __name__="boltcutter.unpickle"
)  # as torch asks for one


def find_placeholders(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """A line for each placeholder in a checkpoint: where it is, and what it stands for."""
    seen = set() if seen is None else seen
    if isinstance(value, Placeholder):
        yield f"{path} is a {value.name}" if value.built else f"{path} is {value.name}"
    elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        if id(value) in seen:  # a container may hold itself, or one container many times
            return
        seen.add(id(value))
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from find_placeholders(inner, f"{path}.{key}" if path else str(key), seen)


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The result of a call that builds data; a placeholder for any other that is harmless when skipped.

    Raises:
        UnpicklingError: The call would execute code.
    """
    if isinstance(function, Placeholder):
        module = function.name.rpartition(".")[0]
        known = module.partition(".")[0] in sys.stdlib_module_names
        if function.built or (known and function.name not in SKIPPABLE_CALLS and module not in SKIPPABLE_CALLS):
            raise pickle.UnpicklingError(f"it calls {function.name}")
        if function.name == "builtins.getattr" and not isinstance(arguments[0], Placeholder):  # an enum or a method
            raise pickle.UnpicklingError("it calls builtins.getattr")
        return Placeholder(function.name, built=True)
    if id(function) not in _callable():
        raise pickle.UnpicklingError(f"it calls {function!r}")
    if _holds_placeholder(arguments) and function not in (_reconstruct, _scalar):
        return Placeholder(f"{function.__module__}.{function.__qualname__}", built=True)
    return function(*arguments)


def _holds_placeholder(value: Any, seen: set[int] | None = None) -> bool:
    """Whether any part of a value is a placeholder."""
    if isinstance(value, Placeholder):
        return True
    if not isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        return False
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    inner: Collection[Any] = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return any(_holds_placeholder(part, seen) for part in inner)


@cache
def _accepted() -> dict[str, Any]:
    """By name, what ``torch.load(weights_only=True)`` accepts, without the tensor classes of formats before 1.6."""
    return {name: value for name, value in torchs._get_allowed_globals().items() if value not in torch._tensor_classes}


@cache
def _callable() -> frozenset[int]:
    """Identities of all that may be called."""
    return frozenset(id(value) for value in (*_accepted().values(), *CONSTRUCTORS.values()) if callable(value))


def _no_bytes() -> bytes:
    return b""  # all others come through _codecs.encode


def _default_dict(factory: Any = None) -> Any:
    return defaultdict(factory if factory in TYPES.values() or factory is set else None)


def _path(*parts: str) -> Any:
    return Path(*parts)


def _windows_path(*parts: str) -> Any:
    return PureWindowsPath(*parts)


def _dtype(code: Any, *_: Any) -> _DType:
    """A type of numbers or text; of any other only the place is kept, since an array of it may hold objects."""
    found = _DType("numpy.dtype", built=True)
    if isinstance(code, str) and SIMPLE_DTYPE.fullmatch(code):
        found.value = np.dtype(code)
    return found


def _ordered(kind: np.dtype[Any] | None, state: Any) -> np.dtype[Any] | None:
    """A type in the byte order that its state gives; None if the state says anything else."""
    _, order, *rest = state
    return kind.newbyteorder(order) if kind is not None and rest[:3] == [None, None, None] else None


def _scalar(kind: Any, raw: Any = None) -> Any:
    value = getattr(kind, "value", None)
    if value is None or type(raw) is not bytes or len(raw) != value.itemsize:
        return Placeholder("numpy.generic", built=True)
    return np.frombuffer(raw, value)[0]


def _reconstruct(*_: Any) -> _Array:
    return _Array("numpy.ndarray", built=True)


def _array(state: Any) -> Any:
    """An array of numbers or text from its shape, type, order and bytes."""
    _, shape, kind, fortran, raw = state
    value = getattr(kind, "value", None)
    if value is None or type(raw) is not bytes or len(raw) != math.prod(shape) * value.itemsize:
        return Placeholder("numpy.ndarray", built=True)
    return np.ndarray(shape, value, bytearray(raw), order="F" if fortran else "C")


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "builtins.bytes": _no_bytes,
    "builtins.frozenset": frozenset,
    "builtins.range": range,
    "builtins.slice": slice,
    "collections.defaultdict": _default_dict,
    "collections.deque": deque,
    "decimal.Decimal": Decimal,
    "fractions.Fraction": Fraction,
    "numpy.dtype": _dtype,
    **{f"datetime.{kind.__name__}": kind for kind in (date, datetime, time, timedelta, timezone)},
    **{f"pathlib{local}.{pure}PosixPath": _path for local in ("", "._local") for pure in ("", "Pure")},
    **{f"pathlib{local}.{pure}WindowsPath": _windows_path for local in ("", "._local") for pure in ("", "Pure")},
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
