"""Why a class or function refuses its arguments, and what corrects them: computed once they have been refused.

``instantiate`` decides that something is wrong; here is what the user is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from boltcutter.config import foreign
from boltcutter.config.annotations import is_too_large, literal_values, matches, type_name, wants_class
from boltcutter.config.errors import ConfigError, Kind, Mistake, hint, one_line, suggestion
from boltcutter.config.locate import add_to_path, locate, module_folder, origin, package, parameters
from boltcutter.config.nested import MissingSettingError
from boltcutter.config.values import format_value, parse
from boltcutter.project import install_command, is_own_package

TRUTH = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}  # of YAML 1.1 and shells
GIVEN = ("params", "optimizer")  # arguments of optimizers and schedulers that a task gives


def not_set(key: str) -> Mistake:
    """A value that has to be given."""
    return Mistake.of(key, "not set", f"give {key}=…", kind="missing_value")


def missing_argument(dot: str, name: str, owner: str, annotation: Any) -> Mistake:
    """An argument without a default; ``dot`` is the key of the call with a point, ``owner`` who needs it."""
    remedy = f"{owner} needs it ({type_name(annotation)})"
    if name in GIVEN:
        remedy += f"; write {dot}_partial_=true, as the task gives it"
    return Mistake.of(f"{dot}{name}", "missing", remedy, kind="missing_value")


def no_argument(section: str, key: str, value: Any, owner: str, known: Iterable[str]) -> Mistake:
    """An argument that a call does not take."""
    theirs = foreign.replacement(f"{section}.{key}", format_value(value))
    remedy = f"use {theirs}" if theirs else suggestion(key, known) or f"--describe {section} lists them"
    return Mistake.of(f"{section}.{key}", f"{owner} takes no such argument", remedy, kind="unknown_key")


def no_top_level_key(key: str, below: Iterable[str], known: Iterable[str]) -> Mistake:
    """A key of the top level that nothing takes; ``below`` are all keys of the configuration."""
    inner = next((each for each in below if each.endswith(f".{key}")), None)
    near = f"did you mean {inner}?" if inner else suggestion(key, [*known, "defaults"])
    return Mistake.of(key, "no such key", near or "--print shows all", kind="unknown_key")


def no_field(key: str, kind: type, known: Iterable[str]) -> Mistake:
    """A key that a class of nested settings has not."""
    remedy = suggestion(key.rpartition(".")[2], known) or "remove it"
    return Mistake.of(key, f"{kind.__qualname__} has no such field", remedy, kind="unknown_key")


def wrong_type(key: str, value: Any, wanted: Any) -> Mistake:
    """A value that an annotation does not take, with what may have been meant."""
    target = value.get("_target_") if isinstance(value, dict) else None
    shown = (target or format_value(value)).replace("\n", r"\n")  # each line is a mistake
    meant = next((format_value(other) for other in _readings(value, key) if matches(other, wanted)), None)
    near = f"; did you mean {meant}?" if meant else foreign.remedy(target and locate(target))
    near = near or hint(str(value), literal_values(wanted))
    if isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value) and (wants_class(wanted) or matches(len, wanted)):
        near = f"; write {key}._target_={value} {key}._partial_=true"
    expected = f"expected {type_name(wanted)}"
    if is_too_large(value):
        expected, near = f"{expected} of at most 64 bits", "; correct it"
    if isinstance(value, dict) and not target:
        near = f"; add {key}._target_, the path of a class"
    return Mistake.of(key, expected, near.removeprefix("; ") or None, value=shown, kind="wrong_type")


def wrong_key(key: str, wanted: Any) -> Mistake:
    """A key of a mapping that an annotation does not take."""
    last = key.rpartition(".")[2]
    return Mistake.of(key, f"the key {last} is no {type_name(wanted)}", "rename it", kind="wrong_type")


def _readings(value: Any, path: str) -> Iterator[Any]:
    """What a plain value of a wrong type may stand for: a quoted number, a boolean, one or more elements of a list."""
    if isinstance(value, str | int | float):
        with suppress(ConfigError):
            yield from (parse(path, str(value)), list(parse(path, f"[{value}]")))  # the latter as in Hydra
        yield str(value)
        yield from (TRUTH[text] for text in (str(value).lower(),) if text in TRUTH)


def is_bug(target: Callable[..., Any], error: Exception) -> bool:
    """Whether an error of a call is one of its code, rather than about a value.

    In classes of the library and the project, built-in exceptions are bugs, but for those that a check of a value
    raises.
    """
    refuses = isinstance(error, MissingSettingError | ValueError | OSError | ImportError)
    return is_own_package(package(target)) and type(error).__module__ == "builtins" and not refuses


def refused(
    section: str, named: str, target: Callable[..., Any], arguments: Mapping[str, Any], error: Exception
) -> ConfigError:
    """What is wrong where a call has raised an error.

    Args:
        section: Key of the call.
        named: The ``_target_`` as it is written.
        target: What was called.
        arguments: Its keyword arguments.
        error: What it has raised.
    """
    if isinstance(error, MissingSettingError):
        found = filter(None, (error.key_in(value, f"{section}.{name}") for name, value in arguments.items()))
        key = next(found, f"{section}.{error.name}").lstrip(".")
        remedy = error.near.removeprefix("; ") or f"give +{key}=…"
        return ConfigError(Mistake.of(key, f"not set, but {named} reads it", remedy, kind="missing_value"))
    text = one_line(error)
    if missing := _missing_package(section, text, error):
        return ConfigError(missing)
    if re.match(rf"{section.partition('.')[0]}\b[.:=]|\w+(\.\w+)+=", text):  # it names the setting
        return ConfigError(text)
    place = "" if is_own_package(package(target)) else f" ({origin(error, package(target))})"
    return ConfigError(name_setting(section, target, arguments, text + place))


def _missing_package(section: str, text: str, error: Exception) -> Mistake | None:
    """The mistake if a package, or a module beside the class, is missing."""
    requirement = re.match(r"Requirement '([\w-]+)", text) if isinstance(error, ImportError) else None
    if not requirement and not isinstance(error, ModuleNotFoundError):
        return None
    needed = requirement[1] if requirement else str(getattr(error, "name", None) or "").partition(".")[0]
    if not needed:  # raised by a library, whose text says what is missing
        return None
    kind: Kind = "not_installed"
    if not requirement and (beside := module_folder(needed, error)):
        return Mistake.of(section, f"needs {needed}", add_to_path(beside), kind=kind)
    command = f"pip install {needed}" if requirement else install_command(needed)  # the name is of a requirement
    return Mistake.of(section, f"{needed} is not installed", command, kind=kind)


def name_setting(section: str, target: Callable[..., Any], arguments: Mapping[str, Any], text: str) -> str:
    """Prefix the text of an error with the argument that it is about, if it names one, or else with the section.

    The error, of any library, is of calling ``target``, at the key ``section``, with keyword ``arguments``.
    """
    plain = {key: value for key, value in arguments.items() if isinstance(value, str | int | float)}
    named = [key for key in plain if re.search(rf"\b{re.escape(key)}\b", text)]
    if not named and re.search(r"(?i)\binvalid|not a valid", text):
        named = [k for k, v in plain.items() if re.search(rf"(?<![\w.-]){re.escape(str(v))}(?![\w.])", text)]
    if len(named) != 1:
        return f"{section}: {text}" if "; " in text else f"{section}: {text}; --describe {section} lists its arguments"
    key, value = named[0], plain[named[0]]
    if key not in parameters(target):
        near = hint(key, parameters(target))
        return f"{section}.{key}: {text}{near or '; remove it'}"
    near = hint(value, set(re.findall(r"\w+", text)) - {value}, 0.75) if isinstance(value, str) else ""
    return f"{section}.{key}={format_value(value)}: {text.rstrip('.')}{near or '; correct it, or remove it'}"
