"""The exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging


class EMA(EMAWeightAveraging):
    """Validate, test and keep the moving average of the weights, and train on with the weights themselves.

    Buffers (statistics of BatchNorm, constants) are those of the newest weights. Lightning's own callback would also
    put the weights themselves back when a checkpoint is loaded to be tested.

    Args:
        decay: Share of the average that is kept at each step.
        update_starting_at_step: Optimizer step at which averaging begins.

    Raises:
        ValueError: ``decay`` is not a share.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; Lightning's
    ``EMAWeightAveraging``.
    """

    def __init__(self, decay: float = 0.999, *, update_starting_at_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"callback.ema.decay={decay} is not a share in [0, 1); try 0.999")
        super().__init__(decay=decay, update_starting_at_step=update_starting_at_step or None, use_buffers=False)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the weights themselves only where training goes on."""
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
