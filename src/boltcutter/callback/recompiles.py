"""Recompilations of a compiled model."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from boltcutter.task.compiler import CUDA_GRAPH


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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at each logging step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log."""
        compiled: Any = getattr(pl_module, "compile_model", False)  # of the library's tasks
        if compiled in (False, CUDA_GRAPH):  # the latter compiles nothing
            return
        reasons: list[str] = pl_module.recompile_reasons()  # type: ignore[operator]
        pl_module.log("recompiles", float(len(reasons)))
        if len(reasons) > self.warn_after and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"task.compile={str(compiled).lower()}: recompiled {len(reasons)} times, each "
                f"as slow as the first compilation; last reason: {' '.join(reasons[-1].split())[:200]}; use batches of "
                "one shape (data.batch_size that divides the number of samples, sequences of equal length), or set "
                "task.compile=false"
            )
