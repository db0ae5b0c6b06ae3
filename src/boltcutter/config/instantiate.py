"""Instantiate objects from configuration, and validate it before anything is instantiated.

A mapping with a ``_target_`` is a call of that class or function with the other keys as keyword arguments and the list
``_args_`` as positional arguments; ``_partial_: true`` makes a ``functools.partial`` (optimizers, schedulers, metrics);
``_check_: false`` accepts any keyword, for a class whose signature is incomplete; ``_recursive_: false`` passes
mappings with a ``_target_`` as they are, for a class that instantiates them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf

from boltcutter import extend
from boltcutter.config import refusals
from boltcutter.config.annotations import (
    coerce,
    element,
    follow_annotations,
    holds_nested,
    is_subclass,
    matches,
    nested_class,
    type_name,
    wants_class,
)
from boltcutter.config.compose import ALWAYS_BUILT
from boltcutter.config.errors import ConfigError, Mistake, one_line
from boltcutter.config.locate import adapter, locate, parameters
from boltcutter.config.nested import fields, invalid_fields, is_pydantic, takes_other_keys
from boltcutter.config.settings import Settings
from boltcutter.config.values import (
    REFERENCE,
    SPECIAL,
    format_value,
)


def build(node: Any, path: str = "", **extra: Any) -> Any:
    """Instantiate a part of a configuration.

    Args:
        node: The part.
        path: Its dotted key, for messages.
        extra: More keyword arguments.

    Raises:
        ConfigError: A class or function refused a value.
    """
    if node == "???":
        raise ConfigError(f"{path}: not set; give {path}=…", kind="missing_value")
    if isinstance(node, list):
        return [build(value, f"{path}.{index}") for index, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: build(value, f"{path}.{key}") for key, value in node.items()} | extra
    target = locate(node["_target_"])
    known = parameters(target)
    given = {k: v for k, v in node.items() if k not in SPECIAL}
    if node.get("_recursive_") is False:  # as from Hydra, which gives its own containers
        kept = {k: OmegaConf.create(v) for k, v in given.items() if isinstance(v, dict | list)}
    else:
        kept = {}
    typed = {k: _typed(v, known.get(k), f"{path}.{k}") for k, v in given.items() if k not in kept}
    arguments = typed | kept | extra
    each = zip_longest(node.get("_args_") or (), _positional(node, known))
    positional = [_typed(v, p, f"{path}._args_.{i}") for i, (v, p) in enumerate(each)]
    if node.get("_partial_"):
        return partial(target, *positional, **arguments)
    if inspect.isabstract(target):
        methods = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise ConfigError(f"{path.lstrip('.')}._target_={node['_target_']}: {methods}: not defined; add to the class")
    try:
        return target(*positional, **arguments)
    except Exception as error:
        if refusals.is_bug(target, error):
            raise
        raise refusals.refused(path.lstrip("."), node["_target_"], target, arguments, error) from error


def _typed(value: Any, parameter: inspect.Parameter | None, path: str) -> Any:
    """Instantiate ``value``; plain data is converted to the annotated type."""
    made = build(value, path)
    if (other := adapter(type(made))) and not (parameter and adapter(parameter.annotation)):
        return build({"_target_": other, "model": made}, path)
    if parameter is None or made is None:
        return made
    wanted = parameter.annotation
    if isinstance(made, partial) and not (made.args or made.keywords) and wants_class(wanted):
        return made.func
    if _has_target(value) and not (wanted is Any or nested_class(wanted)):
        return made
    try:
        return coerce(made, wanted)
    except Exception as error:  # the class of nested settings can raise anything
        raise ConfigError(f"{path.lstrip('.')}: {type_name(wanted)}: {one_line(error)}; correct it") from error


def _has_target(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_has_target, inner))


def checked(cfg: Settings, root: Callable[..., Any]) -> Settings:
    """Return the settings with texts that look like numbers where annotations say so, when all values were checked.

    Raises:
        ConfigError: There are mistakes, one line for each; see ``find_mistakes``.
    """
    cfg = follow_annotations(cfg, root)
    if mistakes := find_mistakes(cfg, root):
        raise ConfigError(*mistakes)
    return cfg


def find_mistakes(cfg: Settings, root: Callable[..., Any]) -> list[Mistake]:
    """List the mistakes in ``cfg``, one line each; its top-level keys are arguments of ``root``, or other groups."""
    cfg = follow_annotations(cfg, root)
    try:
        resolved, raw = cfg.resolved, cfg.written
    except ConfigError as error:
        return error.mistakes
    more = [
        group
        for group in raw.get("choices") or ()
        if group in raw and group not in (*ALWAYS_BUILT, *extend.groups(), *parameters(root))
    ]
    found = [*_check_call({key: value for key, value in resolved.items() if key not in more}, raw, root, "")]
    for group in more:
        if isinstance(resolved[group], dict) and resolved[group].get("_recursive_") is False:
            continue  # what refers to it instantiates it itself
        found += _check(resolved[group], raw[group], group)
    # A mistake in the target of references is reported once, where it is defined.
    by_key = {mistake.setting: mistake for mistake in found}
    defined = {key: cfg.target_of(key) for key in by_key}
    return [mistake for key, mistake in by_key.items() if defined[key] == key or defined[key] not in by_key]


def _positional(node: dict[str, Any], known: dict[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameter that receives each of ``_args_``; fewer if there are too many arguments."""
    given = len(args) if isinstance(args := node.get("_args_"), list) else 0
    one_each = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p for p in known.values() if p.kind is p.VAR_POSITIONAL]
    return [*one_each, *rest * given][:given]


def _check(value: Any, raw: Any, path: str) -> Iterator[Mistake]:
    """Yield the mistakes below ``path``."""
    if isinstance(raw, str) and REFERENCE.fullmatch(raw):
        return  # reported where it is defined
    raw = value if isinstance(raw, str) else raw  # a resolver has created the value
    if isinstance(value, list):
        value, raw = dict(enumerate(value)), dict(enumerate(raw))
    if isinstance(value, dict):
        if "_target_" not in value:
            for key, inner in value.items():
                yield from _check(inner, raw[key], f"{path}.{key}")
            return
        try:
            target = locate(str(value["_target_"]))
        except ConfigError as error:
            yield Mistake.of(f"{path}._target_", str(error), kind=error.mistakes[0].kind)
            return
        yield from _check_call(value, raw, target, path)


def _check_call(node: Any, raw: Any, target: Callable[..., Any], path: str) -> Iterator[Mistake]:
    known, dot = parameters(target), path and f"{path}."
    name = getattr(target, "__qualname__", str(target))
    is_checked = node.get("_check_", True)
    takes_anything = not is_checked or any(p.kind is p.VAR_KEYWORD for p in known.values())
    named = {n: p for n, p in known.items() if is_checked and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    receivers = _positional(node, known)
    yield from _check_positional(node, raw, receivers if known and is_checked else None, name, dot)
    for key, value in node.items():
        if key in SPECIAL:
            continue
        if value == "???":
            yield refusals.not_set(f"{dot}{key}")
        elif key in known and isinstance(value, dict | list) and node.get("_recursive_") is False:
            continue  # the class instantiates and checks it itself
        elif key in named:
            problems = list(_check(value, raw[key], f"{dot}{key}"))
            yield from problems or _mismatches(value, named[key].annotation, f"{dot}{key}")
        elif takes_anything:
            yield from _check(value, raw[key], f"{dot}{key}")
        elif path:
            yield refusals.no_argument(path, key, value, name, named)
        else:
            yield refusals.no_top_level_key(key, Settings(raw).keys_below(), named)
    if not node.get("_partial_"):
        for n, p in named.items():
            if p.default is p.empty and n not in node and p not in receivers:
                yield refusals.missing_argument(dot, n, name, p.annotation)


def _check_positional(
    node: Any, raw: Any, receivers: list[inspect.Parameter] | None, name: str, dot: str
) -> Iterator[Mistake]:
    """Yield mistakes in ``_args_``; their number and types are checked only if ``receivers`` are known."""
    if "_args_" not in node:
        return
    given = node["_args_"]
    if not isinstance(given, list):
        shown = format_value(given)
        yield Mistake.of(f"{dot}_args_", "expected a list", f"write _args_: [{shown}]", value=shown, kind="wrong_type")
        return
    if receivers is not None and len(receivers) < len(given):
        yield Mistake.of(f"{dot}_args_", f"{name} takes {len(receivers)} positional arguments, got {len(given)}")
        return
    for i, (value, p) in enumerate(zip_longest(given, receivers or ())):
        problems = list(_check(value, raw["_args_"][i], f"{dot}_args_.{i}"))
        yield from problems or (_mismatches(value, p.annotation, f"{dot}_args_.{i}") if p else ())
        if p and p.kind is not p.VAR_POSITIONAL and p.name in node:
            remedy = f"remove it, or entry {i} of {dot}_args_"
            yield Mistake.of(f"{dot}{p.name}", "given twice", remedy, kind="conflict")


def _mismatches(value: Any, wanted: Any, path: str) -> Iterator[Mistake]:
    """Yield what does not match the type ``wanted``: ``value`` as a whole, or entries of a mapping."""
    if isinstance(value, dict) and "_target_" not in value and (kind := nested_class(wanted, value)):
        yield from _nested_mistakes(value, kind, path)
        return
    found = False
    for key, inner in dict(
        value if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ).items():
        if holds_nested(within := element(wanted, key)):
            for problem in _mismatches(inner, within, f"{path}.{key}"):
                found = True
                yield problem
    if found or matches(value, wanted):
        return
    maps = [a for a in (wanted, *get_args(wanted)) if is_subclass(get_origin(a), Mapping)]
    if maps and isinstance(value, dict) and "_target_" not in value:
        for key, inner in value.items():
            if not matches({key: inner}, wanted):
                of_key, of_value = get_args(maps[0])
                problems = list(_mismatches(inner, of_value, f"{path}.{key}"))
                yield from problems or [refusals.wrong_key(f"{path}.{key}", of_key)]
        return
    yield refusals.wrong_type(path, value, wanted)


def _nested_mistakes(value: dict[str, Any], kind: type, path: str) -> Iterator[Mistake]:
    """Yield the mistakes in a mapping that becomes an object of a class: unknown and missing keys, wrong values."""
    known, found = fields(kind), False
    for key, inner in value.items():
        if inner == "???":
            problems = [refusals.not_set(f"{path}.{key}")]
        elif key in known:
            problems = list(_mismatches(inner, known[key][0], f"{path}.{key}"))
        else:
            problems = [] if takes_other_keys(kind) else [refusals.no_field(f"{path}.{key}", kind, known)]
        found |= bool(problems)
        yield from problems
    for key, (wanted, is_required) in known.items():
        if is_required and key not in value:
            found = True
            yield refusals.missing_argument(f"{path}.", key, kind.__qualname__, wanted)
    if is_pydantic(kind) and not found and not _has_target(value):
        for place, problem in invalid_fields(kind, value):
            yield Mistake.of(".".join([path, *place]), f"{kind.__qualname__}: {problem}", "correct it")
