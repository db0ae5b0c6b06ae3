"""Stop before a number that is none reaches the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer


class NonFiniteGradientError(RuntimeError):
    """A gradient is infinite or not a number; the weights are still those of the step before."""

    hide_traceback = True  # needs no traceback


class UnevenBatchesError(RuntimeError):
    """Ranks have different numbers of batches; one would wait for the others for ever."""

    hide_traceback = True


class GradientCheck(NamedTuple):
    """What was measured before a step, and where."""

    norms: Tensor  # of each gradient
    parameters: list[Tensor]
    ready: torch.cuda.Event | None  # None: at once
    batch: Any
    epoch: int
    batch_idx: int
    step: int


class Guard(Callback):
    """Look at the gradient before each optimizer step; stop, or pass over the step, when it is not finite.

    Gradients are the same on all ranks by then, so all of them stop at the same step, and none waits for another.
    With a fused optimizer on CUDA nothing is waited for: the device itself passes over the step, and the host learns
    of it one step later. With a gradient scaler (``16-mixed``) an overflow is daily bread: the scaler passes over it.

    Args:
        folder: Where the batch that did it is kept, as ``nonfinite-rank-<n>.pt``.
        max_skipped_steps: Steps in a row that are passed over before training stops.
        save_batch: Whether to keep the batch.
    """

    def __init__(self, folder: Path, *, max_skipped_steps: int = 0, save_batch: bool = True) -> None:
        if max_skipped_steps < 0:
            raise ValueError(f"callback.guard.max_skipped_steps={max_skipped_steps} is not a number of steps; try 0")
        self.folder, self.max_skipped_steps, self.save_batch = Path(folder), max_skipped_steps, save_batch
        self.skipped = 0
        self._batch: Any = None
        self._batch_idx = 0
        self._look: GradientCheck | None = None  # that is not yet judged

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that all ranks will make the same steps.

        Raises:
            UnevenBatchesError: They will not.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            counts: list[float] = [0.0] * trainer.world_size
            torch.distributed.all_gather_object(counts, float(trainer.num_training_batches))
            if len(set(counts)) > 1:
                told = ", ".join(f"rank {rank} has {count:.0f}" for rank, count in enumerate(counts))
                raise UnevenBatchesError(
                    f"data: training batches are shared out unevenly ({told}); give each rank as many"
                )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch; no copy is made."""
        self._batch, self._batch_idx = batch, batch_idx

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Stop here, where the weights are still whole.

        Raises:
            NonFiniteGradientError: The gradient is not finite, and not for the first few times.
        """
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = [parameter.grad for parameter in _weights(optimizer) if parameter.grad is not None]
        over_ranks = getattr(trainer.strategy, "global_grad_norm", None)  # each rank has other weights
        if not gradients and over_ranks is None:
            return
        self._judge(trainer, pl_module)
        if any(gradient.is_sparse for gradient in gradients):
            gradients = _dense(gradients)
            if trainer.gradient_clip_val:
                trainer.gradient_clip_val = None
                rank_zero_warn("trainer.gradient_clip_val has no effect: some gradients are sparse; set it to null")
        # A rank whose own weights are all frozen has no gradient, but must answer the others.
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0, device=pl_module.device)
        cut = hasattr(norms, "full_tensor")  # each rank has a part of each gradient
        if cut:
            norms = norms.full_tensor()  # type: ignore[attr-defined]
        norm = over_ranks(_weights(optimizer), norms) if over_ranks else torch.linalg.vector_norm(norms)
        late = over_ranks is None and self._late(norm, optimizer)
        if late:
            optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        if late or not math.isfinite(norm.item()):
            self._look = self._measured(norms, late, trainer, optimizer)
        else:
            self.skipped = 0
        if not late and self._look:
            self._judge(trainer, pl_module)
            optimizer.zero_grad()  # an optimizer leaves alone what has no gradient
        elif not cut and "gradient_norm" in vars(pl_module):  # a foreign module may have a method of that name
            pl_module.gradient_norm = norm  # for clipping, which need not measure it again

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge the newest step before it is kept."""
        self._judge(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Judge the last step."""
        self._judge(trainer, pl_module)

    def _late(self, norm: Tensor, optimizer: Optimizer) -> bool:
        """Whether the device can pass over the step itself."""
        return norm.is_cuda and all(group.get("fused") for group in optimizer.param_groups)

    def _measured(self, norms: Tensor, late: bool, trainer: L.Trainer, optimizer: Optimizer) -> GradientCheck:
        parameters = _weights(optimizer)
        ready = None
        if late and norms.is_cuda:
            norms = norms.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return GradientCheck(
            norms, parameters, ready, self._batch, trainer.current_epoch, self._batch_idx, trainer.global_step
        )

    def _judge(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop, or count the step as passed over, if what was measured last is not finite."""
        look, self._look = self._look, None
        if look is None:
            return
        if look.ready:
            look.ready.synchronize()  # of the step before, so nothing is waited for
        bad = {id(p) for p, good in zip(look.parameters, look.norms.isfinite().tolist(), strict=True) if not good}
        of_all_ranks = getattr(trainer.strategy, "gather_names", None)
        if not bad and not of_all_ranks:
            self.skipped = 0
            return
        names = [name for name, parameter in pl_module.named_parameters() if id(parameter) in bad]
        names = of_all_ranks(names) if of_all_ranks else names
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        what = f"the gradient of {some} is not finite at epoch {look.epoch}, batch {look.batch_idx}"
        if self.skipped < self.max_skipped_steps:
            self.skipped += 1
            rank_zero_warn(
                f"{what}; passing over step {look.step} ({self.skipped} of {self.max_skipped_steps} in a row)"
            )
            return
        kept = f"; the batch is in {self._keep(look.batch, trainer.global_rank)}" if self.save_batch else ""
        raise NonFiniteGradientError(
            f"{what}{kept}; the weights are those of step {look.step}: lower optimizer.lr, "
            "set trainer.gradient_clip_val, or pass over such steps with callback.guard.max_skipped_steps=5"
        )

    def _keep(self, batch: Any, rank: int) -> Path:
        path = self.folder / f"nonfinite-rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(batch, path)
        return path


def _weights(optimizer: Optimizer) -> list[Tensor]:
    """Those that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _dense(gradients: list[Tensor]) -> list[Tensor]:
    """Gradients of the same norms: the values of sparse ones, each row of a weight once."""
    return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
