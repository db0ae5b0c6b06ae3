"""Hooks of modules and callbacks that were written for Lightning 1: they would fail within training, or after it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.config.errors import ConfigError

OF_EPOCH = {"training": "train", "validation": "validation", "test": "test"}  # by the hook of Lightning 1: of 2


def check_hooks(task: L.LightningModule, callbacks: Mapping[str, Callback], *, tests: bool) -> None:
    """Check that Lightning calls the hooks of the task and the callbacks, with the arguments that they take.

    Args:
        task: The task.
        callbacks: Callbacks by their name in the configuration.
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
    _check_arguments("task", task, L.LightningModule)
    for key, callback in callbacks.items():
        _check_arguments(f"callback.{key}", callback, Callback)


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
