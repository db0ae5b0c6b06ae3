"""From overrides to trainer, data and task: compose, check, instantiate, and check that they match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from boltcutter import extend
from boltcutter.assembly.adapt import adapt, load_compiled, spawning_strategy
from boltcutter.assembly.checks import (
    check_batch,
    check_batches_and_clipping,
    check_built,
    check_callbacks,
    check_devices,
    check_input_shape,
    check_kind,
    check_monitors,
    check_num_classes,
    check_optimizer,
    check_sync_batchnorm,
    check_type,
    check_world_size,
)
from boltcutter.assembly.overrides import read_overrides
from boltcutter.assembly.precision import (
    FLOAT8,
    check_precision,
    device_type,
    placeholder_precision,
    set_numerics,
    set_precision,
)
from boltcutter.callback.reseed import EvaluationSeeds
from boltcutter.config import describe
from boltcutter.config.compose import DictConfig, merge
from boltcutter.config.errors import ConfigError, as_config_error, hint
from boltcutter.config.instantiate import build, find_mistakes
from boltcutter.config.locate import is_left_out, locate
from boltcutter.config.values import plain, resolve_reference
from boltcutter.data.hooks import seed_hooks, shard_loaders
from boltcutter.environment.platform import disable_mpi_detection
from boltcutter.environment.threads import limit_threads
from boltcutter.formatting import format_limit, parse_duration
from boltcutter.internals import set_timeout
from boltcutter.project import Project
from boltcutter.protocols import NativeData
from boltcutter.topology import Topology

SET_ELSEWHERE = {
    "callbacks": "callback",
    "logger": "logger",
    "default_root_dir": "folder",
}  # arguments of the trainer, and the setting to use instead
METRICS_FILE = "boltcutter.logger.csv.CSVLogger"


@dataclass
class Config:
    """The top level of ``configs/train.yaml``.

    Args:
        data: Any LightningDataModule; null if the task defines its own dataloaders.
        task: Any LightningModule, such as one with a model, loss, metrics and optimizer.
        trainer: Arguments of the Lightning trainer, such as devices, precision and ``max_epochs``.
        name: Name of the experiment; its runs share a parent folder.
        choices: The selected option of each config group.
        model: The network, which the task refers to.
        optimizer: Called by the task with the parameters.
        scheduler: Called by the task with the optimizer.
        callback: Callbacks by name, so that an experiment can change or remove one.
        logger: Loggers by name; metrics.csv is always written.
        tags: Words by which runs are found; recorded, and passed to loggers that take tags.
        seed: Seed of weights, split, order and augmentation.
        runs: Parent folder of all runs.
        folder: Folder of this run.
        checkpoints: Folder or URL for checkpoints.
        checkpoint_io: How checkpoints are written and read.
        timeout: Timeout of collectives, in seconds.
        matmul_precision: Precision of float32 matrix multiplications, and of convolutions on GPUs.
        init_from: Checkpoint or weights file to initialize the model from.
        test: Whether to test the best checkpoint after training.
        report: Whether to write report.html after training.
        resume: Folder of the run to resume, or a checkpoint file in it.
        ckpt: Checkpoint to resume from: best, last, its name or path.
        resume_exact: Whether to refuse to resume if the result would not be bitwise identical to an uninterrupted run.
        reproduce: Folder of the run to reproduce.
    """

    data: L.LightningDataModule | None
    task: L.LightningModule
    trainer: L.Trainer
    name: str
    choices: dict[str, str]
    model: nn.Module | None = None
    optimizer: Callable[..., Any] | None = None
    scheduler: Callable[..., Any] | None = None
    callback: dict[str, Callback | None] | None = None
    logger: dict[str, Logger | None] | None = None
    tags: list[str] = field(default_factory=list)
    seed: int = 0
    runs: Path = Path("runs")
    folder: Path | None = None
    checkpoints: str | None = None
    checkpoint_io: CheckpointIO | None = None
    timeout: float = 1800.0
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    init_from: Path | None = None
    test: bool = True
    report: bool = True
    resume: Path | None = None
    ckpt: str | None = None
    resume_exact: bool = True
    reproduce: Path | None = None


class TaskLoaders(L.LightningDataModule):
    """Exposes the dataloaders of a task as a data module.

    Args:
        task: Module that defines the dataloaders; its own hooks prepare the data.
    """

    def __init__(self, task: L.LightningModule) -> None:
        super().__init__()
        for name in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
            if is_overridden(name, task):
                setattr(self, name, getattr(task, name))


@dataclass
class Components:
    """Trainer, data and task of a run, and where it runs."""

    trainer: L.Trainer
    data: L.LightningDataModule
    task: L.LightningModule
    topology: Topology


def read_config(project: Project, overrides: list[str]) -> DictConfig:
    """Compose the configuration from overrides and check every value.

    Args:
        project: Project whose configuration is used.
        overrides: Command-line overrides, such as ``model=mlp``.

    Raises:
        ConfigError: There are mistakes, one line for each.
    """
    return complete_config(read_overrides(project, overrides))


def complete_config(cfg: DictConfig) -> DictConfig:
    """Return the configuration with null shapes and sizes inferred from the data, after every value was checked.

    Raises:
        ConfigError: There are mistakes, one line for each.
    """
    unknown = [key for key in ("shape", "num_classes", "kind") if key in (cfg.data or {}) and cfg.data[key] is None]
    cfg = _infer_settings(cfg) if unknown else cfg.copy()
    if mistakes := _find_mistakes(cfg, unknown):
        raise ConfigError("\n".join(dict.fromkeys(_blame_null_settings(cfg, unknown, mistakes))))
    # Values of the top level are not passed to a constructor, so convert 1e3 to int and a number to str here.
    cfg.seed = int(cfg.seed)
    if not isinstance(cfg.name, str):
        cfg.name = str(cfg.name)
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} is not in [0, {2**32 - 1}]; try 0")
    if not cfg.timeout > 0:
        raise ConfigError(f"timeout={cfg.timeout} is not a positive number of seconds; try 1800")
    for key, setting in SET_ELSEWHERE.items():
        if key in cfg.trainer:
            raise ConfigError(f"trainer.{key}: set by {setting}; remove it, and use {setting}=… instead")
    if isinstance(limit := cfg.trainer.get("max_time"), str):
        if (seconds := parse_duration(limit)) is None:
            raise ConfigError(
                f"trainer.max_time={limit}: expected DD:HH:MM:SS, or such as 30m; correct it, or remove it"
            )
        cfg.trainer.max_time = format_limit(seconds)
    return cfg


def _infer_settings(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the values that its data infers for settings that are null."""
    alone = cfg.copy()  # the data, and what it may refer to
    for key in Config.__dataclass_fields__.keys() & cfg.keys() - {"data", "seed"}:
        del alone[key]
    found = cfg.copy()
    if not any(mistake.startswith("data") for mistake in find_mistakes(alone, _data_only)):
        data = build(cfg.data, "data")
        if isinstance(data, NativeData):  # null may mean something else in another data module
            with as_config_error():
                found.data = merge(cfg.data, DictConfig(data.infer_settings()))
    return found


def _find_mistakes(cfg: DictConfig, unknown: list[str]) -> list[str]:
    """List the mistakes, without those that follow from a setting of the data which it could not infer."""
    completed = merge(cfg, DictConfig({"folder": cfg.get("folder") or "new"}))  # the folder is set when the run starts
    if completed.trainer.get("precision") == FLOAT8:
        completed.trainer.precision = "bf16-mixed"  # which Lightning's annotation does not list
    mistakes = find_mistakes(completed, Config)
    if unknown and any(mistake.startswith("data.") for mistake in mistakes):
        # What the data would have set is null elsewhere as well, which needs no mention.
        return [m for m in mistakes if m.startswith("data.") or "=null: expected" not in m]
    return mistakes


def _blame_null_settings(cfg: DictConfig, unknown: list[str], mistakes: list[str]) -> Iterator[str]:
    """Replace mistakes that refer to a null setting of the data by one that names it."""
    unset = [f"data.{key}" for key in unknown if cfg.data[key] is None]
    for mistake in mistakes:
        source = resolve_reference(cfg, mistake.partition("=")[0])
        if source in unset and not mistake.startswith(source):
            cls = str(cfg.data._target_).rpartition(".")[2]
            mistake = f"{source}=null: {cls}.infer_settings() does not return it; set {source}, or return it there"
        yield mistake


def describe_overrides(project: Project, overrides: list[str], prefix: str) -> Iterator[str]:
    """Describe every key that can be set below ``prefix``, one line for each."""
    return describe.describe(read_overrides(project, overrides), Config, prefix)


def assemble(cfg: DictConfig, extra_callbacks: Sequence[Callback] = (), *, with_callbacks: bool = True) -> Components:
    """Instantiate trainer, data and task, and check that they match.

    Args:
        cfg: Checked configuration.
        extra_callbacks: Callbacks besides those of the configuration.
        with_callbacks: Whether to instantiate the callbacks and loggers of the configuration.

    Raises:
        ConfigError: They do not match, or a component refuses its arguments.
    """
    set_numerics(cfg)
    check_devices(cfg.trainer)
    check_batches_and_clipping(cfg.trainer)
    callbacks = _build_each(cfg, "callback", Callback) if with_callbacks else {}
    media_logging = extend.find("media_logging") if with_callbacks else None
    added = [*extra_callbacks, *([media_logging(cfg.folder)] if media_logging else [])]
    loggers: list[Logger] = _build_loggers(cfg) if with_callbacks else [DummyLogger()]  # takes the calls of modules
    trainer = _build_trainer(cfg, callbacks, added, loggers)
    topology = Topology.of(trainer)
    limit_threads(topology.num_processes)
    check_world_size(trainer, topology)  # before the data is read, by processes that would train separately
    shard_loaders(trainer, cfg.get("seed", 0))
    data, task = _build_data_and_task(cfg)
    check_sync_batchnorm(cfg, trainer, task)
    load_compiled(task)
    seed_hooks(data or task, cfg.get("seed", 0))
    data = data or TaskLoaders(task)
    check_batch(topology, data)
    check_num_classes(cfg)
    if with_callbacks and (report_missing := extend.find("report_missing")):
        report_missing(cfg, trainer)
    check_input_shape(cfg, task)
    check_callbacks(task, callbacks)
    check_monitors(task, callbacks)
    check_optimizer(task)
    adapt(trainer, task, callbacks)  # last, as it adds callbacks that are none of the configuration
    return Components(trainer, data, task, topology)


def _build_loggers(cfg: DictConfig) -> list[Logger]:
    """Instantiate the loggers of the configuration, and the one that always writes metrics.csv."""
    metrics = build({"_target_": METRICS_FILE, "path": f"{cfg.folder}/metrics.csv"})
    return [*_build_each(cfg, "logger", Logger).values(), metrics]


def _build_trainer(
    cfg: DictConfig, callbacks: dict[str, Callback], added: Sequence[Callback], loggers: list[Logger]
) -> L.Trainer:
    """Instantiate the trainer, with what Lightning lacks: some precisions and launchers, and a timeout."""
    # Without these, Lightning would add its own where the configuration has none.
    defaults = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks.values()),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks.values())
        or (bool(callbacks) and is_left_out(plain(cfg.callback).get("progress"))),
    }
    precision = check_precision(cfg)
    placeholder = placeholder_precision(precision, device_type(str(cfg.trainer.get("accelerator", "auto"))))
    disable_mpi_detection()  # before Lightning looks for an environment
    trainer: L.Trainer = build(
        cfg.trainer,
        "trainer",
        callbacks=[EvaluationSeeds(cfg.get("seed", 0)), *callbacks.values(), *added],
        logger=loggers,
        default_root_dir=str(cfg.folder),
        **{name: value for name, value in defaults.items() if name not in cfg.trainer},
        **({"precision": placeholder} if placeholder else {}),
        **spawning_strategy(cfg.trainer),
    )
    if placeholder:
        set_precision(trainer, precision)
    set_timeout(trainer.strategy, timedelta(seconds=float(cfg.timeout)))
    return trainer


def _build_data_and_task(cfg: DictConfig) -> tuple[Any, L.LightningModule]:
    """Instantiate the data, or None, and the task."""
    # Right before both: initial weights, and random splits in constructors, depend on nothing that was built earlier.
    L.seed_everything(cfg.get("seed", 0), verbose=False)
    data = build(cfg.data, "data")
    check_kind(cfg, locate(cfg.task._target_), data)  # before metrics refuse the number of classes
    task = build(cfg.task, "task")
    check_built(cfg, task, data)
    return data, task


def check_parts(cfg: DictConfig) -> None:
    """Check what does not depend on the machine that trains: callbacks, strategy, numbers of batches and clipping.

    Args:
        cfg: Checked configuration.

    Raises:
        ConfigError: A constructor refuses its arguments.
    """
    check_batches_and_clipping(cfg.trainer)
    parts = merge(cfg, DictConfig({"folder": cfg.get("folder") or "new"}))
    _build_each(parts, "callback", Callback)
    strategy = parts.trainer.get("strategy", "auto")
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        raise ConfigError(f"trainer.strategy={strategy}: no such strategy{hint(strategy, known) or '; try auto'}")
    try:
        build(strategy, "trainer.strategy")
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError) and "installed" not in str(error):
            raise  # otherwise the image of the nodes may have the package


def _build_each(cfg: DictConfig, group: str, kind: type) -> dict[str, Any]:
    """Instantiate the callbacks or loggers, without those that are null."""
    made = build(cfg.get(group) or {}, group)
    for name, value in made.items():
        check_type(f"{group}.{name}", cfg[group][name], value, kind)
    return {name: value for name, value in made.items() if value is not None}


def _data_only(data: L.LightningDataModule, seed: int) -> None:
    """The signature against which a configuration of only the data is checked."""
