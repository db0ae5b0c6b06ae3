"""Unpickle checkpoints as data: load tensors and plain values, and replace objects of other classes by placeholders.

Hyperparameters of a LightningModule may be modules, functions, enums or data frames. ``load_from_checkpoint`` needs
them, but training and evaluation do not. Nothing in a file is imported or called, except what
``torch.load(weights_only=True)`` allows and the plain types listed below.

Modules also save objects of their own in ``on_save_checkpoint``. Files that hold some are sealed when they are written:
signed with the key of this user, over the whole pickle, and so over all that loading them would import and call, but
not over the numbers in tensors. Sealed files, and all with ``trust=true``, are loaded with their objects. A seal says
who has written a pickle, not in which file: a copy of it executes what this user has saved once, and nothing else.

torch's own unpickler, with ``torch.serialization.safe_globals`` for placeholders, is no replacement: when it was tried
in 2026-11, it passed 98 of 135 tests of this module. Of the 63 attacks that are pickles it refuses 60; three take any
memory or time, as do sizes made of ranges, tensors that are expanded, and records that overlap, which are also tested.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
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
from torch import _weights_only_unpickler, nn

from boltcutter.environment import user_key
from boltcutter.environment.this_process import this_process

BLOCKED = ("os", "posix", "nt", "sys")  # files that refer to these modules are refused, as by torch
# Calls to these are replaced by placeholders; calls to the rest of the standard library are refused as attacks.
SKIPPABLE_CALLS = {
    *("argparse", "array", "collections", "dataclasses", "datetime", "decimal", "enum", "fractions", "inspect"),
    *("ipaddress", "numbers", "pathlib", "pathlib._local", "random", "string", "typing", "uuid", "zoneinfo"),
    *("builtins.getattr", "builtins.object", "builtins.type", "copyreg._reconstructor", "functools.partial"),
    *("operator.attrgetter", "operator.itemgetter", "operator.methodcaller", "re._compile"),
    *("types.GenericAlias", "types.MappingProxyType", "types.SimpleNamespace"),
}
TYPES = {
    f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, str, tuple)
}  # referred to, never called
PLAIN_FRACTION = re.compile(
    r"-?[0-9]{1,4000}(/[0-9]{1,4000})?"
)  # Python itself limits integers in text to 4,300 digits
PROGRAM, SEAL = "data.pkl", "seal"  # records in the archive: the pickle, and its signature
REFERENCES = re.compile(
    rb"c([\w.\x80-\xff]+)\n([\w.\x80-\xff]+)\n"
)  # to classes and functions, as torch.save writes them
_written: set[bytes] = set()  # digests of what this process has sealed, for want of a key
MAX_VALUES = 1 << 25  # in a container, each as often as it occurs
OPT_IN = "set trust=true if you trust the source of the file"
SIMPLE_DTYPE = re.compile(r"[?biufc][0-9]{0,2}|[SU][0-9]+")


@dataclass(eq=False)
class Placeholder:
    """Replaces an object that was not created, or a class or function.

    Args:
        name: Qualified name of the class or function.
        built: Whether it replaces an instance, or the return value of the function.
    """

    name: str
    built: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"

    def __getattr__(self, name: str) -> Any:
        """Explain why a module that uses the object does not find it."""
        raise AttributeError(f"{self.name}.{name}: the object was not loaded from the checkpoint; {OPT_IN}")


class _DType(Placeholder):
    """A NumPy dtype; ``value`` is None if its arrays may hold objects."""

    value: np.dtype[Any] | None = None


class _Array(Placeholder):
    """A NumPy array before its state is set."""


class Unpickler(pickle._Unpickler):  # the Python implementation, of which every opcode can be overridden
    """Loads tensors and plain values, and creates placeholders for all other objects.

    Raises:
        UnpicklingError: The file is damaged, or would execute code.
    """

    stack: list[Any]
    memo: dict[int, Any]
    repeated = 0  # elements of tensors that are not in the file, as of one that was expanded
    append: Callable[[Any], None]
    read_archive: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def load(self) -> Any:
        """Load the pickle."""
        try:
            value = super().load()
            _check_size(value)
            return value
        except (pickle.UnpicklingError, RuntimeError, MemoryError):
            raise
        except Exception as error:  # raised by opcodes on an invalid stack
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function, or a placeholder; imports nothing."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if module.partition(".")[0] in BLOCKED:
            raise pickle.UnpicklingError(f"it refers to {path}")
        if path in _allowed():
            return _allowed()[path]
        return CONSTRUCTORS.get(path) or TYPES.get(path) or Placeholder(path)

    def _load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        self.stack[-1] = self._call(function, arguments)

    def _load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(self._call(kind, arguments))

    def _load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, _DType):
            built.value = _with_byte_order(built.value, state)
        elif isinstance(built, _Array):
            self._replace(built, _array(state))
        elif isinstance(built, Placeholder):
            return  # its state is ignored
        elif type(built) is OrderedDict:  # a state dict; other attributes could hide its methods
            versions = state.get("_metadata")
            if isinstance(versions, dict) and all(isinstance(version, dict) for version in versions.values()):
                vars(built)["_metadata"] = versions
        else:
            raise pickle.UnpicklingError(f"it sets the state of a {type(built).__name__}")

    def _replace(self, built: Any, value: Any) -> None:
        """Replace ``built``, which is on top of the stack, by ``value``."""
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
        items = self.pop_mark()
        _check_size(items)
        self._target(set).update(items)

    def _load_frozenset(self) -> None:
        items = self.pop_mark()  # which replaces self.append
        _check_size(items)
        self.append(frozenset(items))

    def _extend(self, items: list[Any]) -> None:
        if (target := self._target(list, deque)) is not None:
            target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        if (target := self._target(dict, OrderedDict, Counter, defaultdict)) is not None:
            _check_size(items[::2])
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[key] = value

    def _target(self, *kinds: type) -> Any:
        """Return the container on top of the stack, or None if it is a placeholder."""
        target = self.stack[-1]
        if type(target) in kinds:
            return target
        if isinstance(target, Placeholder):
            return None
        raise pickle.UnpicklingError(f"it adds items to a {type(target).__name__}")

    def _load_binpersid(self) -> None:
        reference = self.stack.pop()
        _check_size(reference)
        self.append(self.persistent_load(reference))  # of torch, which loads the storage of a tensor

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call an allowed function, or return a placeholder if the call can safely be skipped.

        Raises:
            UnpicklingError: The call would execute code.
        """
        _check_size(arguments, expands=True)
        if isinstance(function, Placeholder):
            module = function.name.rpartition(".")[0]
            known = module.partition(".")[0] in sys.stdlib_module_names
            if function.built or (known and function.name not in SKIPPABLE_CALLS and module not in SKIPPABLE_CALLS):
                raise pickle.UnpicklingError(f"it calls {function.name}")
            # Enums and methods are pickled so.
            if function.name == "builtins.getattr" and not isinstance(arguments[0], Placeholder):
                raise pickle.UnpicklingError("it calls builtins.getattr")
            return Placeholder(function.name, built=True)
        if id(function) not in _callable():
            raise pickle.UnpicklingError(f"it calls a {type(function).__name__} that is not allowed")
        if function is bytearray and arguments and isinstance(arguments[0], int):
            raise pickle.UnpicklingError("it creates a bytearray of any size")
        if _holds_placeholder(arguments) and function not in (_reconstruct, _scalar):
            return Placeholder(f"{function.__module__}.{function.__qualname__}", built=True)
        if function is torch._tensor._rebuild_from_type_v2:
            inner, kind, given, state = arguments
            return _with_type(self._call(inner, given), kind, state)
        if function is torch._utils._rebuild_parameter_with_state:
            data, requires_grad, _, state = arguments
            return _with_type(nn.Parameter(data, requires_grad), nn.Parameter, state)
        found = function(*arguments)
        if isinstance(found, torch.Tensor):
            self._check_tensor(found)
        return found

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        """Remove hooks, which training would call, and check the size before the tensor is converted or copied.

        Raises:
            UnpicklingError: The tensor has many more elements than the file, as by strides of zero.
        """
        tensor._backward_hooks = None
        if tensor.layout is torch.strided:
            stored = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.repeated += max(0, tensor.numel() - stored)
        if self.repeated > MAX_VALUES:
            raise pickle.UnpicklingError("it has tensors that are much larger than the file")


_INHERITED = (  # opcodes that only create or move numbers, strings and containers
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT"),
    *("EMPTY_SET", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL"),  # which call find_class
)
_OVERRIDDEN = [name.removeprefix("_load_").upper() for name in vars(Unpickler) if name.startswith("_load_")]
# All other opcodes (INST, OBJ, EXT1, PERSID, NEWOBJ_EX, …) are rejected.
Unpickler.dispatch = {
    **{code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _INHERITED)},
    **{getattr(pickle, name)[0]: getattr(Unpickler, f"_load_{name.lower()}") for name in _OVERRIDDEN},
}


def read_archive(source: Any, *, map_location: Any = None, mmap: bool = False) -> Any:
    """Load a checkpoint with placeholders in place of objects of foreign classes.

    Calls torch's reader directly: ``torch.load`` passes some archives to TorchScript, which executes them, and creates
    arrays and sets of any size, whatever the size of the file.

    Args:
        source: Path or open file of a zip archive that is not compressed.
        map_location: Device of the tensors, as for ``torch.load``.
        mmap: Memory-map the tensors of a file at a path.

    Raises:
        UnpicklingError: The file would execute code.
    """
    memory = torch.UntypedStorage.from_file(source, False, os.path.getsize(source)) if mmap else None
    with torch.serialization._open_zipfile_reader(source) as reader:
        load: Any = torch.serialization._load
        reader = _ReadOnce(reader)
        if _is_trusted(reader):
            with suppress(ImportError, AttributeError):  # a class has moved: it is left out as any other
                return load(reader, map_location, pickle, overall_storage=memory, encoding="utf-8")
        module = SimpleNamespace(Unpickler=Unpickler)  # in place of pickle
        return load(reader, map_location, module, overall_storage=memory, encoding="utf-8")


class _ReadOnce:
    """torch's reader of an archive, with the pickle as it was read first: in a shared folder, it may be exchanged."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._program = reader, reader.get_record(PROGRAM)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_record(self, name: str) -> Any:
        return self._program if name == PROGRAM else self._reader.get_record(name)


def seal(file: IO[bytes]) -> None:
    """Sign an open checkpoint that was just written, if it has objects that are loaded for this user only.

    Args:
        file: Open for reading and writing.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            place = next(name for name in archive.namelist() if name.endswith(f"/{PROGRAM}"))
            program = archive.read(place)
    except (zipfile.BadZipFile, StopIteration):
        return  # damaged, which is found where it is read back
    known = _allowed().keys() | CONSTRUCTORS.keys() | TYPES.keys()
    for module, name in REFERENCES.findall(program):
        reference = f"{module.decode(errors='replace')}.{name.decode(errors='replace')}"
        if reference not in known and reference.removeprefix("c") not in known:  # c may also be the byte before
            break
    else:
        return
    _written.add(hashlib.sha256(program).digest())
    if signature := user_key.sign(_sealed(program)):
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(place.replace(PROGRAM, SEAL), signature)


def _is_trusted(reader: Any) -> bool:
    """Whether this process or this user has written what an archive would import and call, or all is trusted."""
    if this_process.trusts_all:
        return True
    program = reader.get_record(PROGRAM)
    if hashlib.sha256(program).digest() in _written:
        return True
    return SEAL in reader.get_all_records() and user_key.is_signed(_sealed(program), reader.get_record(SEAL).decode())


def _sealed(program: bytes) -> dict[str, str]:
    return {"checkpoint": hashlib.sha256(program).hexdigest()}


def find_placeholders(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Yield one line for each placeholder in a checkpoint, with its key and its class or function."""
    seen = set() if seen is None else seen
    if isinstance(value, Placeholder):
        yield f"{path} is a {value.name}" if value.built else f"{path} is {value.name}"
    elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        if id(value) in seen:  # containers may be recursive or shared
            return
        seen.add(id(value))
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from find_placeholders(inner, f"{path}.{key}" if path else str(key), seen)


def _holds_placeholder(value: Any, seen: set[int] | None = None) -> bool:
    """Return whether a value is or contains a placeholder."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    return isinstance(value, Placeholder) or any(_holds_placeholder(part, seen) for part in _parts(value))


def _check_size(value: Any, *, expands: bool = False) -> None:
    """Check a value that will be hashed, shown in an error, or returned.

    Args:
        value: The value.
        expands: Whether a range counts as its numbers, which a call may turn into a container.

    Raises:
        UnpicklingError: Its containers multiply, as 60 tuples of which each has the next one twice.
    """
    sizes: dict[int, float] = {}

    def size(value: Any) -> float:
        if expands and isinstance(value, range):
            return len(value)
        if not (parts := _parts(value)):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = math.inf  # of a container that holds itself
            sizes[id(value)] = sum(map(size, parts))
        return sizes[id(value)]

    if size(value) > MAX_VALUES:
        raise pickle.UnpicklingError("it has containers that multiply")


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple | set | frozenset | deque) else ()


@cache
def _allowed() -> dict[str, Any]:
    """Return what ``torch.load(weights_only=True)`` allows, by name; without the tensor classes of legacy formats."""
    found = _weights_only_unpickler._get_allowed_globals() | {"_codecs.encode": _encode}
    return {name: value for name, value in found.items() if value not in torch._tensor_classes}


@cache
def _callable() -> frozenset[int]:
    """Return the ids of all functions and classes that may be called; storages are only referred to."""
    found = [*_allowed().values(), *CONSTRUCTORS.values()]
    return frozenset(id(v) for v in found if callable(v) and v is not torch.Tensor and v not in torch._storage_classes)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # as bytes are pickled; others would be imported
        raise pickle.UnpicklingError("it has bytes in another encoding")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    return b""  # non-empty bytes are pickled as a call to _codecs.encode


def _with_type(tensor: Any, kind: Any, state: Any) -> Any:
    """Give a tensor its type and its attributes, but none that would hide one of the class."""
    if not isinstance(tensor, torch.Tensor) or kind not in (torch.Tensor, nn.Parameter):
        raise pickle.UnpicklingError(f"it makes a {getattr(kind, '__name__', kind)} of a {type(tensor).__name__}")
    tensor = tensor if type(tensor) is kind else tensor.as_subclass(kind)
    for name, value in ((state[0] if isinstance(state, tuple) else state) or {}).items():
        if not hasattr(kind, name):
            setattr(tensor, name, value)
    return tensor


def _default_dict(factory: Any = None) -> Any:
    return defaultdict(factory if factory in TYPES.values() or factory is set else None)


def _fraction(*parts: Any) -> Any:
    """Create a fraction from two integers, or a text with them; an exponent would compute a number of any size."""
    if not all(type(part) is int or (isinstance(part, str) and PLAIN_FRACTION.fullmatch(part)) for part in parts):
        raise pickle.UnpicklingError("it creates a Fraction of something other than two integers")
    return Fraction(*parts)


def _path(*parts: str) -> Any:
    return Path(*parts)


def _windows_path(*parts: str) -> Any:
    return PureWindowsPath(*parts)


def _dtype(code: Any, *_: Any) -> _DType:
    """Create a dtype of numbers or strings; other dtypes stay without value, since their arrays may hold objects."""
    found = _DType("numpy.dtype", built=True)
    if isinstance(code, str) and SIMPLE_DTYPE.fullmatch(code):
        found.value = np.dtype(code)
    return found


def _with_byte_order(kind: np.dtype[Any] | None, state: Any) -> np.dtype[Any] | None:
    """Apply the byte order in a dtype's state; return None if the state has other entries, such as fields."""
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
    """Create an array of numbers or strings from shape, dtype, memory order and bytes."""
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
    "fractions.Fraction": _fraction,
    "numpy.dtype": _dtype,
    **{f"datetime.{kind.__name__}": kind for kind in (date, datetime, time, timedelta, timezone)},
    **{f"pathlib{local}.{pure}PosixPath": _path for local in ("", "._local") for pure in ("", "Pure")},
    **{f"pathlib{local}.{pure}WindowsPath": _windows_path for local in ("", "._local") for pure in ("", "Pure")},
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
