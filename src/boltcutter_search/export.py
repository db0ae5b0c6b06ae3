"""A search as a file: its best trial as an experiment, which trains it again, or all of it as a W&B sweep."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import OVERRIDE, PATH_KEY, DictConfig, compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import last_of_each, parse, plain, resolve_reference
from boltcutter.project import Project, command
from boltcutter.report.template import redact_command
from boltcutter_search.plan import Plan
from boltcutter_search.results import Result, format_value
from boltcutter_search.space import Choice, Distribution, Grid
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


def write_sweep(plan: Plan) -> Path:
    """Write ``sweep.yaml`` in the folder of the search; ``wandb sweep <path>`` creates the sweep."""
    path, sweep = plan.folder / "sweep.yaml", as_sweep(plan)
    comments = [
        "W&B sweep: W&B samples the values, and its agents train with them.",
        f"from: {redact_command(plan.command)}",
        f"create it: wandb sweep {shlex.quote(str(path))}",
        f"then, in {plan.project.root}, on as many machines as wished: wandb agent <the id that it prints>",
    ]
    write_yaml(path, comments, {"name": plan.folder.name, **sweep})
    return path


def as_sweep(plan: Plan) -> dict[str, Any]:
    """The configuration of a sweep in W&B's terms: a grid if the space has only grids, else Bayesian optimization.

    Raises:
        ConfigError: W&B cannot sample this space, or optimize these metrics.

    Source:
        https://docs.wandb.ai/models/sweeps/sweep-config-keys
    """
    if len(plan.metrics) != 1:
        names = ",".join(name for name, _ in plan.metrics)
        raise ConfigError(f"search.metric=[{names}]: a W&B sweep optimizes one metric; choose one")
    [(name, mode)] = plan.metrics
    parameters = plan.space.parameters
    for p in parameters:
        if p.condition:
            raise ConfigError(f"{p.setting}: a W&B sweep has no conditions; remove it, or use another search")
    train = plan.project.train_command
    program = "scripts/train.py" if train[0].endswith(".py") else "train"
    start = ["${program}"] if train[0].endswith(".py") else train
    overrides = last_of_each([*plan.search.overrides, *plan.overrides])
    return {
        "program": program,
        "method": "grid" if all(isinstance(p.distribution, Grid) for p in parameters) else "bayes",
        "metric": {"name": name, "goal": "maximize" if mode == "max" else "minimize"},
        **({"run_cap": plan.search.num_trials} if plan.search.num_trials else {}),
        "parameters": {p.key: _distribution(p.distribution) for p in parameters},
        "command": ["${env}", "${interpreter}", *start, *overrides, "${args_no_hyphens}"],
    }


def _distribution(distribution: Distribution) -> dict[str, Any]:
    """Distribution of a parameter in W&B's terms; options other than numbers and booleans stay text.

    The agent would write null and lists in Python's syntax.
    """
    if isinstance(distribution, Choice):
        values = [(parse("", option), option) for option in distribution.options]
        return {"values": [value if isinstance(value, bool | int | float) else option for value, option in values]}
    bounds = {"min": distribution.low, "max": distribution.high}
    if distribution.is_integer:
        rounded = {"distribution": "q_log_uniform_values", **bounds, "q": 1}
        return rounded if distribution.log else {"distribution": "int_uniform", **bounds}
    return {"distribution": "log_uniform_values" if distribution.log else "uniform", **bounds}
