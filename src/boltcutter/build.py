"""Make objects from configuration, and find its mistakes before anything is made.

A mapping with a ``_target_`` stands for a call of that class or function with the other keys as
arguments; ``_partial_: true`` leaves the call to be finished later (optimizers, schedulers, metrics).
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial, reduce
from operator import or_
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import Mock

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, ConfigDict, StrictBool, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from boltcutter.config import REFERENCE, ConfigError, follow, hint, one_line, say, say_unresolved

PROJECT = __name__.partition(".")[0]
SPECIAL = ("_target_", "_partial_")
UNKNOWN = object()
# Classes that hand their **kwargs on, and to what: a misspelt keyword would pass every signature check.
HANDS_ON = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.strategies.fsdp.FSDPStrategy": "torch.distributed.fsdp.FullyShardedDataParallel",
    "lightning.pytorch.loggers.wandb.WandbLogger": "wandb.init",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": "torch.utils.tensorboard.SummaryWriter",
}


def build(node: Any, path: str = "", **extra: Any) -> Any:
    """Make what ``node`` stands for.

    Args:
        node: Part of a configuration.
        path: Where it stands, for error texts.
        extra: Arguments known only now.

    Raises:
        ConfigError: A value was refused by what it was given to.
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    if isinstance(node, list):
        return [build(value, f"{path}.{index}") for index, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: build(value, f"{path}.{key}") for key, value in node.items()} | extra
    target = locate(node["_target_"])
    known = parameters(target)
    arguments = {k: _typed(v, known.get(k), f"{path}.{k}") for k, v in node.items() if k not in SPECIAL} | extra
    if node.get("_partial_"):
        return partial(target, **arguments)
    try:
        return target(**arguments)
    except Exception as error:
        # In this project's own classes any other of Python's exceptions is a fault in the code and not in a value.
        own = getattr(target, "__module__", "").partition(".")[0] == PROJECT
        if own and type(error).__module__ == "builtins" and not isinstance(error, ValueError | OSError | ImportError):
            raise
        where, text = path.lstrip("."), one_line(error)
        names_setting = re.match(rf"{where.partition('.')[0]}\b[.:=]|\w+(\.\w+)+=", text)
        raise ConfigError(text if names_setting else f"{where}: {text}") from error


def check(cfg: DictConfig, root: Callable[..., Any]) -> list[str]:
    """One line for each mistake in ``cfg``, whose top-level keys are the arguments of ``root``."""
    try:
        resolved = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        return [say_unresolved(error, cfg)]
    found = dict(_check_call(resolved, OmegaConf.to_container(cfg), root, ""))
    # What is referred to is told once, where it is written.
    told = {path: follow(cfg, path) for path in found}
    return [f"{path}{text}" for path, text in found.items() if told[path] == path or told[path] not in found]


@cache
def locate(path: str) -> Callable[..., Any]:
    """The class or function that a dotted path names."""
    module, names = str(path), list[str]()
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
        except (ValueError, TypeError):
            raise ConfigError(f"{path!r} is not the dotted path of a class") from None
    for name in names:
        if not hasattr(found, name):
            raise ConfigError(f"{found.__name__} has no {name}{hint(name, dir(found))}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{path} cannot be called; give the full dotted path of a class")
    return found


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
    handed_on = HANDS_ON.get(f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}")
    if handed_on:
        open_end = {n for n, p in typed.items() if p.kind is p.VAR_KEYWORD}
        wrapped = {n: p.replace(default=None) for n, p in parameters(locate(handed_on)).items() if n != "module"}
        typed = wrapped | {n: p for n, p in typed.items() if n not in open_end}
    return typed


def _keyword_base(target: Callable[..., Any], known: dict[str, inspect.Parameter]) -> type | None:
    """The base class that a class of this project gives its ``**keywords`` to: the project's own custom."""
    own = getattr(target, "__module__", "").partition(".")[0] == PROJECT
    if own and inspect.isclass(target) and any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return next((base for base in target.__mro__[1:] if "__init__" in vars(base) and base is not object), None)
    return None


def _check(value: Any, raw: Any, path: str) -> Iterator[tuple[str, str]]:
    """Mistakes below ``path``: where, and what is said of it."""
    if isinstance(raw, str) and REFERENCE.fullmatch(raw):
        return  # told where it is written
    if isinstance(value, list):
        value, raw = dict(enumerate(value)), dict(enumerate(raw))
    if isinstance(value, dict):
        if "_target_" not in value:
            for key, inner in value.items():
                yield from _check(inner, raw[key], f"{path}.{key}")
            return
        try:
            target = locate(value["_target_"])
        except ConfigError as error:
            yield f"{path}._target_", f": {error}"
            return
        yield from _check_call(value, raw, target, path)


def _check_call(node: Any, raw: Any, target: Callable[..., Any], path: str) -> Iterator[tuple[str, str]]:
    known, dot = parameters(target), path and f"{path}."
    name = getattr(target, "__qualname__", str(target))
    anything = not known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key, value in node.items():
        if key in SPECIAL:
            continue
        if value == "???":
            yield f"{dot}{key}", f": not set; say {dot}{key}=…"
        elif key in named:
            problems = list(_check(value, raw[key], f"{dot}{key}"))
            yield from problems or _misfits(value, named[key].annotation, f"{dot}{key}")
        elif anything:
            yield from _check(value, raw[key], f"{dot}{key}")
        elif path:
            yield (
                f"{dot}{key}",
                f": {name} takes no such argument{hint(key, named) or f'; --describe {path} lists them'}",
            )
        else:
            yield key, f": no such key{hint(key, named) or '; --print shows all'}"
    if not node.get("_partial_"):
        for n, p in named.items():
            if p.default is p.empty and n not in node:
                yield f"{dot}{n}", f": missing; {name} needs it ({type_name(p.annotation)})"


def _misfits(value: Any, wanted: Any, path: str) -> Iterator[tuple[str, str]]:
    """What of ``value`` is not as ``wanted``: the whole, or some entries of a mapping."""
    if fits(value, wanted):
        return
    maps = [a for a in (wanted, *get_args(wanted)) if _is_a(get_origin(a), Mapping)]
    if maps and isinstance(value, dict) and "_target_" not in value:
        for key, inner in value.items():
            if not fits({key: inner}, wanted):
                yield from _misfits(inner, get_args(maps[0])[1], f"{path}.{key}")
        return
    shown = value["_target_"] if isinstance(value, dict) and "_target_" in value else say(value)
    yield path, f"={shown}: expected {type_name(wanted)}{hint(str(value), _choices(wanted))}"


def fits(value: Any, wanted: Any) -> bool:
    """Whether ``value``, once built, can be given where ``wanted`` is the annotation."""
    stand_in = _stand_in(value)
    if stand_in is UNKNOWN:
        return True
    try:
        _adapter(_strictly(wanted)).validate_python(stand_in)
    except ValidationError:
        return False
    except Exception:  # an annotation that pydantic cannot read: the call itself will tell
        return True
    return True


def _strictly(wanted: Any) -> Any:
    """An annotation that takes no text and no truth value for a number, and nothing else for a truth value."""
    if wanted in (int, float):
        return Annotated[wanted, BeforeValidator(_number)]
    if wanted is bool:
        return StrictBool
    origin, inner = get_origin(wanted), tuple(map(_strictly, get_args(wanted)))
    if origin in (Union, types.UnionType):
        return reduce(or_, inner)
    return origin[inner] if _is_a(origin, Collection) else wanted


def _number(value: Any) -> Any:
    if isinstance(value, str | bool):
        raise ValueError(f"{value!r} is no number")
    return value


def _stand_in(value: Any) -> Any:
    """``value`` with a mock of the right class wherever an object will be built."""
    if isinstance(value, list):
        items = [_stand_in(v) for v in value]
        return UNKNOWN if any(item is UNKNOWN for item in items) else items
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        filled = {k: _stand_in(v) for k, v in value.items()}
        return UNKNOWN if any(item is UNKNOWN for item in filled.values()) else filled
    try:
        target = locate(value["_target_"])
    except ConfigError:
        return UNKNOWN  # told where it is written
    if value.get("_partial_"):
        return partial(target)
    made = target if inspect.isclass(target) else getattr(target, "__annotations__", {}).get("return")
    if isinstance(made, str):
        try:
            made = get_type_hints(target).get("return")
        except Exception:  # whatever a foreign module's annotations raise when read
            return UNKNOWN
    return Mock(spec=made) if inspect.isclass(made) else UNKNOWN


def _typed(value: Any, parameter: inspect.Parameter | None, path: str) -> Any:
    """Build ``value``; plain data becomes what the annotation asks for: a Path, a tuple, a float."""
    made = build(value, path)
    if parameter is None or made is None or _has_target(value):
        return made
    try:
        typed = _adapter(parameter.annotation).validate_python(made)
    except (ValidationError, PydanticUserError):
        return made
    return made if isinstance(typed, Iterator) else typed


def _adapter(wanted: Any) -> TypeAdapter[Any]:
    return TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True))


def _has_target(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_has_target, inner))


def _is_a(origin: Any, base: type) -> bool:
    return inspect.isclass(origin) and issubclass(origin, base)


def _choices(wanted: Any) -> list[Any]:
    """The values of every Literal inside an annotation."""
    inner = get_args(wanted)
    return list(inner) if get_origin(wanted) is Literal else [c for a in inner for c in _choices(a)]


def type_name(wanted: Any) -> str:
    """An annotation, as a person would write it."""
    if get_origin(wanted) in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in get_args(wanted))
    if get_origin(wanted) is Literal:
        return " | ".join(map(repr, get_args(wanted)))
    if wanted is type(None):
        return "null"
    if inspect.isclass(wanted) and not get_args(wanted):
        return wanted.__qualname__
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(wanted))
