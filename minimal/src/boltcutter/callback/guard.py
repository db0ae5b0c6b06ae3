"""Stop before a number that is none reaches the weights."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class NonFinite(RuntimeError):
    """A gradient is infinite or not a number; the weights are still those of the step before."""

    explains_itself = True  # needs no traceback


class Guard(Callback):
    """Looks at the gradient before each optimizer step. It is the same on all ranks by then, so all stop together."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Stop where the weights are still whole.

        Raises:
            NonFinite: The gradient is not finite.
        """
        if getattr(trainer.precision_plugin, "scaler", None):
            return  # with 16-mixed an overflow is daily bread, and the scaler passes over it
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        if get_total_norm(gradients.values()).isfinite():
            return
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        raise NonFinite(
            f"the gradient of {', '.join(bad[:3]) or 'all together'} is not finite at epoch {trainer.current_epoch}, "
            f"batch {trainer.fit_loop.epoch_loop.batch_idx}; the weights are those of step {trainer.global_step}: "
            "lower optimizer.lr or trainer.gradient_clip_val"
        )
