"""What the dotted path of a class or function names, what arguments it takes, and where it fails."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_type_hints

from boltcutter.config import ConfigError, hint, one_line

PROJECT = __name__.partition(".")[0]
# Classes that hand their **kwargs on, and to what: a misspelt keyword would pass every signature check.
FORWARDS_KWARGS = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.strategies.fsdp.FSDPStrategy": "torch.distributed.fsdp.FullyShardedDataParallel",
    "lightning.pytorch.loggers.wandb.WandbLogger": "wandb.init",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": "torch.utils.tensorboard.SummaryWriter",
}


@cache
def locate(path: str) -> Callable[..., Any]:
    """The class or function that a dotted path names."""
    module, names = str(path), list[str]()
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{path!r} is not the dotted path of a class")
    if "keras" not in sys.modules:  # whose models train here on torch; it chooses its backend when it is imported
        os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cpu")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{path} needs {error.name}, which is not installed; pip install {error.name}"
                ) from None
            module, _, last = module.rpartition(".")
            names.insert(0, last)
            if not module:
                raise ConfigError(f"{path}: no module named {last}; give the full dotted path of a class") from None
        except Exception as error:  # whatever a foreign module raises while it is imported
            if module.partition(".")[0] == PROJECT:
                raise
            raise ConfigError(
                f"{path}: {module} cannot be imported: {one_line(error)} ({origin(error, module.partition('.')[0])})"
            ) from error
    for name in names:
        if not hasattr(found, name):
            raise ConfigError(f"{found.__name__} has no {name}{hint(name, dir(found))}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{path} cannot be called; give the full dotted path of a class")
    return found


def is_keras_model(made: Any) -> bool:
    """Whether a type is that of Keras models; where one is built, Keras has been imported."""
    keras = sys.modules.get("keras")
    return keras is not None and inspect.isclass(made) and issubclass(made, keras.Model)


@cache
def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A call's arguments, their annotations read as types (``Any`` where they cannot be)."""
    try:
        found = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
    call = target.__init__ if inspect.isclass(target) else target
    try:
        hints = get_type_hints(inspect.unwrap(call))
    except Exception:  # whatever a foreign module's annotations raise when read
        hints = {n: p.annotation for n, p in found.items() if not isinstance(p.annotation, str)}
    typed = {n: p.replace(annotation=hints.get(n, Any)) for n, p in found.items()}
    base = _keyword_base(target, typed)
    if base is not None:
        typed = {n: p for n, p in typed.items() if p.kind is not p.VAR_KEYWORD}
        return typed | {n: p for n, p in parameters(base).items() if n not in typed}
    handed_on = FORWARDS_KWARGS.get(f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}")
    if handed_on:
        open_end = {n for n, p in typed.items() if p.kind is p.VAR_KEYWORD}
        wrapped = {n: p.replace(default=None) for n, p in parameters(locate(handed_on)).items() if n != "module"}
        typed = wrapped | {n: p for n, p in typed.items() if n not in open_end}
    return typed


def _keyword_base(target: Callable[..., Any], known: dict[str, inspect.Parameter]) -> type | None:
    """The base class that a class of this project gives its ``**keywords`` to: the project's own custom."""
    if package(target) == PROJECT and inspect.isclass(target) and any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return next((base for base in target.__mro__[1:] if "__init__" in vars(base) and base is not object), None)
    return None


def package(target: Callable[..., Any]) -> str:
    """The top-level package that a class or function is from."""
    return str(getattr(target, "__module__", "")).partition(".")[0]


def origin(error: Exception, top: str) -> str:
    """An exception's class with file and line: the last one in package ``top``, else the one that raised it."""
    callers = (__name__, f"{PROJECT}.build", "importlib", "importlib._bootstrap", "importlib._bootstrap_external")
    places = [(str(frame.f_globals.get("__name__")), frame, line) for frame, line in walk_tb(error.__traceback__)]
    places = [place for place in places if place[0] not in callers]
    if not places or isinstance(error, SyntaxError):  # the call itself did not fit; the text tells the place
        return type(error).__name__
    _, frame, line = ([place for place in places if place[0].partition(".")[0] == top] or places)[-1]
    file = frame.f_code.co_filename.rpartition("/site-packages/")[2].removeprefix(f"{Path.cwd()}/")
    return f"{type(error).__name__} at {file}:{line}"
