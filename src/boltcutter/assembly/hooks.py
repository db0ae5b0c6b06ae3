"""Hooks of modules and callbacks that were written for Lightning 1: they would fail within training, or after it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from boltcutter.config.errors import ConfigError

OF_EPOCH = {"training": "train", "validation": "validation", "test": "test"}  # by the hook of Lightning 1: of 2
REMOVED = {  # hooks of Lightning 1 that Lightning 2 does not even refuse, with what they become
    "on_epoch_start": "on_train_epoch_start, or that of another stage",
    "on_epoch_end": "on_train_epoch_end, or that of another stage",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "training_step_end": "on_train_batch_end",
    "validation_step_end": "on_validation_batch_end",
    "test_step_end": "on_test_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_train_dataloader": "setup",
    "on_init_end": "setup",
    "on_keyboard_interrupt": "on_exception",
}


def check_hooks(task: L.LightningModule, callbacks: Mapping[str, Callback], *, tests: bool) -> None:
    """Check that Lightning calls the hooks of the task and the callbacks, with the arguments that they take.

    A hook of Lightning 1 that no method of theirs calls is a warning, if Lightning 2 takes it for a method like others.

    Args:
        task: The task.
        callbacks: Callbacks by their setting.
        tests: Whether the run tests, and so calls the hooks of a test.

    Raises:
        ConfigError: A hook is one of Lightning 1, or takes what Lightning 2 does not pass.
    """
    name = type(task).__name__
    for stage, new in OF_EPOCH.items():
        if callable(getattr(task, f"{stage}_epoch_end", None)) and (tests or stage != "test"):
            raise ConfigError(
                f"task: {name}.{stage}_epoch_end is a hook of Lightning 1, which Lightning 2 does not call; rename it "
                f"to on_{new}_epoch_end, and keep the outputs of steps in an attribute"
            )
    owners: list[tuple[str, Any, type]] = [("task", task, L.LightningModule)]
    owners += [(setting, callback, Callback) for setting, callback in callbacks.items()]
    classes = {cls for _, owner, base in owners for cls in type(owner).__mro__ if cls not in base.__mro__}
    methods = [method for cls in classes for method in vars(cls).values() if isinstance(method, types.FunctionType)]
    called = {called for method in methods for called in method.__code__.co_names}
    for setting, owner, base in owners:
        _check_arguments(setting, owner, base)
        for old in [old for old in REMOVED if old not in called and callable(getattr(owner, old, None))]:
            rank_zero_warn(
                f"{setting}: {type(owner).__name__}.{old} is a hook of Lightning 1, which Lightning 2 does not call; "
                f"rename it to {REMOVED[old]}"
            )


def _check_arguments(setting: str, owner: Any, base: type) -> None:
    for name, original in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith(("on_", "optimizer_", "configure_gradient", "lr_scheduler_")):
            continue
        hook = getattr(owner, name)
        if (getattr(type(owner), name, None) is original and name not in vars(owner)) or not callable(hook):
            continue
        passed = list(inspect.signature(original).parameters)[1:]
        if extra := _not_passed(hook, passed):
            raise ConfigError(
                f"{setting}: {type(owner).__name__}.{name} takes {', '.join(extra)}, as in Lightning 1, which "
                f"Lightning 2 does not pass; its parameters are: {', '.join(passed) or 'none'}"
            )


def _not_passed(hook: Any, passed: list[str]) -> list[str]:
    """Parameters that a hook requires beyond the most that it may get; empty if there are none."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each.name for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    unknown = [name for name in required if name not in passed]
    return (unknown or required[len(passed) :]) if len(required) > len(passed) else []
