"""Recompilations of a compiled model."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from boltcutter.protocols import CompilesModel

HOOK = "on_train_batch_end"


class RecompileMonitor(Callback):
    """Log ``recompiles``, the number of recompilations of a compiled model since training began, and warn of many.

    Each recompilation takes as long as the first compilation. A smaller last batch causes one; new shapes at each step
    cause one per step. Tasks that are not compiled are skipped.

    Args:
        warn_after: Number of recompilations above which a warning is issued, once.

    Raises:
        ValueError: ``warn_after`` is negative.
    """

    def __init__(self, *, warn_after: int = 3) -> None:
        if warn_after < 0:
            raise ValueError(f"callback.recompiles.warn_after={warn_after} must be 0 or more; try 3")
        self.warn_after = warn_after
        self._warned = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Disable the batch hook if the task is not compiled: Lightning skips hooks that are not callable."""
        vars(self).pop(HOOK, None)
        if not _is_compiled(pl_module):
            setattr(self, HOOK, None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at each logging step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log."""
        if _is_compiled(pl_module):
            self._log(pl_module)

    def _log(self, task: Any) -> None:
        reasons = task.recompile_reasons()
        task.log("recompiles", float(len(reasons)))
        if len(reasons) > self.warn_after and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"task.compile={str(task.compile_model).lower()}: recompiled {len(reasons)} times, each "
                f"as slow as the first compilation; last reason: {' '.join(reasons[-1].split())[:200]}; use batches of "
                "one shape (data.batch_size that divides the number of samples, sequences of equal length), or set "
                "task.compile=false"
            )


def _is_compiled(task: L.LightningModule) -> bool:
    return isinstance(task, CompilesModel) and bool(task.compile_model)
