"""Report monitored metrics that are NaN, by which no checkpoint is the best, and no callback stops training."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar


class MonitoredValues(Callback):
    """Print a line when a metric that a callback or scheduler monitors is NaN or infinite, and one at the end.

    Values are read after each validation and epoch, when callbacks read them as well.
    """

    def __init__(self) -> None:
        self._readings: dict[str, dict[int, bool]] = {}  # whether each metric was finite, by step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin anew."""
        self._readings.clear()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the metrics of a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the metrics of training."""
        self._check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how often a metric was NaN."""
        for metric, readings in self._readings.items() if trainer.is_global_zero else ():
            count = len(readings) - sum(readings.values())
            if readings and count == len(readings):
                _warn(f"{metric} was never finite, so by it no checkpoint is the best; the last one is used")
            elif count > 1:
                _warn(f"{metric} was not finite in {count} of {len(readings)} evaluations")

    def _check(self, trainer: L.Trainer) -> None:
        for metric, owner in _monitored(trainer):
            value, readings = trainer.callback_metrics.get(metric), self._readings.setdefault(metric, {})
            if value is None:
                continue
            number, is_first = float(value), all(readings.values())
            readings[trainer.global_step] = math.isfinite(number)  # at the end of an epoch, in place of an older value
            if is_first and not math.isfinite(number) and trainer.is_global_zero:
                _warn(
                    f"{metric}={number} after {trainer.global_step:,} steps, which {owner} monitors: it does not count "
                    "as an improvement; correct how it is computed, or monitor another metric"
                )


def _monitored(trainer: L.Trainer) -> Iterator[tuple[str, str]]:
    """Each metric that is monitored, with the class of what monitors it."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        is_used = getattr(callback, "save_top_k", True) and not isinstance(callback, ProgressBar)
        if is_used and isinstance(getattr(callback, "monitor", None), str):
            yield callback.monitor, type(callback).__name__
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor:
            yield config.monitor, type(config.scheduler).__name__


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
