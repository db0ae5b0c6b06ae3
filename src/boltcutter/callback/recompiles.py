"""How often a compiled model has to be compiled again."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

HOOK = "on_train_batch_end"


class RecompileMonitor(Callback):
    """Log ``recompiles``, how often a compiled model was compiled anew since training began, and warn once of many.

    Each takes as long as the first time. A smaller last batch is a good reason for one; new shapes at each step are
    not. A task that is not compiled is left alone.

    Args:
        warn_after: How many are no reason to warn.

    Raises:
        ValueError: ``warn_after`` is negative.
    """

    def __init__(self, *, warn_after: int = 3) -> None:
        if warn_after < 0:
            raise ValueError(f"callback.recompiles.warn_after={warn_after} is not a number of times; try 3")
        self.warn_after = warn_after
        self._told = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave steps alone that have nothing to count: Lightning passes over a hook that cannot be called."""
        vars(self).pop(HOOK, None)
        if not getattr(pl_module, "compile_model", False):
            setattr(self, HOOK, None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count at each logging step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._count(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count."""
        if getattr(pl_module, "compile_model", False):
            self._count(pl_module)

    def _count(self, task: Any) -> None:
        reasons = task.recompiled()
        task.log("recompiles", float(len(reasons)))
        if len(reasons) > self.warn_after and not self._told:
            self._told = True
            rank_zero_warn(
                f"task.compile={str(task.compile_model).lower()}: compiled {len(reasons)} times more, each as long as "
                f"the first; last since {' '.join(reasons[-1].split())[:200]}; give batches of one shape "
                "(data.batch_size that divides the samples, sequences of one length), or set task.compile=false"
            )
