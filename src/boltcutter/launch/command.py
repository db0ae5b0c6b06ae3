"""The launch command: compose, check, save and submit a run; query and cancel launched runs."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.assembly.overrides import read_overrides
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.compose import compose
from boltcutter.config.describe import print_keys
from boltcutter.config.errors import ConfigError, as_config_error, hint, prefix_errors
from boltcutter.config.instantiate import build, checked
from boltcutter.config.locate import locate, same_target
from boltcutter.config.settings import Settings
from boltcutter.config.values import format_value, parse, split_overrides, split_values
from boltcutter.environment import user_key
from boltcutter.environment.identity import new_run_id
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.launch.job import JOB_VARIABLE, Job, Launcher
from boltcutter.launch.jobs import LaunchSettings, has_completed, list_runs, read_launch, refresh, remember, run_verb
from boltcutter.launch.stored_runs import find_stored
from boltcutter.launch.submit import describe_code, start
from boltcutter.project import LIBRARY, Project
from boltcutter.run import trust
from boltcutter.run.folder import is_own, save_config
from boltcutter.run.remote.store import run_store
from boltcutter.run.store import refuse
from boltcutter.topology import Topology, check_batch_size

USER_CONFIGS = Path("~/.config/boltcutter/launch")  # <option>.yaml there overrides values of configs/launch
SLURM_REFERENCE = re.compile(r"\$\{oc\.env:\s*(SLURM_\w+)\s*\}")  # a reference without a default
SPOT_INTERRUPTION = "boltcutter.callback.spot_interruption.SpotInterruption"
SAVE_MINUTES = 10  # between two checkpoints on spot machines, which may be lost without notice
WITH_ARRAYS = "launch=slurm and launch=kubernetes"
VERBS = ("list", "status", "logs", "cancel", "fetch")
FLAGS = {
    "--dry-run": "print the job script without submitting it",
    "--wait": "follow the log until the job has ended",
    "--check": "check the configuration and exit",
    "--describe": "list every key that can be set below the next argument, with type, value and documentation",
}


def launch_command(project: Project, arguments: list[str]) -> None:
    """Launch a run, or query or cancel launched runs."""
    filter_warnings()
    flags = [argument for argument in arguments if argument in FLAGS]
    rest = [argument for argument in arguments if argument not in FLAGS]
    verb, *options = sorted(rest, key=lambda word: word not in VERBS) or [""]
    with as_config_error():
        if "--describe" in flags:
            describe(project, rest)
        elif verb == "list":
            special, unknown = split_overrides(options, "runs")
            if unknown:
                raise ConfigError(f"list: {unknown[0]}: takes only runs=<folder>; remove it")
            list_runs(Path(special.get("runs") or read_overrides(project, []).runs))
        elif verb in VERBS:
            special, unknown = split_overrides(options, "run", "runs")
            if unknown or not special.get("run"):
                raise ConfigError(f"{verb}: expects one argument; use {verb} run=<folder of a run or of an array>")
            with prefix_errors(f"run={special['run']}"):
                run_verb(verb, Path(special["run"]), follow="--wait" in flags)
        elif verb.isalpha():
            raise ConfigError(
                f"{verb}: no such command of launch{hint(verb, VERBS)} (there are: {', '.join(VERBS)})",
                kind="unknown_command",
            )
        else:
            launch(project, rest, flags)


def launch(project: Project, overrides: list[str], flags: Sequence[str]) -> None:
    """Compose, check and submit a run or an array, or stop earlier as the flags say."""
    resumed, _ = split_overrides(overrides, "resume")
    settings, launcher = read_launcher(project, overrides, recorded_settings(resumed))
    rest = [override for override in overrides if not is_launch_override(override)]
    if is_search(rest):
        from boltcutter.launch.search_array import launch_search  # imports torch

        launch_search(project, settings, launcher, rest, flags)
        return
    tasks = combinations(launcher.array) if launcher.array else [[]]
    if resumed and launcher.array:
        raise ConfigError("launch.array: cannot be combined with resume; remove one of them", kind="conflict")
    root = project.root
    cfgs = [prepare_for_spot(read_training_config(project, [*rest, *task]), launcher) for task in tasks]
    with job_variables(cfgs, launcher.environment) as unset:
        cfgs = [check_job(cfg, values=not unset) for cfg in cfgs]
        if (stored := find_stored(launcher)) and is_url(str(stored.storage)):
            for cfg in cfgs:
                run_store().check(cfg.changed({"folder": stored.storage}))  # as the nodes see it
        if unset:
            print(f"note: {', '.join(unset)} will be set only in the job, which then checks the configuration")
        elif not can_check_values():
            print("note: torch is not installed on this host, so only the keys of the configuration were checked")
        job, cfgs = create_job(cfgs, root, launcher)

    def prepare() -> None:
        with job_variables(cfgs, launcher.environment):
            for cfg in cfgs:
                save_config(cfg)
        remember(cfgs[0].runs, job.folder)

    if start(launcher, settings, job, prepare, flags, resumed=bool(resumed)):
        refresh(launcher, *job.run_folders)
        sys.exit(not all(has_completed(folder) for folder in job.run_folders))


def combinations(spec: str | list[str]) -> list[list[str]]:
    """Return the overrides of each run of ``launch.array``: the Cartesian product of the values of all keys.

    Args:
        spec: ``key=value,value``; several keys separated by semicolons, or as a list.

    Raises:
        ValueError: ``spec`` has no valid syntax, or a key or value twice.
    """
    axes = [axis.strip() for axis in (spec.split(";") if isinstance(spec, str) else spec)]
    overrides = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        values = split_values(text)
        if not key or not equals or "" in values:
            raise ValueError(f"launch.array={axis}: invalid syntax; give launch.array='seed=1,2;model=mlp,convnet'")
        if len(set(values)) < len(values):
            raise ValueError(f"launch.array={axis} has a duplicate value; remove it")
        overrides.append([f"{key}={value}" for value in values])
    keys = [re.sub(r"=.*", "", axis) for axis in axes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"launch.array={';'.join(axes)} has a duplicate key; merge its values")
    return [list(combination) for combination in itertools.product(*overrides)]


def prepare_for_spot(cfg: Settings, launcher: Launcher) -> Settings:
    """Have a run on spot machines save regularly, and when the cloud announces an interruption."""
    callbacks = cfg.callback if launcher.spot else {}
    new: dict[str, Any] = {}
    if (preemption := callbacks.get("preemption")) and preemption.get("save_minutes") is None:
        new["preemption"] = {"save_minutes": SAVE_MINUTES}
    if callbacks and launcher.notices and "spot_interruption" not in callbacks:
        new["spot_interruption"] = {"_target_": SPOT_INTERRUPTION, "cloud": launcher.notices}
    return cfg.changed({"callback": new}) if new else cfg


def is_search(overrides: Sequence[str]) -> bool:
    """Whether overrides launch a search: a new one, or one that is continued."""
    special, _ = split_overrides(overrides, "resume")
    is_new = any(override.lstrip("+~").startswith(("search=", "search.")) for override in overrides)
    return is_new or (Path(special.get("resume") or ".") / run_files.SEARCH).is_file()


@contextmanager
def job_variables(cfgs: Sequence[Settings], environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Set the environment variables of the job while the configuration is resolved.

    Args:
        cfgs: Configurations that may refer to variables that SLURM sets in the job, as ``${oc.env:SLURM_TMPDIR}``.
        environment: Variables that the launcher sets in the job.

    Yields:
        Names of variables whose values are known only in the job; their names stand for the values.
    """
    referenced = {name for cfg in cfgs for name in SLURM_REFERENCE.findall(json.dumps(cfg.written, default=str))}
    values = {name: f"${name}" for name in sorted(referenced - os.environ.keys())}
    values |= {name: str(value) for name, value in environment.items()}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield [name for name, value in values.items() if JOB_VARIABLE.search(value) or value == f"${name}"]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def recorded_settings(resumed: dict[str, str]) -> dict[str, Any] | None:
    """Return the launch settings of the run to resume; None if it was not launched."""
    folder = Path(resumed.get("resume") or "")
    has_record = resumed and os.path.lexists(folder / run_files.RECORD)
    if not (facts := read_launch(folder, "resume", runs=True) if has_record else None):
        return None
    return {k: v for k, v in facts["settings"].items() if k not in ("array", "max_parallel")}  # of one run


def is_launch_override(override: str) -> bool:
    """Whether an override is for the launcher, not for training."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == "launch"


def read_launcher(
    project: Project, overrides: Sequence[str], earlier: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Launcher]:
    """Compose the launch settings from the project, the user's own file and overrides, and build the launcher."""
    special, _ = split_overrides(overrides, "launch")
    rest = [o for o in overrides if is_launch_override(o) and not o.startswith("launch=")]
    picked = parse("launch", special.get("launch") or "null")
    several = picked if isinstance(picked, Sequence) and not isinstance(picked, str) else [picked]
    options = [str(option) for option in several if option is not None]
    given = [*rest, *(f"launch={option}" for option in options if option.endswith(".yaml"))]
    if given and os.environ.get(trust.AGENT):  # which are commands, images and machines
        raise ConfigError(f"{given[0]}: an agent takes launch settings from configs/launch only; leave it out")
    if not options and earlier is None:
        raise ConfigError(f"launch: not set; give launch=…{project.list_options('launch')}", kind="missing_value")
    if len(options) > 1:
        found = {
            option: compose(project, [f"launch={option}"], base=Settings({})).written["launch"] for option in options
        }
        launchers = [settings["_target_"] for settings in found.values() if "_target_" in settings]
        if not all(same_target(launchers[0], other) for other in launchers):
            raise ConfigError(f"launch={format_value(options)}: more than one of these is a launcher; keep one of them")
    base = Settings({"launch": earlier} if earlier is not None else {})
    user_files = [str(file) for option in options if (file := (USER_CONFIGS / f"{option}.yaml").expanduser()).is_file()]
    selected = f"launch={format_value([*options, *user_files])}"
    chosen = compose(project, [selected], base=Settings({})) if options else base
    # Several options select a cluster, whose values then replace the earlier ones.
    if (
        earlier is not None
        and len(options) < 2
        and same_target(chosen.written["launch"].get("_target_"), earlier.get("_target_"))
    ):
        chosen = base
    settings = compose(project, rest, base=chosen)
    try:
        settings = checked(Settings({"launch": settings.texts["launch"]}), LaunchSettings)
    except ConfigError as error:
        if any(mistake.startswith("launch.array: ") for mistake in error.mistakes):
            raise ConfigError(
                f"launch.array: {WITH_ARRAYS} have arrays; choose one, or launch the runs one by one"
            ) from None
        raise
    return settings.written["launch"], build(settings.get("launch"), "launch")


def read_training_config(project: Project, overrides: Sequence[str]) -> Settings:
    """Compose the configuration of training, without the launch settings."""
    cfg = read_overrides(project, overrides).without("launch")
    if cfg.ckpt:
        raise ConfigError(f"ckpt={cfg.ckpt}: a job continues from its newest checkpoint; remove it, or train here")
    return cfg


def can_check_values() -> bool:
    """Whether torch and Lightning are installed, which a login node does not need."""
    return all(find_spec(name) for name in ("torch", "lightning"))


def check_job(cfg: Settings, *, values: bool = True) -> Settings:
    """Check the configuration of training, and that it has the resources of the job.

    Args:
        cfg: Configuration of training.
        values: Whether to check values, if torch is installed.

    Raises:
        ConfigError: There are mistakes, or the numbers of nodes or devices are missing.
    """
    if values and can_check_values():
        from boltcutter.assembly.assemble import complete_config  # imports torch

        cfg = complete_config(cfg)
        _check_constructors(cfg)
    trainer = cfg.redacted["trainer"]
    size = cfg.data.get("batch_size") if _has_global_batch(cfg) else None
    strategy = trainer.get("strategy", "auto")
    splits_batch = isinstance(strategy, str) or str(strategy.get("_target_")).endswith(".DDPStrategy")
    with as_config_error():
        topology = Topology.requested(trainer)
        if splits_batch and isinstance(size, int):
            check_batch_size(size, topology.data_ranks)
    return cfg


def _has_global_batch(cfg: Settings) -> bool:
    """Whether ``data.batch_size`` is divided over the ranks; data modules of other libraries set it per rank."""
    target = str(cfg.data.get("_target_"))
    is_library = target.partition(".")[0] == LIBRARY
    if is_library or not cfg.data or not can_check_values():
        return is_library
    from boltcutter.data.module import DataModule  # imports torch

    kind = locate(target)
    return isinstance(kind, type) and issubclass(kind, DataModule)


def _check_constructors(cfg: Settings) -> None:
    """Check what does not depend on the machine that trains: callbacks, strategy, task, numbers of batches.

    Raises:
        ConfigError: A constructor refuses its arguments.
    """
    from lightning.pytorch.callbacks import Callback  # these imports take seconds
    from lightning.pytorch.strategies import StrategyRegistry

    from boltcutter.assembly.assemble import build_each
    from boltcutter.checks.combination import check_optimizer, check_support
    from boltcutter.checks.components import check_batches_and_clipping, check_monitors
    from boltcutter.strategy.precision import full_precision
    from boltcutter.topology import PlannedTraining

    check_batches_and_clipping(cfg.trainer)
    parts = cfg.changed({"folder": cfg.folder or "new"})
    callbacks = build_each(parts, "callback", Callback)
    strategy = parts.trainer.get("strategy", "auto")
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        raise ConfigError(f"trainer.strategy={strategy}: no such strategy{hint(strategy, known) or '; try auto'}")
    built = strategy
    try:
        built = build(strategy, "trainer.strategy")
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError) and "installed" not in str(error):
            raise  # otherwise the image of the nodes may have the package
    try:
        task = _build_task(parts)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError | OSError):
            return  # a package or file that only the nodes may have
        raise
    check_monitors(task, callbacks)
    check_optimizer(task)
    with as_config_error():
        topology = Topology.requested(parts.trainer)
    size, accelerator = parts.data.get("batch_size"), str(parts.trainer.get("accelerator", "auto"))
    check_support(
        PlannedTraining(
            task,
            topology,
            built,
            full_precision(parts.trainer.get("precision")),
            list(callbacks.values()),
            parts.trainer.get("accumulate_grad_batches") or 1,
            size if isinstance(size, int) else 0,
            build(parts.checkpoint_io, "checkpoint_io"),
            "cpu" if accelerator == "cpu" else None,
        )
    )


def _build_task(cfg: Settings) -> Any:
    """Build the task without memory for its weights, or where its constructor needs their values, with it."""
    import torch

    with suppress(Exception), torch.device("meta"):
        return build(cfg.task, "task")
    return build(cfg.task, "task")


def create_job(cfgs: Sequence[Settings], root: Path, launcher: Launcher) -> tuple[Job, list[Settings]]:
    """Create the job from the configurations of its runs, and return these with the folders of the runs.

    Args:
        cfgs: Configuration of each run.
        root: Root of the project.
        launcher: The launcher, whose array may have one run.

    Raises:
        ConfigError: Runs of the array need different resources.
    """
    key = "folder" if cfgs[0].folder else "runs"
    refuse({key: cfgs[0].get(key)}, "a job has a folder on this machine")
    home = Path(cfgs[0].folder or Path(cfgs[0].runs) / cfgs[0].name / new_run_id()).absolute()
    folders = [str(home)]
    code = describe_code(launcher, root, home, "train.py")
    environment = code.pop("environment")
    if launcher.array:
        folders = [Job(name="", folder=home, script=None).run_folder(task) for task in range(len(cfgs))]
    jobs = []
    cfgs = [cfg.changed({"folder": folder}) for cfg, folder in zip(cfgs, folders, strict=True)]
    for cfg, folder in zip(cfgs, folders, strict=True):
        values = cfg.redacted
        trainer = values["trainer"]
        with as_config_error():
            topology = Topology.requested(trainer)
        jobs.append(
            Job(
                name=str(cfgs[0].name),
                folder=home,
                array_size=len(cfgs) if launcher.array else 0,
                nodes=topology.num_nodes,
                devices=topology.num_devices,
                gpus=trainer.get("accelerator", "auto") != "cpu",
                num_workers=(values["data"] or {}).get("num_workers") or 0,
                environment=environment | ({"WANDB_RUN_GROUP": home.name} if launcher.array else {}),
                progress="checkpoints" if values.get("checkpoints") == f"{folder}/checkpoints" else run_files.METRICS,
                **code,
            )
        )
    if any(job != jobs[0] for job in jobs):
        raise ConfigError("launch.array: all runs must use the same nodes, devices and workers; launch them separately")
    is_composed = [trust.is_granted() or not cfg.resume or is_own(Path(cfg.resume)) for cfg in cfgs]
    digests = (user_key.digest(run_store().portable(cfg)) for cfg, own in zip(cfgs, is_composed, strict=True) if own)
    return replace(jobs[0], digests=tuple(digests)), cfgs


def describe(project: Project, arguments: list[str]) -> None:
    """Print the keys that can be set for the launcher or for training."""
    prefix = next((a for a in arguments if "=" not in a and not a.startswith("~")), "launch")
    rest = [argument for argument in arguments if argument != prefix]
    if prefix.partition(".")[0] == "launch":
        settings, _ = read_launcher(project, rest)
        print_keys(project, Settings({"launch": settings}), prefix, LaunchSettings)
    else:
        cfg = read_overrides(project, [override for override in rest if not is_launch_override(override)])
        print_keys(project, cfg, prefix)
