"""The settings of a search, as ``configs/search`` sets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from boltcutter.config.errors import ConfigError
from boltcutter.formatting import parse_duration
from boltcutter.run.metrics import Mode, parse_name
from boltcutter.search.space import Space


@dataclass(frozen=True)
class Search:
    """What is searched, by which means, and for how long.

    Args:
        space: A distribution for each key, such as ``optimizer.lr: loguniform(1e-5, 1e-1)``.
        engine: ``local`` runs trials on this machine; ``ray`` on a Ray cluster, or on this machine without one;
            ``wandb`` only writes the file of a W&B sweep, whose agents run the trials.
        metric: Logged metric to optimize, or several; null: what selects the best checkpoint.
        mode: Whether it is minimized or maximized; a list for several metrics; null: as for the best checkpoint.
        sampler: Called with a seed; returns an Optuna sampler. null: random values.
        scheduler: Decides which trials stop early: a pruner of Optuna for ``local``, a scheduler of Ray Tune for
            ``ray``. null: none stops early.
        num_trials: Number of trials; with a grid, for each combination; null: one for each combination.
        max_parallel: Trials at a time; null: 1 for ``local``, for ``ray`` as many as the resources admit.
        max_time: Time after which the search stops, over all continuations, such as ``8:00:00`` or ``30m``; null: none.
        target: Value of the metric at which the search stops; null: none.
        cpus: CPUs of each trial; null: one for each of its devices.
        gpus: GPUs of each trial, or a fraction of one; null: one for each of its devices, if it uses GPUs.
        seed: Seed of the sampled values.
        overrides: Overrides of training for all trials.
        address: Address of a running Ray cluster; null: one is started on this machine and stopped at the end.
        dashboard: Whether Ray's dashboard is started.
        ports: Ports of Ray by name, ``dashboard`` and ``metrics``; others are free ports.
        folds: Number of folds of cross-validation.
        seeds: Number of seeds; the first is the ``seed`` of training.
    """

    space: dict[str, Any] = field(default_factory=dict)
    engine: Literal["local", "ray", "wandb"] = "local"
    metric: str | list[str] | None = None
    mode: Mode | list[Mode] | None = None
    sampler: Callable[..., Any] | None = None
    scheduler: Any = None
    num_trials: int | None = 20
    max_parallel: int | None = None
    max_time: str | None = None
    target: float | None = None
    cpus: float | None = None
    gpus: float | None = None
    seed: int = 0
    overrides: list[str] = field(default_factory=list)
    address: str | None = None
    dashboard: bool = False
    ports: dict[str, int] = field(default_factory=dict)
    folds: int | None = None
    seeds: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_trials", 1), ("max_parallel", 1), ("folds", 2), ("seeds", 1 if self.folds else 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"search.{name}={value}: at least {least}; try {least}")
        if (self.cpus is not None and self.cpus <= 0) or (self.gpus or 0) < 0:
            raise ValueError(f"search.cpus={self.cpus}, search.gpus={self.gpus}: not positive; try search.cpus=1")
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"search.gpus={self.gpus}: a fraction below 1, or whole GPUs; try {int(self.gpus)}")
        _ = self.time_limit

    @property
    def time_limit(self) -> float | None:
        """``max_time`` in seconds."""
        if self.max_time is None:
            return None
        seconds = parse_duration(str(self.max_time))
        if seconds is None:
            raise ValueError(f"search.max_time={self.max_time} is neither hours:minutes:seconds nor 30m; try 8:00:00")
        return seconds

    def fixed(self, seed: int) -> list[dict[str, Any]]:
        """Values that are given rather than sampled, of all trials: grids, seeds and folds."""
        seeds: list[dict[str, Any]] = [{"seed": seed + index} for index in range(self.seeds or 0)]
        folds = [{"data.num_folds": self.folds, "data.fold": index} for index in range(self.folds or 0)]
        given = product(Space(self.space).combinations(), seeds or [{}], folds or [{}])
        return [{**values, **of_seed, **of_fold} for values, of_seed, of_fold in given]


def objectives(search: Search, cfg: Mapping[str, Any]) -> list[tuple[str, Mode]]:
    """The metrics to optimize and their modes; by default those of the callback that keeps the best checkpoint.

    Raises:
        ConfigError: No metric is known, one is of the test split, or modes do not match metrics.
    """
    callbacks = [c for c in (cfg.get("callback") or {}).values() if isinstance(c, Mapping) and c.get("monitor")]
    monitored: dict[str, Mode] = {str(c["monitor"]): "max" if c.get("mode") == "max" else "min" for c in callbacks[:1]}
    metrics = [search.metric] if isinstance(search.metric, str) else search.metric or list(monitored)
    if not metrics:
        raise ConfigError("search.metric=null: no callback monitors a metric; set search.metric=<a logged metric>")
    if tested := next((metric for metric in metrics if parse_name(metric).stage == "test"), None):
        raise ConfigError(f"search.metric={tested}: a search must not choose by the test split; use a metric of val/")
    modes = search.mode if isinstance(search.mode, list) else [search.mode] * len(metrics)
    if len(modes) != len(metrics):
        raise ConfigError(
            f"search.mode={modes}: expected one for each of {len(metrics)} metrics; correct the list", kind="wrong_type"
        )
    chosen: list[tuple[str, Mode]] = []
    for metric, mode in zip(metrics, modes, strict=True):
        better = mode or monitored.get(metric)
        if better is None:
            raise ConfigError(f"search.mode: not set for {metric}; set search.mode=min or max", kind="missing_value")
        chosen.append((metric, better))
    return chosen
