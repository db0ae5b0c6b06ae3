"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


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
        self.decay, self.update_starting_at_step = decay, update_starting_at_step
        self._num_averaged = 0  # on the host, as reading the buffer would wait for the device
        super().__init__(use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the average is updated after this optimizer step."""
        return step_idx is not None and step_idx >= self.update_starting_at_step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the number of updates, which a resumed run continues."""
        self._num_averaged = int(self._average_model.n_averaged) if self._average_model else 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average after an optimizer step, all weights at once and without waiting for the device."""
        model, step = self._average_model, trainer.global_step
        if model is None or step <= self._latest_update_step or not self.should_update(step - 1):
            return
        count = self._num_averaged
        update: Any = get_ema_multi_avg_fn(min(self.decay, (1 + count) / (10 + count)) if count else 0.0)  # type: ignore[no-untyped-call]
        update([*model.module.parameters()], [*pl_module.parameters()], count)
        if buffers := [*model.module.buffers()]:
            torch._foreach_copy_(buffers, [*pl_module.buffers()])
        model.n_averaged += 1
        self._num_averaged, self._latest_update_step = count + 1, step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the current weights only if training resumes."""
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
