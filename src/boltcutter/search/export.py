"""The best trial of a search as an experiment, ``best.yaml``, and the command that trains it again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from boltcutter.assembly.overrides import read_overrides
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import OVERRIDE, PATH_KEY, default_options
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.config.values import last_of_each, parse
from boltcutter.project import Project, command, display_path
from boltcutter.report.template import redact_command
from boltcutter.search.plan import Plan
from boltcutter.search.results import Result, format_value
from boltcutter.search.trial import trial_overrides

NOT_EXPORTED = ("folder", "resume", "reproduce")  # a run has its own


def write_best(plan: Plan, result: Result, scores: str | None = None) -> str:
    """Write a trial as an experiment, ``best.yaml`` in the folder of the search.

    Args:
        plan: The search.
        result: The trial.
        scores: Its metrics, for a comment; by default its own objectives.

    Returns:
        The command that trains with the configuration of the trial: by the experiment, or where that has another
        configuration, such as with a ``configs/local.yaml``, which replaces its values, by the overrides of the trial.

    Raises:
        ConfigError: The overrides do not fit the project, such as after its configs changed.
    """
    path, project = plan.folder / "best.yaml", plan.project
    common = [override for override in plan.search.overrides if not override.startswith(("test=", "report="))]
    overrides = last_of_each([*common, *plan.overrides, *trial_overrides(result.values)])
    overrides = [o for o in overrides if o.lstrip("+~").partition("=")[0] not in NOT_EXPORTED]
    content, others = as_experiment(project, overrides)
    write_yaml(path, [], content)
    arguments = [f"experiment={display_path(path.absolute())}", *others]
    if not _is_same(project, arguments, overrides):
        arguments = overrides
    scores = scores or ", ".join(f"{name} {format_value(result.objectives.get(name))}" for name, _ in plan.metrics)
    train = command("train", *arguments)
    comments = [
        f"Best trial of a search: {scores}.",
        f"search: {redact_command(plan.command)}",
        f"trial: {result.number}, in {result.folder}",
        f"sampled: {', '.join(result.values) or 'nothing'}",
        f"train it: {redact_command(train)}",
    ]
    write_yaml(path, comments, content)
    return train


def _is_same(project: Project, overrides: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether two lists of overrides lead to the same configuration, apart from the names of options."""
    try:
        ours, theirs = (read_overrides(project, given).written for given in (overrides, expected))
    except ConfigError:
        return False
    for cfg in (ours, theirs):
        cfg["choices"].pop("experiment", None)
    return ours == theirs


def write_yaml(path: Path, comments: Sequence[str], content: Mapping[str, Any]) -> None:
    """Write a YAML file below comments of one line each."""
    header = "".join(f"# {' '.join(comment.split())}\n" for comment in comments)
    write_text(path, header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def as_experiment(project: Project, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Turn overrides into the contents of an experiment, and those that a file cannot hold.

    The experiment inherits from the one that the overrides, or else the project's ``train.yaml``, select: it is given
    in place of that one. A file can neither remove a key nor select an option of ``debug``.
    """
    cfg, content, others = read_overrides(project, overrides), dict[str, Any](), list[str]()
    defaults: dict[str, Any] = {"experiment": default_options(project).get("experiment")}
    values = cfg.written
    for override in overrides:
        _, key, text, _, dropped = OVERRIDE.fullmatch(override).groups()  # type: ignore[union-attr]
        key = dropped or key
        if key == "debug" or (dropped and not project.has_group(key)):
            others.append(override)
        elif project.has_group(key):
            defaults[key] = None if dropped else _option(parse(key, text))
        else:
            path = re.split(r"\.[0-9]+(?:\.|$)", _target(cfg, key))[0]  # of an item of a list the whole list
            *parents, leaf = path.split(".")
            value: Any = reduce(getitem, parents, values)[leaf]
            node = reduce(lambda above, name: above.setdefault(name, {}), parents, content)
            is_path = PATH_KEY.search(path) and isinstance(value, str) and not re.match(r"~|\$\{|.*://", value)
            node[leaf] = _located(value) if is_path else value
    if defaults["experiment"] is None:
        del defaults["experiment"]
    return ({"defaults": defaults} if defaults else {}) | content, others


def _option(option: Any) -> Any:
    """The name of an option, a list of names, or None; files by a path from any working directory."""
    if isinstance(option, Sequence) and not isinstance(option, str):
        return [_option(name) for name in option]
    return _located(option) if isinstance(option, str) and option.endswith(".yaml") else option


def _located(path: str) -> str:
    """A path from any working directory."""
    return str(Path(path).absolute())


def _target(cfg: Settings, key: str) -> str:
    """The key that an override sets, where ``task.optimizer`` refers to ``optimizer``."""
    parent, _, leaf = key.rpartition(".")
    return f"{cfg.target_of(parent)}.{leaf}".lstrip(".")
