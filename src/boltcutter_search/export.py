"""The best trial of a search as an experiment: ``experiment=<folder of the search>/best.yaml`` trains it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Turn overrides into the contents of an experiment, and those that remove a key, which a file cannot.

    Raises:
        ConfigError: An override is wrong.
    """
    used = [override for override in overrides if override.lstrip("+~").partition("=")[0] not in NOT_EXPORTED]
    cfg = compose(project, used)
    values = plain(cfg)
    defaults: dict[str, Any] = {}
    content: dict[str, Any] = {}
    removed = []
    for override in used:
        found = OVERRIDE.fullmatch(override)
        assert found, "compose has checked it"
        key = found[2] or found[5]
        if project.has_group(key):
            option = None if found[5] else plain(DictConfig({key: parse(key, found[3])}))[key]
            defaults[key] = [_located(one) for one in option] if isinstance(option, list) else _located(option)
        elif found[5]:
            removed.append(override)
        else:
            _set(content, _target(cfg, key), values)
    return ({"defaults": defaults} if defaults else {}) | content, removed


def _located(option: Any) -> Any:
    """An option that is a file, from any working directory."""
    is_file = isinstance(option, str) and option.endswith(".yaml")
    return str(Path(option).absolute()) if is_file else option


def _target(cfg: DictConfig, key: str) -> str:
    """The key that an override sets, where ``task.optimizer`` refers to ``optimizer``."""
    parent, _, leaf = key.rpartition(".")
    return f"{resolve_reference(cfg, parent)}.{leaf}".lstrip(".")


def _set(content: dict[str, Any], key: str, values: Mapping[str, Any]) -> None:
    """Copy the value of a key; of an item of a list the whole list, as a file cannot set a single item."""
    node: Any = values
    *parents, leaf = key.split(".")
    for name in parents:
        if isinstance(node[name], list):
            leaf = name
            break
        node, content = node[name], content.setdefault(name, {})
    value = node[leaf]
    if PATH_KEY.search(key) and isinstance(value, str) and not value.startswith(("~", "${")) and "://" not in value:
        value = str(Path(value).absolute())
    content[leaf] = value
