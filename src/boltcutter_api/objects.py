"""Objects that were built in Python in place of parts of the configuration, which names the functions below."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)

from boltcutter.config.errors import ConfigError
from boltcutter.config.values import format_value
from boltcutter.project import BUILTIN_CONFIGS

PLAIN = (str, int, float, bool, type(None))
STEPS = ("max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "log_every_n_steps")
RECORDED = (*STEPS, "gradient_clip_val", "precision", "num_nodes")  # arguments of a trainer that was built by hand
_objects: dict[str, Any] = {}


class Loaders(L.LightningDataModule):
    """Dataloaders as a data module.

    Args:
        loaders: Loaders by split: ``train``, ``val``, ``test`` and ``predict``.
    """

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        super().__init__()
        for split, loader in loaders.items():
            setattr(self, f"{split}_dataloader", lambda loader=loader: loader)


def task(built_in_python: str) -> L.LightningModule:
    """Return the task that was passed to ``boltcutter.train``."""
    found: L.LightningModule = _get("task", built_in_python)
    return found


def data(built_in_python: str) -> L.LightningDataModule:
    """Return the data module that was passed to ``boltcutter.train``."""
    found: L.LightningDataModule = _get("data", built_in_python)
    return found


def trainer(built_in_python: str, checkpoint_io: Any, **arguments: Any) -> L.Trainer:
    """Return the trainer that was passed to ``boltcutter.train`` with the callbacks, loggers and plugins of a run."""
    given = _get("trainer", built_in_python)
    arguments["plugins"] = [checkpoint_io]
    if not isinstance(given, L.Trainer):
        joined = {
            key: [*arguments[key], *_as_list(given[key])] for key in ("callbacks", "logger", "plugins") if key in given
        }
        return L.Trainer(**{**arguments, **given, **joined})
    own = [
        callback
        for callback in given.callbacks  # type: ignore[attr-defined]
        if not isinstance(callback, ProgressBar | ModelSummary)
        and not (type(callback) is ModelCheckpoint and callback.monitor is callback.dirpath is None)  # the default
    ]
    given.callbacks = sorted([*own, *arguments["callbacks"]], key=_order)  # type: ignore[attr-defined]
    given.loggers = [*arguments["logger"], *(logger for logger in given.loggers if logger.name != "lightning_logs")]
    given.strategy.checkpoint_io = checkpoint_io
    return given


@contextmanager
def registered(objects: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Register objects while a run is trained, and return the overrides that refer to them.

    Args:
        objects: ``task``, ``data`` and ``trainer``.
        settings: Arguments of the trainer, and settings of the run such as ``resume``.

    Raises:
        ConfigError: An object has the wrong type.
    """
    given = {**objects, "data": _as_data(objects["data"]), "trainer": objects["trainer"]}
    check_task(given["task"])
    names = inspect.signature(L.Trainer).parameters
    arguments = {key: value for key, value in settings.items() if key in names}
    if isinstance(given["trainer"], Mapping):
        arguments, given["trainer"] = {**given["trainer"], **arguments}, None
    if given["trainer"] is None:
        given["trainer"] = {key: value for key, value in arguments.items() if not isinstance(value, PLAIN)}
        plain = {key: value for key, value in arguments.items() if isinstance(value, PLAIN)}
    elif isinstance(given["trainer"], L.Trainer):
        if arguments:
            raise ConfigError(f"{next(iter(arguments))}: set it in the trainer that is passed as trainer=")
        if vars(given["trainer"]).setdefault("_boltcutter", False):
            raise ConfigError("trainer: it has trained a run already; pass a new L.Trainer, or its arguments")
        vars(given["trainer"])["_boltcutter"] = True
        plain = {key: getattr(given["trainer"], key) for key in RECORDED} | {"devices": given["trainer"].num_devices}
    else:
        raise ConfigError(f"trainer: expected an L.Trainer or a dict of its arguments, got {_name(given['trainer'])}")
    overrides = [f"{key}={format_value(value)}" for key, value in settings.items() if key not in names]
    if "resume" not in settings:
        for part in ("task", "data"):
            overrides += [f"~{part}"] if given[part] is None else _replace(part, given[part])
        overrides += [] if "name" in settings else [f"name={type(given['task']).__name__.lower()}"]
    if given["trainer"]:
        overrides += [f"trainer._target_={__name__}.trainer"]
        plain = _default_arguments() | plain | {"built_in_python": _name(given["trainer"])}
    overrides += [f"++trainer.{key}={format_value(value)}" for key, value in plain.items()]
    _objects.update(given)
    try:
        yield overrides
    finally:
        _objects.clear()


@contextmanager
def lent(objects: Mapping[str, Any]) -> Iterator[None]:
    """Register the objects into which the weights of a run are loaded, if there are any."""
    if objects["task"] is not None:
        check_task(objects["task"])
        _objects.update(objects, data=_as_data(objects["data"]), trainer={})
    try:
        yield
    finally:
        _objects.clear()


def to_device(task: L.LightningModule, device: str) -> L.LightningModule:
    """Move a task to a device.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        return task.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={device}: {str(error).splitlines()[0]}; try device=cpu") from error


def check_task(task: Any) -> None:
    """Check that a task is a LightningModule.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(task, L.LightningModule):
        raise ConfigError(
            f"task: expected a LightningModule, got {_name(task)}; for a network, pass for example "
            "task=boltcutter.Classification(model=…, optimizer=…)"
        )


def _order(callback: Any) -> int:
    """The order in which Lightning calls callbacks: those that save last, since others change what they save."""
    return isinstance(callback, Checkpoint) - isinstance(callback, BatchSizeFinder | LearningRateFinder)


def _get(part: str, name: str) -> Any:
    if part not in _objects:
        raise ConfigError(
            f"{part}: {name} was built in Python, not from a configuration; call boltcutter.load(run, task=…, "
            "data=…) for its weights, or boltcutter.train(task=…, data=…, resume=run) to continue"
        )
    found = _objects[part]
    if part != "trainer" and _name(found) != name:
        raise ConfigError(f"{part}: the run was trained with {name}, got {_name(found)}; pass the same class")
    return found


def _as_data(data: Any) -> L.LightningDataModule | None:
    """A data module as it is; a loader, a tuple of train, val and test loaders, or a dictionary as a data module.

    Raises:
        ConfigError: It is none of these.
    """
    if data is None or isinstance(data, L.LightningDataModule):
        return data
    if isinstance(data, str | bytes | type) or not hasattr(data, "__iter__"):
        raise ConfigError(f"data: expected a LightningDataModule or dataloaders, got {_name(data)}")
    if not isinstance(data, Mapping):
        data = dict(zip(("train", "val", "test"), data if isinstance(data, list | tuple) else [data], strict=False))
    if unknown := data.keys() - {"train", "val", "test", "predict"}:
        raise ConfigError(f"data: {', '.join(map(str, unknown))}: no such split; use train, val, test and predict")
    return Loaders(data)


def _default_arguments() -> dict[str, Any]:
    """The arguments of ``trainer=default``, which another ``_target_`` would lose."""
    read: dict[str, Any] = yaml.safe_load((BUILTIN_CONFIGS / "trainer" / "default.yaml").read_text())
    given = {key: value for key, value in read.items() if key not in ("_target_", "plugins", "num_nodes")}
    return given | {"checkpoint_io": "${checkpoint_io}"}


def _replace(part: str, value: Any) -> list[str]:
    return [f"~{part}", f"+{part}._target_={__name__}.{part}", f"+{part}.built_in_python={_name(value)}"]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
