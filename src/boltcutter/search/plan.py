"""Compose and check a search, before any of its trials starts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, cast

from boltcutter import run_files
from boltcutter.assembly.overrides import read_overrides
from boltcutter.checkpoint.atomic import write_text
from boltcutter.checks.monitors import choose_monitor
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, as_config_error, hint, one_line, prefix_errors
from boltcutter.config.instantiate import build, checked
from boltcutter.config.locate import locate
from boltcutter.config.redaction import MAX_COMMAND
from boltcutter.config.settings import Settings
from boltcutter.config.values import last_of_each, split_overrides
from boltcutter.environment import user_key
from boltcutter.environment.identity import new_run_id
from boltcutter.formatting import parse_duration, to_json
from boltcutter.project import Project, command, install_command
from boltcutter.run import trust
from boltcutter.run.metrics import Mode
from boltcutter.run.store import refuse
from boltcutter.search.settings import Search, objectives
from boltcutter.search.space import Choice, Space
from boltcutter.search.trial import Sampled, Trial, trial_overrides
from boltcutter.topology import ONE_DEVICE, Topology

RECORD = run_files.SEARCH
SHARED = "trials share a folder"
REPEATED = {"seed": "seed", "data.fold": "fold"}  # keys in which repeated runs differ, and what each is called
KINDS = {  # that an engine takes: the base class, and what it is
    ("sampler", "local"): ("optuna.samplers.BaseSampler", "a sampler of Optuna"),
    ("scheduler", "local"): ("optuna.pruners.BasePruner", "a pruner of Optuna"),
    ("scheduler", "ray"): ("ray.tune.schedulers.TrialScheduler", "a scheduler of Ray Tune"),
}
CHANGEABLE = ("num_trials", "max_parallel", "max_time", "target", "cpus", "gpus", "address", "dashboard", "ports")
# What a search that is continued takes from its record; signed as a whole, since overrides may name any class.
SIGNED = ("overrides", "settings", "metrics", "fixed", "devices", "gpus", "num_workers")


@dataclass
class SearchSettings:
    """Configuration of the search command besides that of training."""

    search: Search


@dataclass
class Plan:
    """A search that was checked."""

    project: Project
    folder: Path  # of the search
    settings: dict[str, Any]  # of the search, as plain values
    overrides: list[str]  # of training, for all trials
    search: Search  # the settings as an object
    metrics: list[tuple[str, Mode]]
    fixed: list[dict[str, Any]]  # values of trials that are given, such as seeds and folds
    devices: int  # of each trial
    gpus: float  # of each trial, or a fraction of one
    num_workers: int = 0  # dataloader workers of each trial
    command: str = ""  # that started the search

    @property
    def space(self) -> Space:
        """The parsed space."""
        return Space(self.search.space)

    @property
    def repeats(self) -> int:
        """Number of runs, over seeds and folds, of each choice of values; 0 if none is repeated."""
        found = [count for key in REPEATED if (count := self.count(key))]
        return prod(found) if found else 0

    def count(self, key: str) -> int | None:
        """Number of seeds or of folds of each choice of values, also of a grid over them; None for fewer than two."""
        found = {values[key] for values in self.fixed if key in values}
        return len(found) if len(found) > 1 else None

    @property
    def total(self) -> int:
        """Number of trials."""
        return len(self.fixed) * (self.search.num_trials or 1)

    def make_trial(self, sampled: Sampled, environment: Mapping[str, str]) -> Trial:
        """Make the trial of sampled values.

        Raises:
            ConfigError: The journal, which may be from somebody else, holds a value that the search does not sample.
        """
        self.space.check(sampled.values, self.fixed)
        folder = self.folder / "trials" / f"{sampled.number:04d}"
        overrides = last_of_each([*self.search.overrides, *self.overrides, *trial_overrides(sampled.values)])
        variables = {"WANDB_RUN_GROUP": self.folder.name, **environment}
        return Trial(sampled.number, folder, overrides, self.metrics[0][0], self.project, variables)


def planned(project: Project, arguments: Sequence[str], *, runs_here: bool = True) -> Plan:
    """Compose and check a new search; ``runs_here`` if this machine has the devices of the trials."""
    arguments = with_budget(arguments)
    settings = read_settings(project, arguments)
    special, overrides = split_overrides([o for o in arguments if not is_search_override(o)], "folder")
    search = make_search(settings)
    plan = check_plan(project, search, settings, overrides, runs_here=runs_here)
    name = plan.folder
    refuse(special, SHARED)
    plan.folder = Path(special.get("folder") or name / new_run_id()).absolute()
    if (plan.folder / RECORD).exists():
        raise ConfigError(f"folder={plan.folder} holds a search; use resume={plan.folder}, or another folder")
    return plan


def continued(project: Project, folder: Path, arguments: Sequence[str]) -> Plan:
    """Read a search that is continued, with changed limits or resources."""
    arguments, record = with_budget(arguments), read_search(folder)
    used: dict[str, Any] = {name: record.get(name) for name in SIGNED}
    trust.check_record(used, f"resume={folder}", folder, project, signature=record.get("signature"), runs=True)
    for override in arguments:
        key = override.lstrip("+~").partition("=")[0]
        if key.removeprefix("search.").partition(".")[0] not in CHANGEABLE or not key.startswith("search."):
            raise ConfigError(
                f"{override}: a search that is continued keeps its settings, apart from "
                f"{', '.join(f'search.{name}' for name in CHANGEABLE)}; remove it, or start a new search"
            )
    settings = compose(project, arguments, base=Settings({"search": record["settings"]})).written["search"]
    search = make_search(settings)
    used |= {"settings": settings, "metrics": [(name, mode) for name, mode in record["metrics"]]}
    if search.gpus is not None:
        used["gpus"] = search.gpus
    text = str(record.get("command", ""))
    if arguments and len(text) <= MAX_COMMAND:
        with suppress(ValueError):  # quotes that are not closed
            text = shlex.join(last_of_each(with_budget([*shlex.split(text), *arguments])))
    return Plan(project, folder.absolute(), search=search, command=text, **used)


def with_budget(arguments: Sequence[str]) -> list[str]:
    """Replace ``budget=30m`` by the setting that it stands for."""
    for budget in (a for a in arguments if a.startswith("budget=") and parse_duration(a.partition("=")[2]) is None):
        raise ConfigError(f"{budget}: neither hours:minutes:seconds nor a duration; try budget=30m")
    return [f"search.max_time={a.partition('=')[2]}" if a.startswith("budget=") else a for a in arguments]


def is_search_override(override: str) -> bool:
    """Whether an override is for the search, not for training."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == "search"


def read_settings(project: Project, arguments: Sequence[str]) -> dict[str, Any]:
    """Compose the settings of the search from its option and overrides."""
    own = [override for override in arguments if is_search_override(override)]
    chosen = [override.partition("=")[2] for override in own if override.startswith("search=")]
    if not chosen or chosen[-1].strip("[] ") in ("", "null"):
        raise ConfigError(f"search: not set; give search=…{project.list_options('search')}", kind="missing_value")
    in_space = [o for o in own if o.lstrip("+~").startswith("search.space.")]
    settings = compose(project, [o for o in own if o not in in_space], base=Settings({})).written["search"]
    if not isinstance(space := settings.get("space") or {}, dict):
        raise ConfigError(f"search.space={space}: expected values by key; set search.space.<key>=…", kind="wrong_type")
    space = dict(space)
    for override in in_space:  # whose keys have dots, as those of training
        key, _, text = override.lstrip("+~").removeprefix("search.space.").partition("=")
        if override.startswith("~"):
            if key not in space:
                raise ConfigError(f"{override}: not in the space{hint(key, space)}; remove it")
            del space[key]
        else:
            space[key] = text
    return {**settings, "space": space}


def read_config(project: Project, arguments: Sequence[str]) -> Settings:
    """The configuration of the trainings, with the settings of the search."""
    arguments = with_budget(arguments)
    cfg = read_overrides(project, [argument for argument in arguments if not is_search_override(argument)])
    return cfg.changed({"search": read_settings(project, arguments)})


def make_search(settings: Mapping[str, Any]) -> Search:
    """Check the settings and build the object."""
    engine = settings.get("engine")
    packages = {"ray": ["ray", "optuna"], "wandb": []}.get(str(engine), ["optuna"])
    if missing := next((package for package in packages if find_spec(package) is None), None):
        raise ConfigError(
            f"search.engine={engine}: {missing} is not installed; {install_command(missing)}", kind="not_installed"
        )
    cfg = checked(Settings({"search": dict(settings)}), SearchSettings)
    try:
        search: Search = build(cfg.get("search"), "search")
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    check_algorithms(search)
    return search


def check_algorithms(search: Search) -> None:
    """Check that the engine takes the kinds of sampler and scheduler, and that the sampler can be made anew."""
    for setting, engine, algorithm in (
        ("sampler", "local", search.sampler),  # each engine samples by Optuna
        ("scheduler", search.engine, search.scheduler),
    ):
        if algorithm is None:
            continue
        base, text = KINDS.get((setting, engine), ("", "none"))
        kind: Any = algorithm.func if isinstance(algorithm, partial) else type(algorithm)
        if not base or (isinstance(kind, type) and not issubclass(kind, cast("type", locate(base)))):
            raise ConfigError(
                f"search.{setting}={kind.__name__}: search.engine={search.engine} takes {text}; choose another, or null"
            )
        if setting == "sampler" and not callable(algorithm):
            raise ConfigError(
                f"search.sampler={kind.__name__}: made for each trial; write search.sampler._partial_=true"
            )


def check_population(cfg: Settings) -> None:
    """Check that trials can continue from the checkpoints of others, as a population does."""
    from boltcutter.protocols import handles_signals  # imports torch

    callbacks = cfg.written.get("callback") or {}
    if not handles_signals([locate(callback["_target_"]) for callback in callbacks.values() if callback]):
        raise ConfigError("callback.preemption=null: the trials of a population save by it; remove it")
    if cfg.written["checkpoints"] != "${folder}/checkpoints":
        raise ConfigError(f"checkpoints={cfg.checkpoints}: a population copies those of its trials; remove it")


def check_plan(
    project: Project, search: Search, settings: dict[str, Any], overrides: list[str], *, runs_here: bool = True
) -> Plan:
    """Check the space against the configuration of training, and that the metrics are logged."""
    from boltcutter.assembly.assemble import assemble, read_config  # imports torch
    from boltcutter.environment.warning_filters import filter_warnings
    from boltcutter.evaluation.folds import check_folds
    from boltcutter.protocols import NativeTask

    filter_warnings()
    space = Space(search.space)
    base = [*search.overrides, *overrides]
    given = {override.lstrip("+~").partition("=")[0]: override for override in overrides}
    if clash := next((p for p in space.parameters if p.key in given), None):
        raise ConfigError(f"{given[clash.key]}: {clash.key} is in the search space as well; remove one of the two")
    drawn = next((p for p in space.parameters if type(p.distribution) is Choice and p.distribution.options[1:]), None)
    if drawn and search.num_trials == 1 and len(space.combinations()) > 1:
        raise ConfigError(
            f"{drawn.setting}: a search of one trial for each combination of grids draws one of these values; write "
            "grid(…) to try each, or set search.num_trials=<draws>"
        )
    cfg = read_config(project, base)
    if search.engine == "ray" and isinstance(search.scheduler, partial):
        check_population(cfg)
    metrics = objectives(search, cfg.redacted)
    fixed = search.fixed(int(cfg.seed))
    if not space.parameters and len(fixed) == 1:
        raise ConfigError("search.space={}: nothing to search; add search.space.optimizer.lr='loguniform(1e-5, 1e-1)'")
    for parameter, values in space.probes():
        with prefix_errors(parameter.setting):
            read_config(project, [*base, *trial_overrides(values)])
    # Of seeds and folds, the first ones are enough.
    firsts = [v for v in fixed if not v.get("data.fold") and v.get("seed", cfg.seed) == cfg.seed] or fixed
    cfg, *_ = [read_config(project, [*base, *trial_overrides(values)]) for values in firsts]
    refuse({"runs": cfg.runs}, SHARED)
    name = Path(cfg.runs) / cfg.name
    cfg = cfg.changed({"folder": str(name / "search")})
    if runs_here:
        components = assemble(cfg)
        task: Any = components.task
        devices = components.topology.num_devices
        uses_gpus = components.trainer.strategy.root_device.type == "cuda"
        if search.folds:
            check_folds(cfg, components.trainer, range(search.folds))
    else:
        task = build(cfg.task, "task")
        with as_config_error():
            devices = Topology.requested(cfg.trainer).num_devices
        uses_gpus = cfg.trainer.get("accelerator", "auto") != "cpu"
    if cfg.trainer.get("num_nodes", 1) != 1:
        raise ConfigError(f"trainer.num_nodes={cfg.trainer['num_nodes']}: each trial runs on one node; remove it")
    if isinstance(task, NativeTask):
        logged = task.logged_metrics
        if unknown := next((metric for metric, _ in metrics if metric not in logged), None):
            listed = ", ".join(sorted(logged))
            raise ConfigError(f"search.metric={unknown} is never logged{hint(unknown, logged)} (there are: {listed})")
    elif runs_here and search.metric is None:
        metrics = [find_metric(cfg, metrics[0])]
    gpus = search.gpus if search.gpus is not None else float(devices if uses_gpus else 0)
    num_workers = cfg.data.get("num_workers") or 0
    return Plan(project, name, settings, overrides, search, metrics, fixed, devices, gpus, num_workers, own_command())


def find_metric(cfg: Settings, default: tuple[str, Mode]) -> tuple[str, Mode]:
    """Validate one batch to find the metric of a module that does not declare what it logs, as training would.

    Raises:
        ConfigError: It does not, and there is no other metric that training would monitor.
    """
    from boltcutter.assembly.assemble import assemble
    from boltcutter.evaluation.splits import skip_reason

    components = assemble(cfg.changed({"trainer": ONE_DEVICE}), with_callbacks=False)
    if skip_reason(components.data, components.task, "val"):
        return default
    components.trainer.limit_val_batches = 1
    with as_config_error():
        components.trainer.validate(components.task, datamodule=components.data, verbose=False)
    logged = set(components.trainer.callback_metrics)
    if default[0] in logged or not logged:  # or it is logged in training only
        return default
    chosen = choose_monitor(logged)
    if chosen is None:
        listed = ", ".join(sorted(logged))
        raise ConfigError(f"search.metric=null: {default[0]} is not logged; set search.metric to one of {listed}")
    print(f"search.metric: {default[0]} is not logged; using {chosen[0]} ({chosen[1]}) instead, set it to change this")
    return chosen


def own_command() -> str:
    """The command that started this process."""
    words = sys.argv[1:]
    return command("search", *(words[1:] if words[:1] == ["search"] else words))


def signed_part(plan: Plan) -> dict[str, Any]:
    """What is needed to continue the search, and signed."""
    return {name: getattr(plan, name) for name in SIGNED}


def save(plan: Plan) -> None:
    """Write what is needed to continue the search."""
    used = signed_part(plan)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"command": plan.command, "created": created, **used, "signature": user_key.sign(used)}
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_text(plan.folder / RECORD, to_json(record, indent=2) + "\n")


def save_reason(folder: Path, reason: str) -> None:
    """Write how a search has ended, or that it is running, which a process that is killed leaves there."""
    write_text(folder / RECORD, to_json(read_search(folder) | {"reason": reason}, indent=2) + "\n")


def read_search(folder: Path) -> dict[str, Any]:
    """Read the record of a search."""
    path = folder / RECORD
    try:
        return trust.read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"resume={folder}: no search there ({path.name} is missing); give the folder of one"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"resume={folder}: {path.name} is damaged ({error}); restore it from a copy") from None
