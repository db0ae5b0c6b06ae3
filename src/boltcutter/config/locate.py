"""Resolve and compare dotted paths of classes and functions, their parameters, and where they raised an error."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import GenericAlias
from typing import Any, get_type_hints

from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.project import LIBRARY, SOURCE, install_command, is_own_package

# Classes that forward their **kwargs, and to what: otherwise no check of signatures finds a misspelt keyword.
FORWARDS_KWARGS = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.strategies.fsdp.FSDPStrategy": "torch.distributed.fsdp.FullyShardedDataParallel",
    "lightning.pytorch.loggers.wandb.WandbLogger": "wandb.init",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": "torch.utils.tensorboard.SummaryWriter",
}
KERAS_ADAPTER = "boltcutter.model.keras_model.KerasModel"
MAX_FOLDERS = 100  # of the working directory that are searched for a module
SAME_PACKAGE = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
TRAINER = "Trainer"  # whose subclasses take its arguments


def canonical(path: str) -> str:
    """The dotted path of a module or class with the name of the package ``lightning``."""
    return re.sub(r"^(?:pytorch_lightning|lightning_fabric)(?=\.|$)", lambda name: SAME_PACKAGE[name[0]], path)


@cache
def locate(path: str) -> Callable[..., Any]:
    """Import the class or function at a dotted path."""
    module, names = path, list[str]()
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{path!r} is not the dotted path of a class", kind="unknown_class")
    if "keras" not in sys.modules:  # its backend is chosen at import; here it is torch
        os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cpu")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                if (backend := os.environ.get("KERAS_BACKEND", "torch")) != "torch":  # which the module has set
                    raise ConfigError(
                        f"{path}: KERAS_BACKEND={backend} is not supported; set KERAS_BACKEND=torch"
                    ) from None
                top, is_inner, _ = str(error.name).partition(".")
                place = module_folder(top, error)
                what = f"which is not on Python's path; {add_to_path(place)}" if place else "which is not installed; "
                what += "" if place else install_command(top)
                if is_inner and find_spec(top):
                    what = f"which the installed version of {top} does not have; adapt the import to this version"
                raise ConfigError(f"{path} needs {error.name}, {what}", kind="not_installed") from None
            module, _, last = module.rpartition(".")
            names.insert(0, last)
            if not module:
                place = module_folder(last)
                remedy = add_to_path(place) if place else "give the full dotted path of a class"
                if names[1:] and not place:
                    remedy = f"{install_command(last)}, or {remedy}"
                raise ConfigError(f"{path}: no module named {last}; {remedy}", kind="not_installed") from None
        except Exception as error:  # an import can raise anything
            if is_own_package(module.partition(".")[0]):
                raise
            raise ConfigError(
                f"{path}: {module} cannot be imported: {one_line(error)} ({origin(error, module.partition('.')[0])})"
            ) from error
    for name in names:
        if not hasattr(found, name):
            raise ConfigError(f"{found.__name__} has no {name}{hint(name, dir(found))}", kind="unknown_class")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{path} cannot be called; give the full dotted path of a class", kind="unknown_class")
    return found


def module_folder(name: str, error: BaseException | None = None) -> Path | None:
    """The folder that has a module or package of the user, which Python does not find.

    Args:
        name: Top-level name of the module.
        error: Of an import; the folders of the files that it passed through, and those above, are searched first.
    """
    frames = walk_tb(error.__traceback__) if error else ()
    files = [Path(frame.f_code.co_filename) for frame, _ in frames]
    own = [file for file in reversed(files) if "site-packages" not in file.parts and not file.is_relative_to(SOURCE)]
    folders = [folder for file in own if file.is_file() for folder in file.parents[:3]]
    here = [Path.cwd(), *sorted(child for child in Path.cwd().iterdir() if child.is_dir())[:MAX_FOLDERS]]
    for folder in (*folders, *here):
        if not name.isidentifier() or "site-packages" in folder.parts:
            continue
        file = folder / f"{name}.py"
        if (file.is_file() and file not in own) or any((folder / name).glob("*.py")):  # timm.py may import timm
            return folder
    return None


def add_to_path(folder: Path) -> str:
    """How to make Python find a module in a folder."""
    return f"it is in {folder}: set PYTHONPATH={shlex.quote(str(folder))}"


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


def adapter(kind: Any) -> str | None:
    """The ``_target_`` that wraps instances of a class of another framework, Keras; None for all other classes."""
    keras = sys.modules.get("keras")
    is_imported = getattr(keras, "__file__", None)  # a folder of that name has none
    return KERAS_ADAPTER if inspect.isclass(kind) and is_imported and issubclass(kind, keras.Model) else None  # type: ignore[union-attr]


@cache
def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a callable, with annotations resolved to types (``Any`` if that fails)."""
    try:
        found = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # it may take anything
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return {name: inspect.Parameter(name, kind, annotation=Any) for name, kind in kinds.items()}
    # Each class of dataclasses that inherit may be in a module of its own, where its annotations have a meaning.
    is_generated = inspect.isclass(target) and is_dataclass(target) and "__init__" in vars(target)
    call: Any = target if is_generated else target.__init__ if inspect.isclass(target) else target
    try:
        hints = get_type_hints(inspect.unwrap(call))
    except Exception:  # evaluating annotations can raise anything
        hints = {n: p.annotation for n, p in found.items() if not isinstance(p.annotation, str)}
    typed = {n: p.replace(annotation=hints.get(n, Any)) for n, p in found.items()}
    # `size: int = None` means `int | None`, as type checkers read it before PEP 484 was changed.
    unset = {n: p for n, p in typed.items() if p.default is None and isinstance(p.annotation, type | GenericAlias)}
    typed |= {n: p.replace(annotation=p.annotation | None) for n, p in unset.items()}
    base = _keyword_base(target, typed)
    if base is not None:
        typed = {n: p for n, p in typed.items() if p.kind is not p.VAR_KEYWORD}
        return typed | {n: p for n, p in parameters(base).items() if n not in typed}
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    forwarded_to = FORWARDS_KWARGS.get(canonical(name))
    if forwarded_to:
        var_keyword = {n for n, p in typed.items() if p.kind is p.VAR_KEYWORD}
        wrapped = {n: p.replace(default=None) for n, p in parameters(locate(forwarded_to)).items() if n != "module"}
        typed = wrapped | {n: p for n, p in typed.items() if n not in var_keyword}
    return typed


def _keyword_base(target: Callable[..., Any], known: dict[str, inspect.Parameter]) -> type | None:
    """The base class that a class of the library or the project passes its ``**kwargs`` to, by convention."""
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if has_kwargs and is_own_package(package(target)) and inspect.isclass(target):
        return next((base for base in target.__mro__[1:] if "__init__" in vars(base) and base is not object), None)
    return None


def package(target: Callable[..., Any]) -> str:
    """The top-level package in which a class or function is defined."""
    return str(getattr(target, "__module__", "")).partition(".")[0]


def origin(error: Exception, top: str) -> str:
    """The type of an exception with file and line: the innermost frame in package ``top``, or else the innermost."""
    callers = (
        __name__,
        f"{LIBRARY}.config.instantiate",
        "importlib",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
    )
    places = [(str(frame.f_globals.get("__name__")), frame, line) for frame, line in walk_tb(error.__traceback__)]
    places = [place for place in places if place[0] not in callers]
    if not places or isinstance(error, SyntaxError):  # the call failed, or the text has the place
        return type(error).__name__
    _, frame, line = ([place for place in places if place[0].partition(".")[0] == top] or places)[-1]
    file = frame.f_code.co_filename.rpartition("/site-packages/")[2].removeprefix(f"{Path.cwd()}/")
    return f"{type(error).__name__} at {file}:{line}"
