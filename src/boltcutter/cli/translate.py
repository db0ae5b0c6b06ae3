"""Translate the arguments that users of Hydra, lightning-hydra-template and Lightning CLI give by habit.

What has one meaning here is translated: ``-m``, ``callbacks=``, ``hparams_search=`` and ``ckpt_path=`` of a run.
The rest is an error with the argument to use instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from boltcutter import run_files
from boltcutter.config.errors import ConfigError
from boltcutter.config.foreign import renamed
from boltcutter.config.values import format_value, parse, split_values
from boltcutter.project import Project

MAX_VALUES = 100_000  # of a range
MULTIRUN = ("-m", "--multirun")
FLAGS = {
    **dict.fromkeys(("--cfg", "--print_config", "--resolve"), "--print"),
    **dict.fromkeys(("--config", "-c", "--config-name", "-cn"), "experiment={}"),
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "experiment=<path of a YAML file>"),
}
SEVERAL = re.compile(r"^[^=]+=(range|glob)\(.*\)$", re.S)
SWEEP = re.compile(r"(range|glob|choice|interval|tag|shuffle|sort|int|float)\((.*)\)", re.S)


def translate(project: Project, command: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Translate arguments.

    Args:
        project: Project whose groups are known.
        command: Name of the command.
        arguments: Its arguments.

    Returns:
        The command to run, which is the search for a multirun, and its arguments.

    Raises:
        ConfigError: An argument has no meaning here.
    """
    is_multirun = command == "train" and bool({*MULTIRUN} & {*arguments})
    arguments = [argument for argument in arguments if not (is_multirun and argument in MULTIRUN)]
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=False):
        _refuse_flag(flag, value)
    arguments = [_rename(project, argument) for argument in arguments]
    if command in ("train", "evaluate"):
        arguments = [translated for argument in arguments for translated in _checkpoint(command, argument)]
    if command == "train" and any(argument.startswith("search=") for argument in arguments):
        command = "search"  # which hparams_search= has become
    if command == "train" and not is_multirun and (several := next((a for a in arguments if SEVERAL.search(a)), None)):
        raise ConfigError(f"{several}: stands for several values; add -m, which trains with each of them")
    if command == "bisect" or (command == "compare" and not any(a.startswith("--metric") for a in arguments)):
        arguments = _two_runs(arguments)
    if is_multirun:
        command, arguments = _multirun(project, command, arguments)
    return command, arguments


def _two_runs(arguments: Sequence[str]) -> list[str]:
    """Name the runs that are given without a key, and the interpreters."""
    keys = iter(("run", "with"))
    found = [argument.replace("--python-", "python_", 1) for argument in arguments]
    is_run = [
        not word.startswith("-") and ("=" not in word or Path(word, run_files.RECORD).is_file()) for word in found
    ]
    return [f"{next(keys, 'run')}={word}" if named else word for word, named in zip(found, is_run, strict=True)]


def _refuse_flag(flag: str, value: str) -> None:
    """Refuse a flag of Hydra or Lightning CLI.

    Args:
        flag: An argument.
        value: The next argument, which may be the value of the flag.

    Raises:
        ConfigError: It is such a flag; the message has the argument to use.
    """
    name, equals, given = flag.partition("=")
    value = given if equals else value
    if name in FLAGS:
        raise ConfigError(f"{flag}: not a flag of this command; use {FLAGS[name].format(value or '<file>')}")
    if name.startswith("--") and ("." in name or renamed(name[2:]) or name == "--ckpt_path"):
        key = name[2:] if name == "--ckpt_path" else renamed(name[2:]) or name[2:]
        raise ConfigError(f"{flag}: keys are given without dashes; use {key}={value or '…'}")


def _rename(project: Project, argument: str) -> str:
    """Rename the keys of callbacks and of a search, unless the project has such groups itself."""
    sign, key, rest = re.fullmatch(r"([+~]*)([^=]*)(.*)", argument, re.S).groups()  # type: ignore[union-attr]
    group = key.partition(".")[0]
    if group not in ("callbacks", "hparams_search") or project.has_group(group):
        return argument
    is_option = "model_checkpoint" in project.groups().get("callback", {})
    new = f"callback{key.removeprefix(group)}" if is_option and group == "callbacks" else renamed(key)
    return f"{sign}{new}{rest}"


def _checkpoint(command: str, argument: str) -> list[str]:
    """Translate ``ckpt_path=`` into the run that has the checkpoint; other arguments are returned as they are.

    Raises:
        ConfigError: It is in no run.
    """
    key, _, text = argument.partition("=")
    if key.lstrip("+") != "ckpt_path":
        return [argument]
    if text in ("", "null"):
        return []
    if text in ("last", "best"):
        raise ConfigError(
            f"{argument}: which run?; use "
            + ("resume=<folder of a run>" if command == "train" else f"run=<folder of a run> ckpt={text}")
        )
    path = Path(text)
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / run_files.RECORD).is_file()), None)
    if run is None:
        remedy = f"init_from={text} starts a new run from its weights"
        if command == "evaluate":
            remedy = f"use run=<folder of a run of the same model> ckpt={text}"
        raise ConfigError(f"{argument}: not in the folder of a run; {remedy}")
    is_default = path == run or (command == "train" and path.name.startswith("last"))
    return [f"{'resume' if command == 'train' else 'run'}={run}", *([] if is_default else [f"ckpt={text}"])]


def _multirun(project: Project, command: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Turn a multirun into a search over a grid, whose trials are ordinary runs; without several values, into a run."""
    swept, rest = list[str](), list[str]()
    for argument in arguments:
        key, equals, text = argument.lstrip("+").partition("=")
        values = _swept_values(project, key, text) if equals and not argument.startswith("-") else None
        if values is None:
            rest.append(argument)
        else:
            swept.append(f"search.space.{key}=grid({', '.join(values)})")
    if not swept:
        return command, rest
    if command == "search":
        key, _, text = swept[0].removeprefix("search.space.").partition("=")
        raise ConfigError(f"-m: {key} has several values besides a search; use {swept[0].replace('grid', 'choice')}")
    return "search", ["search=grid", "search.space={}", "search.overrides=[]", *swept, *rest]


def _swept_values(project: Project, key: str, text: str) -> list[str] | None:
    """The values that an override of a multirun has in Hydra; None if it has one.

    Raises:
        ConfigError: It is a distribution, or a pattern that no option matches.
    """
    found = SWEEP.fullmatch(text)
    if not found:
        values = split_values(text)
        return values if len(values) > 1 else None
    kind, inner = found.groups()
    if kind == "glob":
        options = [option for option in project.groups().get(key, {}) if fnmatchcase(option, inner)]
        if options:
            return options
        raise ConfigError(f"{key}={text}: matches no option{project.list_options(key)}")
    numbers = [parse(key, value) for value in split_values(inner)]
    if kind != "range" or not 1 <= len(numbers) <= 3 or not all(isinstance(n, int | float) for n in numbers):
        raise ConfigError(
            f"{key}={text}: not a list of values; use boltcutter search search=optuna "
            f"search.space.{key}='uniform(<low>, <high>)'"
        )
    start, stop, step = (0, numbers[0], 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    if not step or not 0 < (stop - start) / step <= MAX_VALUES:
        raise ConfigError(f"{key}={text}: the range is empty or too long; write range(first, end), without the end")
    count = -int(-((stop - start) / step) // 1)
    return [format_value(start + index * step) for index in range(count)]
