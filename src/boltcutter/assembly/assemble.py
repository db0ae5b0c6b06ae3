"""From overrides to trainer, data and task: compose, check, instantiate, and check that they match."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    ProgressBar,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from boltcutter import files, run_files
from boltcutter.assembly.adapt import adapt, load_compiled
from boltcutter.assembly.data_values import BUILT, complete_references
from boltcutter.assembly.hooks import check_hooks
from boltcutter.assembly.overrides import INFERRED, read_overrides
from boltcutter.assembly.pixels import accept_pixels
from boltcutter.assembly.precision import (
    placeholder_precision,
    set_numerics,
    set_precision,
)
from boltcutter.assembly.recorded import RecordedLogger, describe, within
from boltcutter.callback.metrics import SeparateMetrics
from boltcutter.callback.reseed import EvaluationSeeds
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.storage import is_url
from boltcutter.checks.combination import check_combination, check_kind
from boltcutter.checks.components import (
    check_batches_and_clipping,
    check_built,
    check_components,
    check_return_type,
    check_type,
    check_world_size,
)
from boltcutter.checks.hardware import check_hardware
from boltcutter.checks.monitors import MonitorCheck
from boltcutter.config.errors import ConfigError, Mistake, as_config_error
from boltcutter.config.instantiate import build, find_mistakes
from boltcutter.config.locate import locate
from boltcutter.config.redaction import MASK
from boltcutter.config.settings import Settings, TopLevel
from boltcutter.config.values import format_value
from boltcutter.data.hooks import seed_hooks, shard_loaders
from boltcutter.environment.platform_facts import disable_mpi_detection
from boltcutter.environment.process import is_rank_zero
from boltcutter.environment.threads import limit_threads
from boltcutter.formatting import format_limit, parse_duration
from boltcutter.internals import launches_processes, set_launcher, set_timeout
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.project import Project
from boltcutter.protocols import NativeData
from boltcutter.run import trust
from boltcutter.run.folder import read_record
from boltcutter.strategy.ddp import spawning_strategy
from boltcutter.strategy.precision import FLOAT8, device_type, full_precision
from boltcutter.strategy.process_launcher import MultiProcessingLauncher
from boltcutter.task.results import reduce_results
from boltcutter.topology import Topology

# Arguments of the trainer, and the setting to use instead.
SET_ELSEWHERE = {"callbacks": "callback", "logger": "logger", "default_root_dir": "folder"}
FEATURES = ("log_every_n_steps", "enable_model_summary")  # arguments of the trainer that ``barebones`` excludes
SHOWN = ("tags", "notes", "description")  # arguments of loggers
METRICS_FILE = "boltcutter.logger.csv_logger.CSVLogger"


@dataclass(kw_only=True)
class Config(TopLevel):
    """The top level of ``configs/train.yaml``, which explains the other settings.

    Args:
        choices: The selected option of each config group.
        ckpt: Checkpoint to resume from: best, last, its name or path.
    """

    data: L.LightningDataModule | None
    task: L.LightningModule
    trainer: L.Trainer
    model: nn.Module | None = None
    optimizer: Callable[..., Any] | None = None
    scheduler: Callable[..., Any] | None = None
    callback: dict[str, Callback | None] | None = None
    logger: dict[str, Logger | None] | None = None
    checkpoint_io: CheckpointIO | None = None


@dataclass
class Components:
    """Trainer, data and task of a run, and where it runs; no data if the task defines its own dataloaders."""

    trainer: L.Trainer
    data: L.LightningDataModule | None
    task: L.LightningModule
    topology: Topology


def read_config(project: Project, overrides: list[str]) -> Settings:
    """Compose the configuration from overrides and check every value.

    Raises:
        ConfigError: There are mistakes, one line for each.
    """
    return complete_config(read_overrides(project, overrides))


def complete_data(cfg: Settings) -> Settings:
    """Return the configuration with values to which it refers, but which only the class of the data has.

    Raises:
        ConfigError: It does not have them, or settings of the data have mistakes.
    """
    return complete_references(cfg, _find_mistakes)


def complete_config(cfg: Settings) -> Settings:
    """Return the configuration with null shapes and sizes inferred from the data, after every value was checked.

    Raises:
        ConfigError: There are mistakes, one line for each.
    """
    settings = cfg.written
    for key, kinds in {"data": (dict, type(None)), "trainer": (dict,)}.items():
        if not isinstance(value := settings.get(key), kinds):
            raise ConfigError(f"{key}={format_value(value)}: no settings; choose a file of configs/{key}")
    cfg = complete_data(cfg)
    mistakes = _find_mistakes(cfg)
    unknown = [key for key in INFERRED if key in cfg.data and cfg.data[key] is None]
    if unknown and not any(mistake.startswith("data") for mistake in mistakes):
        data = build(cfg.data, "data")
        if isinstance(data, NativeData):  # null may mean something else in another data module
            with as_config_error():
                inferred = data.infer_settings()
                kind = _task_kind(cfg)
                if kind != inferred.get("kind") and kind in getattr(data, "possible_kinds", ()):
                    data = build({**cfg.data, "kind": kind}, "data")
                    inferred = data.infer_settings()
            mistakes = _contradictions(cfg.written["data"], inferred)
            cfg = cfg.changed({"data": inferred})
            mistakes += _find_mistakes(cfg)
    if mistakes:
        raise ConfigError(*dict.fromkeys(_blame_null_settings(cfg, unknown, mistakes)))
    for key in ("seed", "timeout"):
        if isinstance(value := cfg.get(key), dict):
            raise ConfigError(
                f"{key}._target_={value.get('_target_')}: expected a number; set {key}=1", kind="wrong_type"
            )
    # Values of the top level are not passed to a constructor, so convert 1e3 to int and a number to str here.
    cfg = cfg.changed({"seed": int(cfg.seed), "name": str(cfg.name)})
    if not cfg.name.isprintable():
        raise ConfigError(f"name={cfg.name}: has control characters, but names a folder; remove them")
    if {"", ".", ".."}.intersection(cfg.name.split("/")):
        raise ConfigError(f"name={cfg.name}: not the name of a folder below runs={cfg.runs}; try name=run")
    check_way(cfg)
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} is not in [0, {2**32 - 1}]; try 0")
    if not cfg.timeout > 0:
        raise ConfigError(f"timeout={cfg.timeout} is not a positive number of seconds; try 1800")
    for key, setting in SET_ELSEWHERE.items():
        if key in cfg.trainer:
            raise ConfigError(f"trainer.{key}: set by {setting}; remove it, and use {setting}=… instead")
    if isinstance(limit := cfg.trainer.get("max_time"), str):
        if (seconds := parse_duration(limit)) is None:
            raise ConfigError(f"trainer.max_time={limit}: not DD:HH:MM:SS, nor such as 30m; correct it, or remove it")
        cfg = cfg.changed({"trainer": {"max_time": format_limit(seconds)}})
    return cfg


def _contradictions(given: Mapping[str, Any], inferred: Mapping[str, Any]) -> list[Mistake]:
    """Settings of the data that are given, but that the data determines to be something else."""
    wrong = []
    for key, found in inferred.items():
        value = given.get(key)
        same = (
            list(value) == list(found)
            if isinstance(value, list) and isinstance(found, list | tuple)
            else value == found
        )
        if value is not None and not same and str(value) != str(found):
            text = f"data.{key}={format_value(value)}: contradicts the data, which has {format_value(found)}; "
            wrong.append(Mistake(f"{text}set data.{key}=null to infer it"))
    return wrong


def check_way(cfg: Settings) -> None:
    """Check that no link of somebody else leads a new run out of ``runs``, to which others may write.

    Raises:
        ConfigError: There is one.
    """
    if cfg.folder or is_url(cfg.runs) or trust.is_granted():
        return
    if link := files.foreign_link(Path(cfg.runs, cfg.name), below=cfg.runs):
        raise ConfigError(
            f"name={cfg.name}: {link} is a link of another user ({files.owner_name(link)}), to which the run would be "
            f"written; choose another name, or {trust.REMEDY}"
        )


def _find_mistakes(cfg: Settings) -> list[Mistake]:
    completed = cfg.changed({"folder": cfg.folder or "new"})  # the folder is set when the run starts
    if cfg.written["trainer"].get("precision") == FLOAT8:
        completed = completed.changed({"trainer": {"precision": "bf16-mixed"}})  # Lightning's annotation has no float8
    return find_mistakes(completed, Config)


def _task_kind(cfg: Settings) -> str | None:
    """What the task expects targets to be; None if its class does not say."""
    target = cfg.task.get("_target_") if isinstance(cfg.task, dict) else None
    with suppress(ConfigError):  # which is reported with the other mistakes
        return getattr(locate(target), "kind", None) if isinstance(target, str) else None
    return None


def _blame_null_settings(cfg: Settings, unknown: list[str], mistakes: list[Mistake]) -> Iterator[Mistake]:
    """Replace mistakes that follow from null settings of the data, which it could not infer, by one that names it."""
    unset = [f"data.{key}" for key in unknown if cfg.data.get(key) is None]
    of_data = [mistake for mistake in mistakes if mistake.startswith("data.")] if unknown else []
    for mistake in mistakes:
        source = cfg.target_of(mistake.partition("=")[0])
        if of_data and mistake not in of_data and "=null: expected" in mistake:
            continue  # what the data would have set is null elsewhere as well
        if source in unset and not mistake.startswith(source):
            cls = str(cfg.data["_target_"]).rpartition(".")[2]
            line = f"{source}=null: {cls}.infer_settings() does not return it; set {source}, or return it there"
            mistake = Mistake(line, "missing_value")
        yield mistake


def configured_callbacks(cfg: Settings, configured: Mapping[str, Callback]) -> list[Callback]:
    """Callbacks of a trainer that trains no run: to evaluate, or to check a configuration."""
    return [MonitorCheck(configured), EvaluationSeeds(cfg.seed), SeparateMetrics(), *configured.values()]


def assemble(
    cfg: Settings,
    in_order: Callable[[Mapping[str, Callback]], list[Callback]] | None = None,
    *,
    with_callbacks: bool = True,
) -> Components:
    """Instantiate trainer, data and task, and check that they match.

    Lightning's Trainer is built without a module or data, gets them in ``fit``, and finds there what does not match.
    Here all are built first, each after what it depends on, so that a mistake is found before ranks, data or a device
    are used:

    1. Numerics and checks of settings and hardware: before CUDA is initialized.
    2. Callbacks and loggers, then the trainer with all callbacks in order. Of it are replaced: precisions and launchers
       that Lightning lacks, the timeout of collectives, how logged values are reduced over ranks, and how loaders are
       sharded.
    3. Where the run runs; the number of ranks is checked before the data is read, by processes that might train
       separately.
    4. Data, then task, right after seeding: initial weights depend on nothing that was built earlier. Hooks of the data
       are seeded.
    5. Checks of what was built, each with the others, and what the task does itself, such as clipping.

    Args:
        cfg: Checked configuration.
        in_order: Returns all callbacks of the trainer, in their order, from those of the configuration by name.
        with_callbacks: Whether to instantiate those, and the loggers.

    Raises:
        ConfigError: They do not match, or a component refuses its arguments.
    """
    set_numerics(cfg)
    check_hardware(cfg)
    check_batches_and_clipping(cfg.trainer)
    callbacks = build_each(cfg, "callback", Callback) if with_callbacks else {}
    loggers: list[Logger] = build_loggers(cfg) if with_callbacks else recorded_loggers(cfg)
    if cfg.trainer.get("barebones"):
        cfg, callbacks, loggers = _without_features(cfg, callbacks), _plain_callbacks(callbacks), []
    ordered = in_order(callbacks) if in_order else configured_callbacks(cfg, callbacks)
    trainer = _build_trainer(cfg, callbacks, ordered, loggers)
    reduce_results(trainer)
    topology = Topology.of(trainer)
    limit_threads(topology.num_processes)
    check_world_size(trainer, topology)  # before the data is read, by processes that would train separately
    shard_loaders(trainer, cfg.seed)
    data, task = _build_data_and_task(cfg)
    load_compiled(task)
    seed_hooks(data or task, cfg.seed)
    check_components(cfg, topology, data, task, callbacks.values())
    named = {f"callback.{name}": callback for name, callback in callbacks.items()}
    others = [one for one in trainer.callbacks if one not in callbacks.values()]  # type: ignore[attr-defined]
    named |= {f"trainer.callbacks[{number}]": callback for number, callback in enumerate(others)}
    check_hooks(task, named, tests=bool(cfg.test))
    check_combination(cfg, trainer, task, data, callbacks if with_callbacks else None)
    adapt(trainer, task, is_own=bool(cfg.trainer.get("built_in_python")))
    return Components(trainer, data, task, topology)


def build_loggers(cfg: Settings) -> list[Logger]:
    """Instantiate the loggers of the configuration, and the one that always writes metrics.csv."""
    cfg = cfg.changed({"logger": _masked(cfg.redacted.get("logger"))})
    metrics = build({"_target_": METRICS_FILE, "path": f"{cfg.folder}/{run_files.METRICS}"})
    return [*_build_installed(cfg).values(), metrics]


def _build_installed(cfg: Settings) -> dict[str, Logger]:
    """The loggers; a run is resumed without one whose package this machine does not have, and says so."""
    if not cfg.resume:
        return build_each(cfg, "logger", Logger)
    made = dict[str, Logger]()
    for name in (names := [*cfg.logger]):
        alone = cfg.changed({"logger": {other: None for other in names if other != name}})
        try:
            made |= build_each(alone, "logger", Logger)
        except ConfigError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            if is_rank_zero():
                print(f"warning: {error}; until then, the resumed run logs without it", file=sys.stderr)
    return made


def _masked(loggers: Any) -> dict[str, dict[str, Any]]:
    """What services only show, where it has a value of ``.env``; a key, which they need, is passed on."""
    nodes = {name: node for name, node in (loggers or {}).items() if isinstance(node, dict)}
    return {
        name: found
        for name, node in nodes.items()
        if (found := {key: node[key] for key in SHOWN if MASK in str(node.get(key))})
    }


def recorded_loggers(cfg: Settings) -> list[Logger]:
    """What stands for the loggers of the training in an evaluation, so that modules find the same folders."""
    folder, recorded = Path(cfg.folder or "."), None
    with suppress(ConfigError):  # no run is evaluated, such as by doctor
        recorded = read_record(folder).get("loggers")
    configured = [node for node in cfg.logger.values() if node]
    own = describe([CSVLogger(folder / run_files.METRICS)], folder)
    values: list[Any] = list(recorded) if isinstance(recorded, list) else [*({} for _ in configured), *own]
    values += [{}] * (len(configured) + 1 - len(values))
    # A record may be of somebody else: of other folders only those that the configuration, which was checked, names.
    places = [*((node["_target_"], (folder, node.get("save_dir"))) for node in configured), (METRICS_FILE, (folder,))]
    pairs = zip(places, values, strict=False)
    return [RecordedLogger(target, within(known, folder, roots)) for (target, roots), known in pairs]


def _build_trainer(
    cfg: Settings, callbacks: dict[str, Callback], ordered: list[Callback], loggers: list[Logger]
) -> L.Trainer:
    """Instantiate the trainer, with what Lightning lacks: some precisions and launchers, and a timeout."""
    # Without these, Lightning would add its own where the configuration has none.
    kinds = {"enable_checkpointing": Checkpoint, "enable_progress_bar": ProgressBar}
    names = {key: [name for name, item in callbacks.items() if isinstance(item, kinds[key])] for key in kinds}
    if len(bars := [f"callback.{name}" for name in names["enable_progress_bar"]]) > 1:
        raise ConfigError(f"{', '.join(bars)}: more than one progress bar; use {bars[0]}=null")
    for key in kinds:
        if cfg.trainer.get(key) is False and names[key]:
            used = [f"callback.{name}" for name in names[key]]
            remedy = " ".join(f"{name}=null" for name in used)
            raise ConfigError(
                f"trainer.{key}=false: cannot be combined with {', '.join(used)}; use {remedy} instead", kind="conflict"
            )
    defaults = {key: bool(names[key]) for key in kinds}
    precision = full_precision(cfg.trainer.get("precision"))
    placeholder = placeholder_precision(precision, device_type(str(cfg.trainer.get("accelerator", "auto"))))
    disable_mpi_detection()  # before Lightning looks for an environment
    trainer: L.Trainer = build(
        _with_own_checkpoint_io(cfg),
        "trainer",
        callbacks=ordered,
        logger=loggers or None,
        default_root_dir=str(cfg.folder),
        **{name: value for name, value in defaults.items() if name not in cfg.trainer},
        **({"precision": placeholder} if placeholder else {}),
        **spawning_strategy(cfg.trainer),
    )
    if placeholder:
        set_precision(trainer, precision)
    set_timeout(trainer.strategy, timedelta(seconds=float(cfg.timeout)))
    permit_removals(trainer)
    if launches_processes(trainer.strategy):
        set_launcher(trainer.strategy, MultiProcessingLauncher)
    return trainer


def _with_own_checkpoint_io(cfg: Settings) -> Mapping[str, Any]:
    """The trainer's settings; without the plugin ``checkpoint_io`` if its strategy was given or registered with one."""
    options = cfg.trainer.get("strategy")
    if isinstance(options, str):
        options = StrategyRegistry[options]["init_params"] if options in StrategyRegistry else {}
    if not isinstance(options, Mapping) or not options.get("checkpoint_io"):
        return cfg.trainer
    plugins = [node for node in cfg.trainer.get("plugins") or [] if node != cfg.get("checkpoint_io")]
    return {**cfg.trainer, "plugins": plugins}


def permit_removals(trainer: L.Trainer) -> None:
    """Let Lightning's callback for failed runs remove, when training has ended, what an earlier process has saved."""
    writer: Any = trainer.strategy.checkpoint_io
    writer = getattr(writer, "checkpoint_io", writer)  # of a wrapper, such as AsyncCheckpointIO
    if isinstance(writer, AtomicCheckpointIO):
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, OnExceptionCheckpoint):
                writer.permit_removal(callback.ckpt_path)


def _without_features(cfg: Settings, callbacks: dict[str, Callback]) -> Settings:
    """Leave out of the trainer's settings what Lightning refuses with ``barebones``, which runs the loop alone."""
    removed = [f"callback.{name}" for name in callbacks if name not in _plain_callbacks(callbacks)]
    removed += [f"logger.{name}" for name, value in cfg.logger.items() if value]
    if is_rank_zero():
        left_out = ", ".join([*removed, run_files.METRICS])
        print(f"trainer.barebones=true: leaves out {left_out}; nothing is logged or saved")
    kept = {key: value for key, value in cfg.trainer.items() if key not in FEATURES}
    return cfg.without("trainer").changed({"trainer": kept})


def _plain_callbacks(callbacks: dict[str, Callback]) -> dict[str, Callback]:
    """Callbacks that neither save nor show or log anything."""
    return {
        name: callback
        for name, callback in callbacks.items()
        if not isinstance(callback, Checkpoint | ProgressBar | LearningRateMonitor)
    }


def _build_data_and_task(cfg: Settings) -> tuple[Any, L.LightningModule]:
    """Instantiate the data, or None, and the task."""
    # Right before both: initial weights, and random splits in constructors, depend on nothing that was built earlier.
    L.seed_everything(cfg.seed, verbose=False)
    data = build(cfg.data, "data") if cfg.data else None
    check_kind(cfg, locate(cfg.task["_target_"]), data)  # before metrics refuse the number of classes
    token = BUILT.set(data)  # whose attributes the task may get
    try:
        task = build(cfg.task, "task")
    finally:
        BUILT.reset(token)
    check_built(cfg, task, data)
    if isinstance(data, NativeData):
        for module in (task, *task.children()):  # a step may call the module, or a network in it
            accept_pixels(module, getattr(data, "shape", None) or ())
    return data, task


def build_each(cfg: Settings, group: str, kind: type) -> dict[str, Any]:
    """Instantiate the callbacks or loggers, without those that are null."""
    for name, node in (cfg.written.get(group) or {}).items():
        if isinstance(node, dict) and "_target_" in node and "${" not in str(node["_target_"]):
            check_return_type(f"{group}.{name}", node["_target_"], kind)
    nodes = cfg.get(group) or {}
    made = build(nodes, group)
    for name, value in made.items():
        check_type(f"{group}.{name}", nodes[name], value, kind)
    return {name: value for name, value in made.items() if value is not None}
