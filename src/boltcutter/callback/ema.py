"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


class EMA(WeightAveraging):
    """Validate, test and save the exponential moving average of the weights, while training continues with the weights.

    Buffers (BatchNorm statistics, constants) are those of the current weights. Unlike Lightning's callback, loading a
    checkpoint for a test does not restore the current weights in place of the average, and the decay warms up.

    Args:
        decay: Decay of the average per step, in [0, 1). After t updates it is at most (1 + t) / (10 + t), so that the
            initial weights are soon forgotten.
        update_starting_at_step: Optimizer step at which averaging begins.

    Raises:
        ValueError: ``decay`` is not in [0, 1).

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; TensorFlow's
    ``ExponentialMovingAverage`` for the warmup.
    """

    def __init__(self, decay: float = 0.999, *, update_starting_at_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"callback.ema.decay={decay} is not in [0, 1); try 0.999")
        self.update_starting_at_step = update_starting_at_step

        def average(averaged: Tensor, current: Tensor, num_averaged: Tensor) -> Tensor:
            warmed_up = ((1 + num_averaged) / (10 + num_averaged)).clamp(max=decay)
            return averaged + (1 - warmed_up) * (current - averaged)

        super().__init__(use_buffers=False, avg_fn=average)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the average is updated after this optimizer step."""
        return step_idx is not None and step_idx >= self.update_starting_at_step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the current weights only if training resumes."""
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
