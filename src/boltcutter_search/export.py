"""The best trial of a search as an experiment: ``experiment=<folder of the search>/best.yaml`` trains it again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import OVERRIDE, PATH_KEY, DictConfig, compose
from boltcutter.config.values import parse, plain, resolve_reference
from boltcutter.project import Project, command
from boltcutter.report.template import redact_command
from boltcutter_search.plan import Plan
from boltcutter_search.results import Result, format_value
from boltcutter_search.trial import trial_overrides

NOT_EXPORTED = ("folder", "resume", "reproduce")  # a run has its own


def write_best(plan: Plan, result: Result) -> Path:
    """Write a trial as an experiment that needs no further overrides, ``best.yaml`` in the folder of the search.

    Raises:
        ConfigError: The overrides do not fit the project, such as after its configs changed.
    """
    path = plan.folder / "best.yaml"
    common = [override for override in plan.search.overrides if not override.startswith(("test=", "report="))]
    content, removed = as_experiment(plan.project, [*common, *plan.overrides, *trial_overrides(result.values)])
    scores = ", ".join(f"{name} {format_value(result.objectives.get(name))}" for name, _ in plan.metrics)
    arguments = [f"experiment={path.absolute()}", *removed]
    comments = [
        f"Best trial of a search: {scores}.",
        f"search: {redact_command(plan.command)}",
        f"trial: {result.number}, in {result.folder}",
        f"sampled: {', '.join(result.values) or 'nothing'}",
        f"train it: {command('train', *arguments)}",
    ]
    write_yaml(path, comments, content)
    return path


def write_yaml(path: Path, comments: Sequence[str], content: Mapping[str, Any]) -> None:
    """Write a YAML file below comments of one line each."""
    header = "".join(f"# {' '.join(comment.split())}\n" for comment in comments)
    write_text(path, header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def as_experiment(project: Project, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Turn overrides into the contents of an experiment, and those that remove a key, which a file cannot."""
    cfg, content, defaults, removed = compose(project, overrides), dict[str, Any](), dict[str, Any](), []
    values = plain(cfg)
    for override in overrides:
        _, key, text, _, dropped = OVERRIDE.fullmatch(override).groups()  # type: ignore[union-attr]
        if (key := dropped or key) in NOT_EXPORTED:
            continue
        if project.has_group(key):
            defaults[key] = None if dropped else _located(text) if text.endswith(".yaml") else parse(key, text)
        elif dropped:
            removed.append(override)
        else:
            path = re.split(r"\.[0-9]+(?:\.|$)", _target(cfg, key))[0]  # of an item of a list the whole list
            *parents, leaf = path.split(".")
            value: Any = reduce(getitem, parents, values)[leaf]
            node = reduce(lambda above, name: above.setdefault(name, {}), parents, content)
            is_path = PATH_KEY.search(path) and isinstance(value, str) and not re.match(r"~|\$\{|.*://", value)
            node[leaf] = _located(value) if is_path else value
    return ({"defaults": plain(DictConfig(defaults))} if defaults else {}) | content, removed


def _located(path: str) -> str:
    """A path from any working directory."""
    return str(Path(path).absolute())


def _target(cfg: DictConfig, key: str) -> str:
    """The key that an override sets, where ``task.optimizer`` refers to ``optimizer``."""
    parent, _, leaf = key.rpartition(".")
    return f"{resolve_reference(cfg, parent)}.{leaf}".lstrip(".")
