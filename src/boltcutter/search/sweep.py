"""A search as a W&B sweep: W&B samples the values, and its agents train with them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError
from boltcutter.config.values import last_of_each, parse
from boltcutter.report.template import redact_command
from boltcutter.search.export import write_yaml
from boltcutter.search.plan import Plan
from boltcutter.search.space import Choice, Distribution, Grid


def write_sweep(plan: Plan) -> Path:
    """Write ``sweep.yaml`` in the folder of the search; ``wandb sweep <path>`` creates the sweep."""
    path, sweep = plan.folder / "sweep.yaml", as_sweep(plan)
    comments = [
        "W&B sweep: W&B samples the values, and its agents train with them.",
        f"from: {redact_command(plan.command)}",
        f"create it: wandb sweep {shlex.quote(str(path))}",
        f"then, in {Path.cwd()}, on as many machines as wished: wandb agent <the id that it prints>",
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
    program = os.path.relpath(train[0]) if train[0].endswith(".py") else "train"
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
