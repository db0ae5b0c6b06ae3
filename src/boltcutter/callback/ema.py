"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging


class EMA(EMAWeightAveraging):
    """Validate, test and save the exponential moving average of the weights, while training continues with the weights.

    Buffers (BatchNorm statistics, constants) are those of the current weights. Unlike Lightning's callback, loading a
    checkpoint for a test does not restore the current weights in place of the average.

    Args:
        decay: Decay of the average per step, in [0, 1).
        update_starting_at_step: Optimizer step at which averaging begins.

    Raises:
        ValueError: ``decay`` is not in [0, 1).

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; Lightning's
    ``EMAWeightAveraging``.
    """

    def __init__(self, decay: float = 0.999, *, update_starting_at_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"callback.ema.decay={decay} is not in [0, 1); try 0.999")
        super().__init__(decay=decay, update_starting_at_step=update_starting_at_step or None, use_buffers=False)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the current weights only if training resumes."""
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
