"""The best trial of a search as an experiment: ``experiment=<folder of the search>/best.yaml`` trains it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import OVERRIDE, PATH_KEY, DictConfig, compose
from boltcutter.config.values import format_value, parse, plain, resolve_reference
from boltcutter.project import Project, command
from boltcutter.report.template import redact_command
from boltcutter_search import table
from boltcutter_search.ranking import Metrics
from boltcutter_search.results import Result

NOT_EXPORTED = ("folder", "resume", "reproduce")  # a run has its own


def write_best(
    path: Path, result: Result, *, project: Project, overrides: Sequence[str], metrics: Metrics, search_command: str
) -> Path:
    """Write a trial as an experiment that needs no further overrides.

    Args:
        path: File to write.
        result: The trial.
        project: Project in which the search ran.
        overrides: Overrides of training of all trials.
        metrics: Name and mode of each metric of the search.
        search_command: Command of the search; secrets in it are redacted.

    Raises:
        ConfigError: The overrides do not fit the project, such as after its configs changed.
    """
    sampled = [f"{key}={v if isinstance(v, str) else format_value(v)}" for key, v in result.values.items()]
    content, removed = as_experiment(project, [*overrides, *sampled])
    scores = ", ".join(f"{name} {table.format_value(result.objectives.get(name))}" for name, _ in metrics)
    arguments = [f"experiment={path.absolute()}", *removed]
    comments = [
        f"Best trial of a search: {scores}.",
        f"search: {redact_command(search_command)}",
        f"trial: {result.number}, in {result.folder}",
        f"sampled: {', '.join(result.values) or 'nothing'}",
        f"train it: {command('train', *arguments)}",
    ]
    header = "".join(f"# {' '.join(comment.split())}\n" for comment in comments)
    write_text(path, header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path


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
