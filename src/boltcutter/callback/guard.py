"""Stop before a number that is none reaches the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer


class NonFinite(RuntimeError):
    """A gradient is infinite or not a number; the weights are still those of the step before."""

    explains_itself = True  # needs no traceback


class Guard(Callback):
    """Look at the gradient before each optimizer step; stop, or pass over the step, when it is not finite.

    Gradients are the same on all ranks by then, so all of them stop at the same step, and none waits for another.
    With a gradient scaler (``16-mixed``) an overflow is daily bread, which the scaler itself passes over.

    Args:
        folder: Where the batch that did it is kept, as ``nonfinite-rank-<n>.pt``.
        skip: Steps in a row that are passed over before training stops.
        keep_batch: Whether to keep the batch.
    """

    def __init__(self, folder: Path, *, skip: int = 0, keep_batch: bool = True) -> None:
        if skip < 0:
            raise ValueError(f"callback.guard.skip={skip} is not a number of steps; try 0")
        self.folder, self.skip, self.keep_batch = Path(folder), skip, keep_batch
        self.skipped = 0
        self._batch: Any = None
        self._batch_idx = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch; no copy is made."""
        self._batch, self._batch_idx = batch, batch_idx

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Stop here, where the weights are still whole.

        Raises:
            NonFinite: The gradient is not finite, and not for the first few times.
        """
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients or bool(torch.stack(torch._foreach_norm(gradients)).sum().isfinite()):
            self.skipped = 0
            return
        bad = [n for n, p in pl_module.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        where = f"epoch {trainer.current_epoch}, batch {self._batch_idx}"
        what = f"the gradient of {some or 'the loss'} is not finite at {where}"
        if self.skipped < self.skip:
            self.skipped += 1
            rank_zero_warn(f"{what}; passing over step {trainer.global_step} ({self.skipped} of {self.skip} in a row)")
            optimizer.zero_grad()  # an optimizer leaves alone what has no gradient
            return
        kept = f"; the batch is in {self._keep(trainer.global_rank)}" if self.keep_batch else ""
        raise NonFinite(
            f"{what}{kept}; the weights are those of step {trainer.global_step}: lower optimizer.lr, "
            "set trainer.gradient_clip_val, or pass over such steps with callback.guard.skip=5"
        )

    def _keep(self, rank: int) -> Path:
        path = self.folder / f"nonfinite-rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self._batch, path)
        return path
