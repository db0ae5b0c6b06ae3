"""From words to the parts of a training: composed, checked, made, and seen to go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from boltcutter import build, describe, run
from boltcutter.adapt import adapt, is_native_data
from boltcutter.checks import (
    check_batch,
    check_built,
    check_callbacks,
    check_classes,
    check_devices,
    check_inputs,
    check_kind,
    check_monitors,
    check_optimizer,
    check_processes,
    warn_of_no_checkpoint,
)
from boltcutter.config import ConfigError, DictConfig, merge, one_line
from boltcutter.data_hooks import seed_hooks
from boltcutter.environment.mpi import disable_mpi_detection
from boltcutter.environment.warnings import filter_warnings
from boltcutter.precision import FLOAT8, check_precision, device_type, placeholder_precision, set_precision
from boltcutter.sharding import shard_loaders

SET_ELSEWHERE = {"callbacks": "callback", "logger": "logger", "default_root_dir": "folder"}  # arguments of the trainer
METRICS_FILE = "boltcutter.logger.csv.CSVLogger"


@dataclass
class Config:
    """The top level of ``configs/train.yaml``.

    Args:
        data: What is trained on; null where the task has loaders of its own.
        task: What is trained: loss, metrics and optimizer around a model, or any LightningModule.
        trainer: On which devices, how long, how precisely.
        name: Runs of one name share a folder.
        choices: Which option of each group was picked.
        model: Where the task refers to it.
        optimizer: Finished by the task with the parameters.
        scheduler: Finished by the task with the optimizer.
        callback: By name, so that an experiment can change or drop one.
        logger: By name, likewise; metrics.csv is written whatever they are.
        seed: Of weights, split, order and augmentation.
        runs: Where the folders of runs are made.
        folder: Of this run.
        checkpoints: Folder or URL of its checkpoints.
        checkpoint_io: How they are written and read.
        timeout: Seconds that ranks wait for one another.
        matmul_precision: Of products of 32-bit matrices.
        init_from: Weights to start from.
        test: Whether to measure the best checkpoint on the test split at the end.
        report: Whether to write report.html at the end.
        resume: Folder of the run that goes on.
        resume_exact: Whether to refuse what would not end with the bits of an untouched run.
        reproduce: Folder of the run that is made again.
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
    resume_exact: bool = True
    reproduce: Path | None = None


class TaskLoaders(L.LightningDataModule):
    """The loaders that a task brings along, in place of a data module.

    Args:
        task: Whose they are; it prepares them itself.
    """

    def __init__(self, task: L.LightningModule) -> None:
        super().__init__()
        for name in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
            if is_overridden(name, task):
                setattr(self, name, getattr(task, name))


@dataclass
class Components:
    """All that a training is made of."""

    trainer: L.Trainer
    data: L.LightningDataModule
    task: L.LightningModule


def read_config(configs: Path, words: list[str]) -> DictConfig:
    """The configuration that the words mean, every value checked.

    Raises:
        ConfigError: There are mistakes, a line for each.
    """
    return check_config(run.read_overrides(configs, words))


def check_config(cfg: DictConfig) -> DictConfig:
    """Ask the data what only it can tell, then check every value.

    Raises:
        ConfigError: There are mistakes, a line for each.
    """
    unknown = [key for key in ("shape", "num_classes", "kind") if key in (cfg.data or {}) and cfg.data[key] is None]
    if unknown and not build.check(DictConfig({"data": cfg.data, "seed": cfg.seed}), _data_alone):
        data = build.build(cfg.data, "data")
        if is_native_data(data):  # a foreign data module may mean something else by null
            with as_config_error():
                cfg.data = merge(cfg.data, DictConfig(data.sizes()))
    named = merge(cfg, DictConfig({"folder": cfg.get("folder") or "new"}))  # the name is given when the run begins
    if named.trainer.get("precision") == FLOAT8:
        named.trainer.precision = "bf16-mixed"  # Lightning's types do not name it
    if mistakes := build.check(named, Config):
        raise ConfigError("\n".join(mistakes))
    # What a constructor makes of 1e3 or of a number for a text has to be done here for values of the top level.
    cfg.seed = int(cfg.seed)
    if not isinstance(cfg.name, str):
        cfg.name = str(cfg.name)
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} is not in [0, {2**32 - 1}]; try 0")
    if not cfg.timeout > 0:
        raise ConfigError(f"timeout={cfg.timeout} is not a number of seconds; try 1800")
    for key, setting in SET_ELSEWHERE.items():
        if key in cfg.trainer:
            raise ConfigError(f"trainer.{key}: {setting} sets it; say {setting}=… instead")
    return cfg


def main(configs: Path, words: list[str]) -> None:
    """Look for mistakes, all that can be found without training, and say ok.

    Args:
        configs: Folder of the configuration.
        words: Those of training, or ``run=<folder>`` for those of an earlier run, and changes to them.

    Raises:
        ConfigError: There are some, a line for each.
    """
    filter_warnings()
    special, rest = run.split_overrides(words, "run")
    cfg = (
        check_config(run.load_run_config(configs, Path(special["run"]), rest))
        if special
        else read_config(configs, words)
    )
    cfg.folder = cfg.folder or str(Path(cfg.runs) / cfg.name / "check")
    assemble(cfg)
    print("ok")


def describe_overrides(configs: Path, words: list[str], prefix: str) -> Iterator[str]:
    """What can be set below ``prefix``, a line for each key."""
    return describe.describe(run.read_overrides(configs, words), Config, prefix)


def assemble(cfg: DictConfig, watchers: Sequence[Callback] = (), *, with_callbacks: bool = True) -> Components:
    """Make trainer, data and task, and see that they go together.

    Args:
        cfg: Checked.
        watchers: Callbacks besides those of the configuration.
        with_callbacks: Whether callbacks and loggers of the configuration take part.

    Raises:
        ConfigError: They do not.
    """
    check_devices(cfg.trainer)
    if isinstance(parts := cfg.trainer.get("accumulate_grad_batches"), int) and parts < 1:
        raise ConfigError(f"trainer.accumulate_grad_batches={parts} is not a number of batches; try 1")
    callbacks = (
        {k: v for k, v in build.build(cfg.callback or {}, "callback").items() if v is not None}
        if with_callbacks
        else {}
    )
    loggers = [v for v in build.build(cfg.logger or {}, "logger").values() if v is not None] if with_callbacks else []
    if with_callbacks:
        loggers.append(build.build({"_target_": METRICS_FILE, "path": f"{cfg.folder}/metrics.csv"}))
    # Where the configuration has none, Lightning would add its own.
    defaults = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks.values()),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks.values()),
    }
    precision = check_precision(cfg)
    instead = placeholder_precision(precision, device_type(str(cfg.trainer.get("accelerator", "auto"))))
    torch.set_float32_matmul_precision(cfg.get("matmul_precision", "highest"))
    disable_mpi_detection()
    trainer = build.build(
        cfg.trainer,
        "trainer",
        callbacks=[*callbacks.values(), *watchers],
        logger=loggers,
        default_root_dir=str(cfg.folder),
        **{name: value for name, value in defaults.items() if name not in cfg.trainer},
        **({"precision": instead} if instead else {}),
    )
    if instead:
        set_precision(trainer, precision)
    if hasattr(trainer.strategy, "_timeout"):  # an argument of each strategy, but not of strategy=auto
        trainer.strategy._timeout = timedelta(seconds=float(cfg.timeout))
    check_processes(trainer)
    shard_loaders(trainer, cfg.get("seed", 0))
    L.seed_everything(cfg.get("seed", 0), verbose=False)  # weights, and what a constructor splits at random
    data = build.build(cfg.data, "data")
    task = build.build(cfg.task, "task")
    check_built(cfg, task, data)
    seed_hooks(data or task, cfg.get("seed", 0))
    data = data or TaskLoaders(task)
    check_batch(trainer, data)
    check_kind(cfg, task, data)
    check_classes(cfg)
    warn_of_no_checkpoint(cfg, callbacks)
    check_inputs(cfg, task)
    check_callbacks(task, callbacks)
    check_monitors(task, callbacks)
    check_optimizer(task)
    adapt(trainer, task, callbacks)
    return Components(trainer, data, task)


@contextmanager
def as_config_error() -> Iterator[None]:
    """What is wrong with the user's data becomes a mistake of one line.

    Raises:
        ConfigError: Something was wrong.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(one_line(error)) from error


def _data_alone(data: L.LightningDataModule, seed: int) -> None:
    """What a configuration of nothing but data is checked against."""
