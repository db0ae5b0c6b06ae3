"""Learning rates in the loggers, also if an optimizer has none."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_info

HOOKS = ("on_train_batch_start", "on_train_epoch_start")


class LearningRates(LearningRateMonitor):
    """Lightning's ``LearningRateMonitor``, which logs nothing where an optimizer has no setting ``lr``."""

    def on_train_start(self, trainer: L.Trainer, *args: Any, **options: Any) -> None:
        """Find names, and whether all optimizers have a learning rate."""
        super().on_train_start(trainer, *args, **options)
        for hook in HOOKS:
            vars(self).pop(hook, None)
        for optimizer in trainer.optimizers:
            if any("lr" not in group for group in optimizer.param_groups):
                rank_zero_info(f"callback.learning_rate: {type(optimizer).__name__} has no lr, so none is logged")
                vars(self).update(dict.fromkeys(HOOKS))  # Lightning skips hooks that are not callable
