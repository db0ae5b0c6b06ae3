"""What the user's code reads while it is imported and set up: environment variables, and files.

Within ``observed``, ``os.environ`` is of a subclass that notes which variables are read one by one; a copy of all of
them, as for another process, is not noted: there, one instruction goes through the names and reads. An audit hook notes
files that are opened for reading. Both only count what the user's code does, itself or through a package that it calls;
not what a package reads when it is imported.

Source: https://peps.python.org/pep-0578 (audit hooks; they cannot be removed, so it does nothing afterwards).
"""

from __future__ import annotations

import _collections_abc
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from boltcutter.environment.hang import INSTALLED, LIBRARY, STANDARD
from boltcutter.environment.process import is_rank_zero
from boltcutter.environment.this_process import this_process

ACCESS = ("<frozen os>", os.__file__, "<frozen _collections_abc>", _collections_abc.__file__, __file__)
# Functions of the standard library that read variables which their caller names; others read those they need.
ON_BEHALF = ("expandvars", "substitute", "safe_substitute", "convert", "__getitem__", "format_map", "vformat")
# Modules of the standard library that open files which their caller names; others open those they need.
OPENERS = {"bz2", "codecs", "configparser", "dbm", "fileinput", "gzip", "lzma", "pathlib", "plistlib"}
OPENERS |= {"shelve", "shutil", "tarfile", "wave", "xml", "zipfile"}
CODE = (".py", ".pyc", ".pyi", ".so", ".pth", ".pyd")
ENVIRON = type(os.environ)
MAX_READS = 10_000  # variables, and files


class Reads:
    """What was read.

    Attributes:
        variables: Values of environment variables by name; None for those that were not set.
        files: Absolute paths of files that were opened for reading, in their order.
    """

    def __init__(self) -> None:
        self.variables, self.files = dict[str, str | None](), dict[str, None]()
        self.notes_files = True  # until training starts, which opens files of each batch
        self.copies = set[tuple[CodeType, int]]()  # instructions that read all variables
        self.others = set[tuple[str, CodeType, int]]()  # variables, and instructions not of the user that read them

    def __getstate__(self) -> dict[str, Any]:
        """Without the instructions, which cannot be pickled, for another process."""
        return {**vars(self), "copies": set(), "others": set()}

    def note_variable(self, key: Any, value: Any) -> None:
        """Note that a variable was read, unless all of them are copied by one instruction."""
        name = os.fsdecode(key) if isinstance(key, str | bytes) else ""
        if name and name not in self.variables and len(self.variables) < MAX_READS:
            frame = _caller()
            if frame is None or _place(frame) in self.copies or (name, *_place(frame)) in self.others:
                return
            if _is_of_user(frame):
                self.variables[name] = None if value is None else os.fsdecode(value)
            elif len(self.others) < MAX_READS:
                self.others.add((name, *_place(frame)))

    def note_file(self, path: Any, flags: Any) -> None:
        """Note that a file was opened, if for reading."""
        if not self.notes_files or not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int):
            return  # or it is a file descriptor
        name = os.fsdecode(path)
        if flags & os.O_ACCMODE != os.O_RDONLY or name.endswith(CODE) or len(self.files) >= MAX_READS:
            return
        frame = _caller()
        while frame is not None and _module_of_standard(frame.f_code.co_filename) in OPENERS:
            frame = frame.f_back
        if frame is not None and _is_of_user(frame):
            self.files[os.path.abspath(name)] = None


class ObservedEnviron(ENVIRON):  # type: ignore[misc, valid-type]
    """``os.environ`` while reads are noted: the same object, of this class."""

    def __getitem__(self, key: Any) -> Any:
        try:
            value = super().__getitem__(key)
        except KeyError:
            if this_process.reads is not None:
                this_process.reads.note_variable(key, None)
            raise
        if this_process.reads is not None:
            this_process.reads.note_variable(key, value)
        return value

    def __iter__(self) -> Iterator[Any]:
        if (reads := this_process.reads) is not None and (frame := _caller()) is not None:
            reads.copies.add(_place(frame))
        yield from super().__iter__()


@contextmanager
def observed() -> Iterator[None]:
    """Note what the user's code reads in rank 0, until ``end`` or the end of the block or decorated function."""
    if is_rank_zero():
        go_on(Reads())
    try:
        yield
    finally:
        end()


def current() -> Reads | None:
    """What was noted until now; None if nothing is observed."""
    return this_process.reads


def go_on(found: Reads | None) -> None:
    """Note what is read, besides what was found in another process; None does nothing."""
    if found is None:
        return
    this_process.reads = found
    _replace_class(ENVIRON, ObservedEnviron)
    if not this_process.is_audited:
        this_process.is_audited = True
        sys.addaudithook(_audit)


def end() -> Reads | None:
    """Note no more; return what was noted, or None if nothing was observed."""
    found, this_process.reads = this_process.reads, None
    _replace_class(ObservedEnviron, ENVIRON)
    return found


def _replace_class(old: type, new: type) -> None:
    for variables in (os.environ, getattr(os, "environb", None)):
        if type(variables) is old:  # not one that a user has put in its place
            variables.__class__ = new


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and (reads := this_process.reads) is not None:
        with suppress(Exception):
            reads.note_file(arguments[0], arguments[2])


def _caller() -> FrameType | None:
    """The frame that reads, without those of the mapping."""
    frame = inspect.currentframe()
    while frame is not None and kind_of(frame.f_code.co_filename) == "access":
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def _is_of_user(caller: FrameType) -> bool:
    """Whether the user's code reads, itself or through packages; not in an import of a package."""
    if kind_of(caller.f_code.co_filename) == "standard" and caller.f_code.co_name not in ON_BEHALF:
        return False
    frame: FrameType | None = caller
    while frame is not None and (kind := kind_of(frame.f_code.co_filename)) != "import":
        if kind in ("user", "library"):
            return kind == "user"
        frame = frame.f_back
    return False


@lru_cache(maxsize=10_000)
def _module_of_standard(file: str) -> str:
    """The module or package of the standard library that a file has; empty if it has none."""
    if file.startswith("<frozen "):
        return file[8:-1]
    place = next((at for at in STANDARD if file.startswith(at)), None)
    if place is None or kind_of(file) != "standard":
        return ""
    return file[len(place) :].partition(os.sep)[0].removesuffix(".py")


@lru_cache(maxsize=10_000)
def kind_of(file: str) -> str:
    """Whose code a file has: ``user``, ``library``, ``installed``, ``standard``, ``import`` or ``access``."""
    if file in ACCESS:
        return "access"
    if file.startswith(LIBRARY):
        return "library"
    if file.startswith("<frozen importlib"):
        return "import"
    if file.startswith(INSTALLED[2:]) or any(at in file for at in INSTALLED[:2]):
        return "standard" if file.startswith("<frozen") else "installed"
    return "standard" if file.startswith(STANDARD) else "user"
