"""Errors of strategies and precision plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L

from boltcutter.topology import PlannedTraining, Refuses


class StrategyError(RuntimeError):
    """The strategy does not support the model or a setting, or a rank that it started has failed.

    Args:
        text: The message.
        original: Class of the error of that rank, which ``record.json`` names.
    """

    hide_traceback = True

    def __init__(self, text: str, original: str = "StrategyError") -> None:
        super().__init__(text)
        self.original = original


def raise_refusals(part: Refuses, trainer: L.Trainer, task: Any) -> None:
    """Raise the first of them, in a training that was not checked before.

    Raises:
        StrategyError: The strategy or precision does not support the training.
    """
    for text in part.refuses_training(PlannedTraining.of(trainer, task, getattr(trainer, "datamodule", None))):
        raise StrategyError(text)


def why_not(check: Callable[..., Any] | None, *arguments: Any) -> Iterator[str]:
    """The message of the error that a check raises, if any."""
    try:
        if check is not None:
            check(*arguments)
    except (StrategyError, ValueError) as error:
        yield str(error)
