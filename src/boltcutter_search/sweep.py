"""A search as a W&B sweep: W&B samples the values, and its agents train with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import parse
from boltcutter.project import Project
from boltcutter.report.template import redact_command
from boltcutter_search.ranking import Metrics
from boltcutter_search.space import Choice, Distribution, Grid, Integer, Parameter, Space

PARAMETER_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # that W&B accepts


def write_sweep(
    path: Path,
    space: Space,
    *,
    project: Project,
    overrides: Sequence[str],
    metrics: Metrics,
    num_trials: int | None,
    name: str,
    search_command: str,
) -> Path:
    """Write the configuration of a W&B sweep; ``wandb sweep <path>`` creates it.

    Args:
        path: File to write.
        space: The search space.
        project: Project in which the agents train, from its root folder.
        overrides: Overrides of training of all trials.
        metrics: Name and mode of the metric.
        num_trials: Number of trials; None: until the sweep is stopped, or the grid is complete.
        name: Name of the sweep.
        search_command: Command that wrote the file; secrets in it are redacted.

    Raises:
        ConfigError: W&B cannot sample this space, or optimize these metrics.
    """
    sweep = as_sweep(space, project=project, overrides=overrides, metrics=metrics, num_trials=num_trials)
    comments = [
        "W&B sweep: W&B samples the values, and its agents train with them.",
        f"from: {redact_command(search_command)}",
        f"create it: wandb sweep {shlex.quote(str(path))}",
        f"then, in {project.root}, on as many machines as wished: wandb agent <the id that it prints>",
    ]
    header = "".join(f"# {' '.join(comment.split())}\n" for comment in comments)
    write_text(path, header + yaml.safe_dump({"name": name, **sweep}, sort_keys=False, allow_unicode=True))
    return path


def as_sweep(
    space: Space,
    *,
    project: Project,
    overrides: Sequence[str],
    metrics: Metrics,
    num_trials: int | None = None,
) -> dict[str, Any]:
    """The configuration of a sweep in W&B's terms: a grid if the space has only grids, else Bayesian optimization.

    Raises:
        ConfigError: W&B cannot sample this space, or optimize these metrics.

    Source:
        https://docs.wandb.ai/models/sweeps/sweep-config-keys
    """
    if len(metrics) != 1:
        names = ",".join(name for name, _ in metrics)
        raise ConfigError(f"search.metric=[{names}]: a W&B sweep optimizes one metric; choose one")
    [(name, mode)] = metrics
    for parameter in space.parameters:
        _check(parameter)
    train = project.train_command
    program = "scripts/train.py" if train[0].endswith(".py") else "train"
    start = ["${program}"] if train[0].endswith(".py") else train
    return {
        "program": program,
        "method": "grid" if all(isinstance(p.distribution, Grid) for p in space.parameters) else "bayes",
        "metric": {"name": name, "goal": "maximize" if mode == "max" else "minimize"},
        **({"run_cap": num_trials} if num_trials else {}),
        "parameters": {p.key: _distribution(p.distribution) for p in space.parameters},
        "command": ["${env}", "${interpreter}", *start, *overrides, "${args_no_hyphens}"],
    }


def _check(parameter: Parameter) -> None:
    if parameter.condition:
        raise ConfigError(f"{parameter.setting}: a W&B sweep has no conditions; remove it, or use another search")
    if not PARAMETER_NAME.fullmatch(parameter.key):
        raise ConfigError(f"{parameter.setting}: W&B accepts letters, digits, dots and hyphens in keys; rename it")


def _distribution(distribution: Distribution) -> dict[str, Any]:
    """Distribution of a parameter in W&B's terms."""
    if isinstance(distribution, Choice):
        return {"values": [_value(option) for option in distribution.options]}
    bounds = {"min": distribution.low, "max": distribution.high}
    if isinstance(distribution, Integer):
        rounded = {"distribution": "q_log_uniform_values", **bounds, "q": 1}
        return rounded if distribution.log else {"distribution": "int_uniform", **bounds}
    return {"distribution": "log_uniform_values" if distribution.log else "uniform", **bounds}


def _value(option: str) -> Any:
    """A number or boolean; other options stay text, as the agent writes null and lists in Python's syntax."""
    value = parse("", option)
    return value if isinstance(value, bool | int | float) else option
