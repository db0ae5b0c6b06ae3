"""Objects that were built in Python in place of parts of the configuration, which names the functions below."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
from lightning.pytorch.utilities.compile import from_compiled
from torch import is_tensor

from boltcutter.config.errors import ConfigError
from boltcutter.config.values import format_value
from boltcutter.internals import has_checkpoint_io
from boltcutter.project import BUILTIN_CONFIGS

STEPS = ("max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "log_every_n_steps")
RECORDED = (*STEPS, "gradient_clip_val", "precision", "num_nodes")  # arguments of a trainer that was built by hand
_objects: dict[str, Any] = {}


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
    found: L.Trainer | None = _get("trainer", built_in_python)
    if found is None:  # the weights of its run are loaded
        return L.Trainer(**arguments, plugins=[checkpoint_io])
    own = [
        callback
        for callback in found.callbacks  # type: ignore[attr-defined]
        if not isinstance(callback, ProgressBar | ModelSummary) and not _is_default_checkpoint(callback)
    ]
    found.callbacks = sorted([*own, *arguments["callbacks"]], key=_order)  # type: ignore[attr-defined]
    given = [logger for logger in found.loggers if not _is_default_logger(logger, found)]
    found.loggers = [*arguments["logger"], *given]
    if not has_checkpoint_io(found.strategy):
        found.strategy.checkpoint_io = checkpoint_io
    return found


@contextmanager
def registered(task: Any, data: Any, trainer: Any, overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Register objects while a run is trained, and return its overrides with those that refer to the objects.

    Raises:
        ConfigError: An object has the wrong type, or was used before.
    """
    task = checked(task, data)
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    more: list[str] = []
    if "resume" not in keys:
        for part, value in (("task", task), ("data", data)):
            more += [f"~{part}"] if value is None else _replace(part, value)
        more += [] if "name" in keys else [f"name={type(task).__name__.lower()}"]
    if trainer is not None:
        if not isinstance(trainer, L.Trainer):
            raise ConfigError(
                f"trainer: expected an L.Trainer, got {_name(trainer)}; pass its arguments as overrides",
                kind="wrong_type",
            )
        if key := next((key for key in keys if key.partition(".")[0] == "trainer"), None):
            raise ConfigError(f"{key}: set it in the trainer that is passed as trainer=")
        if vars(trainer).setdefault("_boltcutter", False):
            raise ConfigError("trainer: it has trained a run already; pass a new L.Trainer")
        vars(trainer)["_boltcutter"] = True
        recorded = {key: getattr(trainer, key) for key in RECORDED} | {"devices": trainer.num_devices}
        recorded = _default_arguments() | recorded | {"built_in_python": _name(trainer)}
        more += [f"trainer._target_={__name__}.trainer"]
        more += [f"++trainer.{key}={format_value(value)}" for key, value in recorded.items()]
    _objects.update(task=task, data=data, trainer=trainer)
    try:
        yield (*more, *overrides)
    finally:
        _objects.clear()


@contextmanager
def lent(task: Any, data: Any) -> Iterator[None]:
    """Register the objects into which the weights of a run are loaded, if there are any."""
    if task is not None:
        _objects.update(task=checked(task, data), data=data, trainer=None)
    try:
        yield
    finally:
        _objects.clear()


def checked(task: Any, data: Any) -> L.LightningModule:
    """Return a task, of what ``torch.compile`` made of one the module with compiled steps, as Lightning does.

    Raises:
        ConfigError: The task is no LightningModule, or its data module is none.
    """
    if isinstance(getattr(task, "_orig_mod", None), L.LightningModule):
        task = from_compiled(task)
    if not isinstance(task, L.LightningModule):
        raise ConfigError(
            f"task: expected a LightningModule, got {_name(task)}; for a network, pass for example "
            "task=boltcutter.Classification(model=…, optimizer=…)",
            kind="wrong_type",
        )
    if not isinstance(data, L.LightningDataModule | None):
        raise ConfigError(
            f"data: expected a LightningDataModule, got {_name(data)}; try its from_datasets(…)", kind="wrong_type"
        )
    return task


def _is_default_checkpoint(callback: Any) -> bool:
    """Whether a callback is the one that Lightning creates where a trainer is given none that saves."""
    if type(callback) is not ModelCheckpoint:
        return False
    given, default = ({k: v for k, v in vars(c).items() if not is_tensor(v)} for c in (callback, ModelCheckpoint()))
    return given == default


def _is_default_logger(logger: Any, trainer: L.Trainer) -> bool:
    """Whether a logger is the one that Lightning creates where a trainer is given none."""
    is_there = os.path.abspath(logger.save_dir or ".") == os.path.abspath(trainer.default_root_dir)
    return bool(logger.name == "lightning_logs" and is_there)


def _order(callback: Any) -> int:
    """The order in which Lightning calls callbacks: those that save last, since others change what they save."""
    return isinstance(callback, Checkpoint) - isinstance(callback, BatchSizeFinder | LearningRateFinder)


def _get(part: str, name: str) -> Any:
    if part not in _objects:
        raise ConfigError(
            f"{part}: {name} was built in Python, not from a configuration; call boltcutter.load(run, task=…, "
            "data=…) for its weights, or boltcutter.train('resume=<run>', task=…, data=…) to continue"
        )
    found = _objects[part]
    if part != "trainer" and _name(found) != name:
        raise ConfigError(f"{part}: the run was trained with {name}, got {_name(found)}; pass the same class")
    return found


def _default_arguments() -> dict[str, Any]:
    """The arguments of ``trainer=default``, which another ``_target_`` would lose."""
    read: dict[str, Any] = yaml.safe_load((BUILTIN_CONFIGS / "trainer" / "default.yaml").read_text())
    given = {key: value for key, value in read.items() if key not in ("_target_", "plugins", "num_nodes")}
    return given | {"checkpoint_io": "${checkpoint_io}"}


def _replace(part: str, value: Any) -> list[str]:
    return [f"~{part}", f"+{part}._target_={__name__}.{part}", f"+{part}.built_in_python={_name(value)}"]


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
