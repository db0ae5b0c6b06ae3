"""Mistakes in how trainer, data and task are combined, which Lightning would report only later, or not at all."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint
from torch import nn

from boltcutter.callback.checkpoint import BestCheckpoint, LastCheckpoint
from boltcutter.callback.guard import Guard
from boltcutter.callback.reseed import Reseed
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checks.components import check_monitors
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.locate import parameters
from boltcutter.config.refusals import name_setting
from boltcutter.config.settings import Settings
from boltcutter.config.values import flatten, format_value
from boltcutter.environment.process import is_rank_zero
from boltcutter.internals import BatchNorm
from boltcutter.protocols import NativeTask, handles_signals
from boltcutter.run.metrics import infer_mode
from boltcutter.topology import PlannedTraining


def check_combination(
    cfg: Settings,
    trainer: L.Trainer,
    task: L.LightningModule,
    data: L.LightningDataModule | None,
    callbacks: Mapping[str, Callback] | None,
) -> None:
    """Check trainer and task, and print what a training without some callbacks gives up.

    Args:
        cfg: The configuration that they were built from.
        trainer: With all callbacks.
        task: Any LightningModule.
        data: Any data module; None: the task has its own loaders.
        callbacks: Callbacks of the configuration, by name; None if they were not built.
    """
    check_sync_batchnorm(cfg, trainer, task)
    if callbacks is not None:
        check_support(PlannedTraining.of(trainer, task, data))
    check_num_classes(cfg)
    if callbacks is not None:
        report_missing(cfg, trainer)
    check_monitors(task, callbacks or {})
    check_optimizer(task)
    if callbacks is not None:
        report_unusual(cfg, trainer, callbacks)


def check_support(planned: PlannedTraining) -> None:
    """Check that strategy, precision and task support the training, before there are ranks."""
    if refused := planned.refusals():
        raise ConfigError(*refused)


def check_sync_batchnorm(cfg: Settings, trainer: L.Trainer, task: nn.Module) -> None:
    """Check that BatchNorm is synchronized on GPUs, as torch requires, and by a strategy that does so."""
    strategy, has_layers = trainer.strategy, any(isinstance(module, BatchNorm) for module in task.modules())
    if not (cfg.trainer.get("sync_batchnorm") and has_layers):
        return
    if strategy.root_device.type == "cpu":
        raise ConfigError("trainer.sync_batchnorm=true: torch synchronizes BatchNorm only on GPUs; set it to false")
    kinds = strategies.DDPStrategy | strategies.FSDPStrategy | strategies.ModelParallelStrategy
    is_parallel = isinstance(strategy, strategies.ParallelStrategy)
    if isinstance(strategy, strategies.DeepSpeedStrategy) or (is_parallel and not isinstance(strategy, kinds)):
        raise ConfigError(
            f"trainer.sync_batchnorm=true: {type(strategy).__name__} does not synchronize BatchNorm; set it to false, "
            "or use trainer=ddp"
        )


def check_kind(cfg: Settings, task: object, data: L.LightningDataModule | None) -> None:
    """Check that the task, or its class, and the data have the same kind, such as classification."""
    expected, actual = str(getattr(task, "kind", None)), str(getattr(data, "kind", None))
    options = {"classification": "classification", "regression": "regression", "language_modeling": "language"}
    if expected in options and actual in options and expected != actual:  # other classes may use `kind` differently
        raise ConfigError(
            f"task={cfg.choices['task']} expects {expected} data, but data={cfg.choices['data']} is {actual} data; "
            f"try task={options[actual]}{f' or data.kind={expected}' if 'kind' in cfg.data else ''}"
        )


def check_num_classes(cfg: Settings) -> None:
    """Check that ``num_classes`` of each metric equals that of the data."""
    num_classes, metrics = cfg.data.get("num_classes"), cfg.task.get("metrics")
    for name, metric in (metrics if isinstance(metrics, dict) else {}).items():
        classes = metric.get("num_classes") if isinstance(metric, dict) else None
        if isinstance(num_classes, int) and isinstance(classes, int) and classes != num_classes:
            key = f"task.metrics.{name!s}.num_classes"
            raise ConfigError(
                f"{key}={classes}, but data.num_classes={num_classes}; set {key}={num_classes}, or remove it"
            )


def report_unusual(cfg: Settings, trainer: L.Trainer, callbacks: Mapping[str, Callback]) -> None:
    """Print which settings train nothing, or take the worst as the best; once where one refers to another.

    Raises:
        ConfigError: The patience of early stopping is negative, or two callbacks save to the same file.
    """
    files = dict[tuple[Any, str], str]()
    zeros = [key for key in ("max_epochs", "max_steps") if getattr(trainer, key) == 0]
    found = [f"trainer.{key}=0: nothing is trained, and the initial weights are tested; set it to 1" for key in zeros]
    references = {key for key, raw in flatten(cfg.written) if key.startswith("callback.") and "${" in str(raw)}
    paths, reported = {f"callback.{name}": callback for name, callback in callbacks.items()}, set[tuple[Any, Any]]()
    for path, callback in sorted(paths.items(), key=lambda item: f"{item[0]}.mode" in references):
        if isinstance(callback, EarlyStopping) and callback.patience < 0:
            raise ConfigError(f"{path}.patience={callback.patience} is negative; try 5, or set {path}=null to go on")
        if isinstance(callback, ModelCheckpoint) and callback.save_top_k and (name := callback.filename):
            other = files.get(place := (callback.dirpath, name), path)
            # Lightning's own class gives another name to a file that is there.
            if other != path and any(isinstance(paths[one], BestCheckpoint | LastCheckpoint) for one in (path, other)):
                raise ConfigError(f"{path}.filename={name}: {other} saves to the same file; give them different names")
            files[place] = path
        mode, metric = getattr(callback, "mode", None), getattr(callback, "monitor", None)
        better = infer_mode(metric) if metric and mode in ("min", "max") else None
        is_repeated = f"{path}.mode" in references and (metric, mode) in reported
        if better not in (None, mode) and not is_repeated:
            reported.add((metric, mode))
            kind = "smallest" if mode == "min" else "largest"
            found.append(f"{path}.mode={mode}: the {kind} {metric} counts as best; set {path}.mode={better}")
    if is_rank_zero():
        print("".join(f"warning: {text}\n" for text in found), end="", file=sys.stderr)


def _can_be_called(make: Callable[..., Any], argument: Any) -> bool:
    """Whether ``make`` needs no further argument; a module may pass more."""
    try:
        inspect.signature(make).bind(argument)
    except TypeError:
        return False
    return True


def check_optimizer(task: L.LightningModule) -> None:
    """Check the values of optimizer and scheduler by instantiating them for a dummy parameter."""
    argument: Any = [nn.Parameter(torch.zeros(1))]
    for name in ("optimizer", "scheduler"):
        make = inspect.getattr_static(task, name, None)  # no property is evaluated
        if not isinstance(make, partial) or not (isinstance(task, NativeTask) or _can_be_called(make, argument)):
            return
        needs_steps = "total_steps" in parameters(make.func) and make.keywords.get("total_steps") is None
        for key, value in make.keywords.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name}.{key}={format_value(value)} is not finite; correct it, or remove it")
        if name == "optimizer" and (momentum := make.keywords.get("momentum") or 0) >= 1:
            raise ConfigError(f"optimizer.momentum={momentum} is not in [0, 1), so no step is forgotten; try 0.9")
        try:
            argument = make(argument, **({"total_steps": 100} if needs_steps else {}))
        except (ValueError, TypeError, RuntimeError) as error:
            text = one_line(error)
            named = text if text.startswith(f"{name}.") else name_setting(name, make.func, make.keywords, text)
            raise ConfigError(named) from error


def report_missing(cfg: Settings, trainer: L.Trainer) -> None:
    """Print what the run gives up, in its first lines."""
    if not is_rank_zero():
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    picked = str(cfg.choices.get("callback"))
    missing = {
        "preemption": (handles_signals(callbacks), "Ctrl-C and the signals of clusters end the run without saving"),
        "reseed": (_has(Reseed, callbacks), "a resumed run draws other random numbers"),
        "guard": (_has(Guard, callbacks), "non-finite gradients do not stop training"),
    }
    if lost := {name: text for name, (is_there, text) in missing.items() if not is_there}:
        told = "; ".join(f"without callback.{name}, {text}" for name, text in lost.items())
        print(f"note: callback={picked}: {told}; {_remedy(cfg, list(lost))}")
    if not _has(Checkpoint, callbacks):
        if callbacks and "default" not in picked.split("+"):
            text = "no callback saves checkpoints, so the run cannot be resumed or evaluated"
            print(f"warning: callback={picked}: {text}; {_remedy(cfg, ['last'])}", file=sys.stderr)
    elif not _is_atomic(trainer.strategy.checkpoint_io):
        remedy = f"write 'defaults: default' or 'plugins: [${{checkpoint_io}}]' in trainer={cfg.choices.get('trainer')}"
        given = "trainer.plugins has no ${checkpoint_io}"
        print(f"note: {given}, so a process that is killed while it saves can damage a checkpoint; {remedy}")


def _has(kind: type[Callback], callbacks: list[Callback]) -> bool:
    return any(_is_a(kind, callback) for callback in callbacks)


def _is_a(kind: type, value: object) -> bool:
    """Whether a value is of a class, or of its copy in a project, which differs by the name of the package only."""
    names = {(cls.__module__.partition(".")[2], cls.__qualname__) for cls in type(value).__mro__}
    return (kind.__module__.partition(".")[2], kind.__qualname__) in names


def _is_atomic(writer: object) -> bool:
    """Whether checkpoints are written atomically, also if other plugins wrap the one that writes."""
    inner = getattr(writer, "checkpoint_io", None)
    return _is_a(AtomicCheckpointIO, writer) or (inner is not None and _is_atomic(inner))


def _remedy(cfg: Settings, names: list[str]) -> str:
    picked, given = str(cfg.choices.get("callback")), cfg.callback or {}
    if all(name in given for name in names):
        return f"remove {', '.join(f'callback.{name}=null' for name in names)}"
    if "default" in picked.split("+"):
        return "write 'defaults: default' in your callback/default.yaml"
    return (
        "callback=default has them" if picked == "none" else f"add it by callback=[default,{picked.replace('+', ',')}]"
    )
