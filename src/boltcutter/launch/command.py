"""The launch command: compose, check, save and submit a run; query and cancel launched runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter.config import instantiate as build
from boltcutter.config.compose import DictConfig, compose
from boltcutter.config.describe import describe as describe_keys
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.locate import same_target
from boltcutter.config.values import format_value, parse, plain, redacted
from boltcutter.environment.identity import new_run_id
from boltcutter.environment.warnings import filter_warnings
from boltcutter.launch.array import combinations
from boltcutter.launch.job import JOB_VARIABLE, Job, Launcher
from boltcutter.launch.jobs import has_completed, list_runs, refresh, remember, run_verb
from boltcutter.launch.submit import can_copy, describe_code, start
from boltcutter.project import Project
from boltcutter.run import folder as run
from boltcutter.run import remote, trust

USER_CONFIGS = Path("~/.config/boltcutter/launch")  # <option>.yaml there overrides values of configs/launch
SLURM_REFERENCE = re.compile(r"\$\{oc\.env:\s*(SLURM_\w+)\s*\}")  # a reference without a default
VERBS = ("status", "logs", "cancel", "fetch")
FLAGS = {
    "--dry-run": "print the job script without submitting it",
    "--wait": "follow the log until the job has ended",
    "--check": "check the configuration and exit",
    "--describe": "list every key that can be set below the next argument, with type, value and documentation",
}


@dataclasses.dataclass
class Settings:
    """Configuration of the launch command besides that of training.

    Args:
        launch: The launcher.
    """

    launch: Launcher


def main(project: Project, arguments: list[str]) -> None:
    """Launch a run, or query or cancel launched runs."""
    filter_warnings()
    flags = [argument for argument in arguments if argument in FLAGS]
    rest = [argument for argument in arguments if argument not in FLAGS]
    verb, *options = rest or [""]
    with as_config_error():
        if "--describe" in flags:
            describe(project, rest)
        elif verb == "list":
            special, unknown = run.split_overrides(options, "runs")
            if unknown:
                raise ConfigError(f"list: {unknown[0]}: takes only runs=<folder>; remove it")
            list_runs(Path(special.get("runs") or run.read_overrides(project, []).runs))
        elif verb in VERBS:
            special, unknown = run.split_overrides(options, "run")
            if unknown or not special.get("run"):
                raise ConfigError(f"{verb}: expects one argument; use {verb} run=<folder of a run or of an array>")
            run_verb(verb, Path(special["run"]), follow="--wait" in flags)
        else:
            launch(project, rest, flags)


def launch(project: Project, overrides: list[str], flags: Sequence[str]) -> None:
    """Compose, check and submit a run or an array, or stop earlier as the flags say."""
    resumed, _ = run.split_overrides(overrides, "resume")
    settings, launcher = read_launcher(project, overrides, recorded_settings(resumed))
    rest = [override for override in overrides if not is_launch_override(override)]
    if is_search(rest):
        from boltcutter.launch.search import launch_search  # imports what only a search needs

        launch_search(project, settings, launcher, rest, flags)
        return
    tasks = combinations(launcher.array) if launcher.array else [[]]
    if resumed and launcher.array:
        raise ConfigError("launch.array: cannot be combined with resume; remove one of them")
    root = project.root
    copies = can_copy(launcher, root)
    cfgs = [read_training_config(project, [*rest, *task]) for task in tasks]
    with job_variables(cfgs, launcher.environment) as unset:
        cfgs = [check(cfg, values=not unset) for cfg in cfgs]
        if unset:
            print(f"note: {', '.join(unset)} will be set only in the job, which then checks the configuration")
        elif not can_check_values():
            print("note: torch is not installed on this host, so only the keys of the configuration were checked")
        job = create_job(cfgs, root, array=bool(launcher.array), copies=copies)

    def prepare() -> None:
        with job_variables(cfgs, launcher.environment):
            for cfg in cfgs:
                run.save_config(cfg)
        remember(cfgs[0].runs, job.folder)

    if start(launcher, settings, job, prepare, flags, resumed=bool(resumed)):
        refresh(launcher, *job.run_folders)
        sys.exit(not all(has_completed(folder) for folder in job.run_folders))


def is_search(overrides: Sequence[str]) -> bool:
    """Whether overrides launch a search: a new one, or one that is continued."""
    special, _ = run.split_overrides(overrides, "resume")
    is_new = any(override.lstrip("+~").startswith(("search=", "search.")) for override in overrides)
    return is_new or (Path(special.get("resume") or ".") / "search.json").is_file()


@contextmanager
def job_variables(cfgs: Sequence[DictConfig], environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Set the environment variables of the job while the configuration is resolved.

    Args:
        cfgs: Configurations that may refer to variables that SLURM sets in the job, as ``${oc.env:SLURM_TMPDIR}``.
        environment: Variables that the launcher sets in the job.

    Yields:
        Names of variables whose values are known only in the job; their names stand for the values.
    """
    referenced = {name for cfg in cfgs for name in SLURM_REFERENCE.findall(json.dumps(plain(cfg), default=str))}
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


def recorded_settings(resumed: dict[str, str]) -> DictConfig | None:
    """Return the launch settings of the run to resume; None if it was not launched."""
    folder = Path(resumed.get("resume") or "")
    facts = run.read_record(folder).get("launch") if resumed and (folder / "record.json").is_file() else None
    if not facts:
        return None
    trust.check(facts["settings"], f"resume={folder}", folder, signature=facts.get("signature"), runs=True)
    settings = dict(facts["settings"])
    for name in ("array", "max_parallel"):  # a single run is resumed
        settings.pop(name, None)
    return DictConfig(settings)


def is_launch_override(override: str) -> bool:
    """Whether an override is for the launcher, not for training."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == "launch"


def read_launcher(
    project: Project, overrides: Sequence[str], earlier: DictConfig | None = None
) -> tuple[DictConfig, Launcher]:
    """Compose the launch settings from the project, the user's own file and overrides, and build the launcher."""
    special, _ = run.split_overrides(overrides, "launch")
    rest = [o for o in overrides if is_launch_override(o) and not o.startswith("launch=")]
    picked = parse("launch", special.get("launch") or "null")
    options = [picked] if isinstance(picked, str) else list(picked or [])
    if not options and earlier is None:
        raise ConfigError(f"launch: not set; give launch=…{project.list_options('launch')}")
    if len(options) > 1:
        found = {option: compose(project, [f"launch={option}"], base=DictConfig({})).launch for option in options}
        launchers = [settings._target_ for settings in found.values() if "_target_" in settings]
        if not all(same_target(launchers[0], other) for other in launchers):
            raise ConfigError(f"launch={format_value(options)}: more than one of these is a launcher; keep one of them")
    base = DictConfig({"launch": earlier}) if earlier is not None else DictConfig({})
    user_files = [str(file) for option in options if (file := (USER_CONFIGS / f"{option}.yaml").expanduser()).is_file()]
    selected = f"launch={format_value([*options, *user_files])}"
    chosen = compose(project, [selected], base=DictConfig({})) if options else base
    # Several options select a cluster, whose values then replace the earlier ones.
    if earlier is not None and len(options) < 2 and same_target(chosen.launch.get("_target_"), earlier.get("_target_")):
        chosen = base
    settings = compose(project, rest, base=chosen)
    if mistakes := build.check(DictConfig({"launch": settings.launch}), Settings):
        if any(mistake.startswith("launch.array: ") for mistake in mistakes):
            raise ConfigError("launch.array: only launch=slurm has arrays; remove it, and launch the runs one by one")
        raise ConfigError("\n".join(mistakes))
    return settings.launch, build.build(settings.launch, "launch")


def read_training_config(project: Project, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of training, without the launch settings."""
    cfg = run.read_overrides(project, overrides)
    cfg.pop("launch", None)
    if cfg.get("ckpt"):
        raise ConfigError(f"ckpt={cfg.ckpt}: a job continues from its newest checkpoint; remove it, or train here")
    return cfg


def can_check_values() -> bool:
    """Whether torch and Lightning are installed, which a login node does not need."""
    return all(find_spec(name) for name in ("torch", "lightning"))


def check(cfg: DictConfig, *, values: bool = True) -> DictConfig:
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
    trainer = redacted(cfg)["trainer"]
    nodes, devices = trainer.get("num_nodes", 1), count_devices(trainer.get("devices", "auto"))
    if not isinstance(nodes, int) or nodes < 1:
        raise ConfigError(f"trainer.num_nodes={nodes} is not a number of nodes; try trainer.num_nodes=1")
    target = str((cfg.data or {}).get("_target_"))
    is_native = target.partition(".")[0] == __name__.partition(".")[0]  # other data modules set the batch per rank
    size = cfg.data.get("batch_size") if is_native else None
    strategy = trainer.get("strategy", "auto")
    splits_batch = isinstance(strategy, str) or str(strategy.get("_target_")).endswith(".DDPStrategy")
    if splits_batch and isinstance(size, int) and size % (ranks := nodes * devices):
        raise ConfigError(f"data.batch_size={size} does not divide over {ranks} ranks; try {size + -size % ranks}")
    return cfg


def count_devices(devices: Any) -> int:
    """Return the number of devices on each node, which must be set explicitly."""
    if isinstance(devices, list) and devices:
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    raise ConfigError(f"trainer.devices={format_value(devices)}: a job needs an explicit number; try trainer.devices=1")


def create_job(cfgs: Sequence[DictConfig], root: Path, *, array: bool, copies: bool) -> Job:
    """Create the job from the configurations of its runs, whose folders are set.

    Args:
        cfgs: Configuration of each run; changed.
        root: Root of the project.
        array: Whether the runs form an array, which may have one run.
        copies: Whether the job runs a copy of the code.

    Raises:
        ConfigError: Runs of the array need different resources.
    """
    key = "folder" if cfgs[0].folder else "runs"
    remote.refuse({key: cfgs[0][key]}, "a job has a folder on this machine")
    home = Path(cfgs[0].folder or Path(cfgs[0].runs) / cfgs[0].name / new_run_id()).absolute()
    folders = [str(home)]
    code = describe_code(root, home, "train.py", copies=copies)
    environment = code.pop("environment")
    if array:
        folders = [Job(name="", folder=home, script=None).run_folder(task) for task in range(len(cfgs))]
    jobs = []
    for cfg, folder in zip(cfgs, folders, strict=True):
        cfg.folder = folder
        values = redacted(cfg)
        trainer = values["trainer"]
        jobs.append(
            Job(
                name=str(cfgs[0].name),
                folder=home,
                array_size=len(cfgs) if array else 0,
                nodes=trainer.get("num_nodes", 1),
                devices=count_devices(trainer.get("devices", "auto")),
                gpus=trainer.get("accelerator", "auto") != "cpu",
                num_workers=(values["data"] or {}).get("num_workers") or 0,
                environment=environment | ({"WANDB_RUN_GROUP": home.name} if array else {}),
                progress="checkpoints" if values.get("checkpoints") == f"{folder}/checkpoints" else "metrics.csv",
                trusted=trust.is_granted() or not cfg.get("resume") or run.is_signed_by_user(Path(cfg.resume)),
                **code,
            )
        )
    if any(job != jobs[0] for job in jobs):
        raise ConfigError("launch.array: all runs must use the same nodes, devices and workers; launch them separately")
    return jobs[0]


def describe(project: Project, arguments: list[str]) -> None:
    """Print the keys that can be set for the launcher or for training."""
    prefix = next((a for a in arguments if "=" not in a and not a.startswith("~")), "launch")
    rest = [argument for argument in arguments if argument != prefix]
    if prefix.partition(".")[0] == "launch":
        settings, _ = read_launcher(project, rest)
        lines = describe_keys(DictConfig({"launch": settings}), Settings, prefix)
    else:
        from boltcutter.assembly.assemble import describe_overrides  # imports torch

        lines = describe_overrides(project, [override for override in rest if not is_launch_override(override)], prefix)
    print("\n".join([*lines, *(["", *project.help_lines(prefix)] if project.has_group(prefix) else [])]))
