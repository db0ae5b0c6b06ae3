"""Metrics of a MetricCollection that each keep their own state."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

from boltcutter.task.metric_states import separate


class SeparateMetrics(Callback):
    """Let no metrics share a state because theirs were equal once.

    A ``MetricCollection`` compares the states of its metrics after their first update, which is of the sanity check,
    and updates only one of those that are equal. Accuracy over all classes and over all but one are equal as long as no
    sample of that class was seen; then one has the values of the other. ``compute_groups=[[...]]``, which names the
    metrics that share a state, is kept.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Separate those of the module and of callbacks, before the sanity check."""
        found: list[Any] = [pl_module]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            found += [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for module in found:
            separate(module)

    on_train_start = on_validation_start = on_test_start = on_fit_start  # hooks before them may create metrics
