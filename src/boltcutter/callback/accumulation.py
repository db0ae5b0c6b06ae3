"""The mean of the gradients of the last accumulated batches of an epoch, of which there may be fewer."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer


class MeanOfAccumulated(Callback):
    """Let the last step of an epoch use the mean of its batches, where it has fewer than ``accumulate_grad_batches``.

    Lightning divides each loss by ``accumulate_grad_batches``, so the gradients of 2 of 4 batches would be half of
    their mean. They are scaled before clipping, and after all of them are known, so this also holds for streams of
    unknown length, for any loss, and for a run that is resumed between the batches. All ranks scale alike.
    ``callback.accumulation=null`` gives Lightning's sum.
    """

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Scale gradients that are the sum of fewer batches."""
        if (count := trainer.accumulate_grad_batches) == 1:
            return
        accumulated = trainer.fit_loop.epoch_loop.batch_progress.current.ready % count
        if accumulated:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(count / accumulated)

    def refuses_capture(self, optimizer: Optimizer) -> str | None:
        """Nothing does: a step of fewer batches is not replayed."""
        return None

    def after_replay(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Do nothing."""
