"""Make objects from configuration, and find its mistakes before anything is made.

A mapping with a ``_target_`` stands for a call of that class or function with the other keys as
arguments and the list ``_args_`` as those without a name; ``_partial_: true`` leaves the call to be finished later
(optimizers, schedulers, metrics); ``_check_: false`` takes any keyword, for a class whose signature does not show all.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltcutter.config import (
    ALWAYS_BUILT,
    REFERENCE,
    ConfigError,
    format_unresolved,
    format_value,
    hint,
    one_line,
    parse,
    resolve_reference,
)
from boltcutter.fit import coerce, is_subclass, literal_values, matches, type_name
from boltcutter.locate import PROJECT, is_keras_model, locate, origin, package, parameters

KERAS_MODEL = f"{PROJECT}.model.keras.KerasModel"
SPECIAL = ("_target_", "_partial_", "_args_", "_check_")


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
    each = zip_longest(node.get("_args_") or (), _positional(node, known))
    positional = [_typed(v, p, f"{path}._args_.{i}") for i, (v, p) in enumerate(each)]
    if node.get("_partial_"):
        return partial(target, *positional, **arguments)
    try:
        return target(*positional, **arguments)
    except Exception as error:
        # In this project's own classes any other of Python's exceptions is a fault in the code and not in a value.
        own = package(target) == PROJECT
        if own and type(error).__module__ == "builtins" and not isinstance(error, ValueError | OSError | ImportError):
            raise
        where, text = path.lstrip("."), one_line(error)
        names_setting = re.match(rf"{where.partition('.')[0]}\b[.:=]|\w+(\.\w+)+=", text)
        place = "" if own else f" ({origin(error, package(target))})"
        raise ConfigError(text if names_setting else f"{where}: {text}{place}") from error


def _typed(value: Any, parameter: inspect.Parameter | None, path: str) -> Any:
    """Build ``value``; plain data becomes what the annotation asks for."""
    made = build(value, path)
    if is_keras_model(type(made)) and not (parameter and is_keras_model(parameter.annotation)):
        return build({"_target_": KERAS_MODEL, "model": made}, path)
    return made if parameter is None or made is None or _has_target(value) else coerce(made, parameter.annotation)


def _has_target(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_has_target, inner))


def check(cfg: DictConfig, root: Callable[..., Any]) -> list[str]:
    """One line for each mistake in ``cfg``, whose top-level keys are arguments of ``root``, or other groups."""
    try:
        resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        return [format_unresolved(error, cfg)]
    raw: Any = OmegaConf.to_container(cfg)
    more = [
        group for group in raw.get("choices") or () if group in raw and group not in (*ALWAYS_BUILT, *parameters(root))
    ]
    found = dict(_check_call({key: value for key, value in resolved.items() if key not in more}, raw, root, ""))
    for group in more:
        found |= dict(_check(resolved[group], raw[group], group))
    # What is referred to is told once, where it is written.
    told = {path: resolve_reference(cfg, path) for path in found}
    return [f"{path}{text}" for path, text in found.items() if told[path] == path or told[path] not in found]


def _positional(node: dict[str, Any], known: dict[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Which parameter takes each of ``_args_``; fewer where they are too many."""
    given = len(args) if isinstance(args := node.get("_args_"), list) else 0
    one_each = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p for p in known.values() if p.kind is p.VAR_POSITIONAL]
    return [*one_each, *rest * given][:given]


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
    told = node.get("_check_", True)  # whether the signature tells what is taken
    anything = not told or not known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    named = {n: p for n, p in known.items() if told and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takers = _positional(node, known)
    yield from _check_positional(node, raw, takers if known and told else None, name, dot)
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
            if p.default is p.empty and n not in node and p not in takers:
                yield f"{dot}{n}", f": missing; {name} needs it ({type_name(p.annotation)})"


def _check_positional(
    node: Any, raw: Any, takers: list[inspect.Parameter] | None, name: str, dot: str
) -> Iterator[tuple[str, str]]:
    """Mistakes in ``_args_``; of their number and types only where ``takers`` are known."""
    if "_args_" not in node:
        return
    given = node["_args_"]
    if not isinstance(given, list):
        yield f"{dot}_args_", f"={format_value(given)}: expected a list; write _args_: [{format_value(given)}]"
        return
    if takers is not None and len(takers) < len(given):
        yield f"{dot}_args_", f": {name} takes {len(takers)} arguments without a name, got {len(given)}"
        return
    for i, (value, p) in enumerate(zip_longest(given, takers or ())):
        problems = list(_check(value, raw["_args_"][i], f"{dot}_args_.{i}"))
        yield from problems or (_misfits(value, p.annotation, f"{dot}_args_.{i}") if p else ())
        if p and p.kind is not p.VAR_POSITIONAL and p.name in node:
            yield f"{dot}{p.name}", f": given twice; drop it, or entry {i} of {dot}_args_"


def _of_old_package(value: Any) -> str:
    """The remedy for a class of ``pytorch_lightning``, which a trainer of ``lightning`` refuses."""
    target = locate(value["_target_"]) if isinstance(value, dict) and "_target_" in value else None
    bases = {base.__module__.partition(".")[0] for base in getattr(target, "__mro__", ())}
    return "; import it from lightning.pytorch, not pytorch_lightning" if "pytorch_lightning" in bases else ""


def _misfits(value: Any, wanted: Any, path: str) -> Iterator[tuple[str, str]]:
    """What of ``value`` is not as ``wanted``: the whole, or some entries of a mapping."""
    if matches(value, wanted):
        return
    maps = [a for a in (wanted, *get_args(wanted)) if is_subclass(get_origin(a), Mapping)]
    if maps and isinstance(value, dict) and "_target_" not in value:
        for key, inner in value.items():
            if not matches({key: inner}, wanted):
                yield from _misfits(inner, get_args(maps[0])[1], f"{path}.{key}")
        return
    shown = value["_target_"] if isinstance(value, dict) and "_target_" in value else format_value(value)
    listed = isinstance(value, str) and "," in value and matches(parse(path, f"[{value}]"), wanted)  # as Hydra's sweeps
    near = (
        f"; did you mean [{value}]?" if listed else _of_old_package(value) or hint(str(value), literal_values(wanted))
    )
    yield path, f"={shown}: expected {type_name(wanted)}{near}"
