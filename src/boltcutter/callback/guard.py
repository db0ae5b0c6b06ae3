"""Non-finite gradients: training stops, or skips the step, before they reach the weights."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Optimizer

from boltcutter import files
from boltcutter.callback.nonfinite import find_origin
from boltcutter.internals import foreach_norm
from boltcutter.project import command
from boltcutter.protocols import ReducesGradientNorms, gather_objects
from boltcutter.task.after_hook import AfterHook
from boltcutter.task.compiler import CUDA_GRAPH
from boltcutter.task.host_copy import HostCopy, copy_to_host

GRADIENT, IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")  # of all parameters, in each step
SMALLEST_SCALE = 2.0**-16  # of a loss in float16; a scaler that begins with 2^16 is there after 32 overflows in a row


class NonFiniteGradientError(RuntimeError):
    """A gradient is Inf or NaN; the weights are still those of the previous step."""

    hide_traceback = True  # needs no traceback


class UnevenBatchesError(RuntimeError):
    """Ranks have different numbers of batches, which would deadlock collectives."""

    hide_traceback = True


class GradientCheck(NamedTuple):
    """Gradient norms before an optimizer step, and the position in training."""

    norms: HostCopy  # one per gradient of this rank, and that of all gradients of all ranks
    parameters: list[Tensor]
    batch: Any
    batch_idx: int
    step: int
    place: str


class Guard(Callback):
    """Check gradients before each optimizer step; stop training or skip the step if they contain NaN or Inf.

    Gradients are already reduced at this point, so all ranks stop at the same step and none waits for another. With a
    fused optimizer on CUDA the check does not synchronize: the device skips the step itself, and the host learns of it
    one step later. With a gradient scaler (``16-mixed``) overflows are expected, and the scaler skips them; training
    stops when lowering the scale has not helped.

    Args:
        folder: Folder where the offending batch is saved, as ``nonfinite-rank-<n>.pt``.
        max_skipped_steps: Number of consecutive steps to skip before training stops.
        save_batch: Whether to save the batch.

    Attributes:
        norms: Norm of each gradient of this rank at the latest step, before clipping; None if there are none.
        norm: That of all gradients of all ranks.

    Raises:
        ValueError: ``max_skipped_steps`` is negative.
    """

    def __init__(self, folder: Path, *, max_skipped_steps: int = 0, save_batch: bool = True) -> None:
        if max_skipped_steps < 0:
            raise ValueError(f"callback.guard.max_skipped_steps={max_skipped_steps} must be 0 or more; try 0")
        self.folder, self.max_skipped_steps, self.save_batch = Path(folder), max_skipped_steps, save_batch
        self.skipped = 0
        self.norms: Tensor | None = None
        self.norm: Tensor | None = None
        self._batch: Any = None
        self._batch_idx = 0
        self._pending: GradientCheck | None = None  # recorded, but not yet checked
        self._reducer: ReducesGradientNorms | None = None  # the strategy, where ranks hold different weights
        # Where steps are captured as CUDA graphs: steps skipped in a row, on the device, and what a graph has computed.
        self._streak: Tensor | None = None
        self._in_graph: tuple[Tensor, Tensor, list[Tensor]] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find out once whether norms must be reduced."""
        self._reducer = trainer.strategy if isinstance(trainer.strategy, ReducesGradientNorms) else None
        if getattr(pl_module, "compile_model", False) == CUDA_GRAPH:
            self._streak = torch.zeros((), device=trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that all ranks have the same number of batches.

        Raises:
            UnevenBatchesError: They have not.
        """
        counts = gather_objects(float(trainer.num_training_batches))
        if len(set(counts)) > 1:
            numbers = ", ".join(f"rank {rank} has {count:.0f}" for rank, count in enumerate(counts))
            raise UnevenBatchesError(
                f"data: ranks have different numbers of training batches ({numbers}); "
                "use a sampler that splits them evenly"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep a reference to the batch; no copy is made."""
        self._batch, self._batch_idx = batch, batch_idx

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Check the gradients as soon as other callbacks and the module, which may repair them, have seen them."""
        hook = "on_before_optimizer_step"
        if pl_module.automatic_optimization and "gradient_norm" not in vars(pl_module):  # which reuses the norm to clip
            clip = "configure_gradient_clipping"
            if clip in vars(pl_module) or getattr(type(pl_module), clip) is not getattr(L.LightningModule, clip):
                hook = clip
        AfterHook(pl_module, hook, partial(self.check_gradients, trainer, pl_module, optimizer))

    def check_gradients(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Check the gradients while the weights are still those of the previous step.

        Raises:
            NonFiniteGradientError: A gradient is not finite, and ``max_skipped_steps`` steps were skipped already.
        """
        self.norms = self.norm = None
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            finite = (p.grad.isfinite().all() for p in pl_module.parameters() if p.grad is not None)  # not yet computed
            # No further wait for the device, as the scaler reads from it at each step, too.
            if (scale := scaler.get_scale()) < SMALLEST_SCALE and not all(finite):
                check = self._record(torch.zeros(0), [], False, trainer)
                what = f"gradients are not finite at {check.place}, although the loss is scaled by {scale:.0e}"
                self._stop(trainer, pl_module, check, what, self._why(), "set trainer.precision=bf16-mixed")
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients: list[Tensor] = list(map(GRADIENT, parameters))
        if not gradients and self._reducer is None:
            return
        is_capturing = "is_capturing" in vars(pl_module)
        if not is_capturing:
            self._handle_pending(trainer, pl_module)
        if any(map(IS_SPARSE, gradients)):
            # The values of coalesced gradients have the same norms.
            gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
            if trainer.gradient_clip_val:
                trainer.gradient_clip_val = None
                rank_zero_warn("trainer.gradient_clip_val has no effect: some gradients are sparse; set it to null")
        # A rank whose weights are all frozen has no gradients, but must take part in the reduction.
        norms = torch.stack(foreach_norm(gradients)) if gradients else torch.zeros(0, device=pl_module.device)
        if hasattr(norms, "full_tensor"):  # gradients are DTensors
            norms = norms.full_tensor()
        norm = self._reducer.global_grad_norm(parameters, norms) if self._reducer else torch.linalg.vector_norm(norms)
        self.norms, self.norm = norms, norm
        deferred = is_capturing or (self._can_defer(norm, optimizer) and not _lacks_momentum(optimizer, parameters))
        if deferred:
            optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        if self._streak is not None:
            self._count_on_device(norm, optimizer if deferred else None)
        if is_capturing:
            self._in_graph = norms, norm, parameters
        elif deferred or not math.isfinite(norm.item()):
            self._pending = self._record(torch.cat([norms, norm.view(1)]), parameters, deferred, trainer)
        else:
            self.skipped = 0
        if not deferred and self._pending:
            self._handle_pending(trainer, pl_module)
            optimizer.zero_grad()  # an optimizer skips parameters without a gradient
        elif "gradient_norm" in vars(pl_module):  # a third-party module may have a method of that name
            pl_module.gradient_norm = norm  # reused by gradient clipping

    def refuses_capture(self, optimizer: Optimizer) -> str | None:
        """An optimizer that cannot skip a step on the device, as the host would have to wait for the norm."""
        if all(group.get("fused") for group in optimizer.param_groups):
            return None
        return f"callback.guard: {type(optimizer).__name__} cannot skip a step on the device; set optimizer.fused=true"

    def after_replay(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Check the step before, whose norms are on the host by now, and begin to copy those of this one.

        Raises:
            NonFiniteGradientError: As in ``check_gradients``; the device has skipped this step, too.
        """
        assert self._in_graph is not None
        norms, norm, parameters = self._in_graph
        self.norms, self.norm = norms.clone(), norm.clone()
        check = self._record(torch.cat([norms, norm.view(1)]), parameters, True, trainer)
        self._handle_pending(trainer, pl_module)
        self._pending = check

    def _count_on_device(self, norm: Tensor, optimizer: Any) -> None:
        """Count skipped steps where they are; after too many, all are skipped until the host learns of it.

        Without this, the step that is replayed before it does would change the weights.
        """
        assert self._streak is not None
        skips = norm.isfinite().logical_not() | (self._streak > self.max_skipped_steps)
        self._streak.copy_((self._streak + 1) * skips)
        if optimizer is not None:
            optimizer.found_inf = skips.float()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check the latest step before it is saved."""
        self._handle_pending(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the last step."""
        self._handle_pending(trainer, pl_module)

    def _can_defer(self, norm: Tensor, optimizer: Optimizer) -> bool:
        """Whether the optimizer can skip the step on the device."""
        return norm.is_cuda and all(group.get("fused") for group in optimizer.param_groups)

    def _record(self, norms: Tensor, parameters: list[Tensor], deferred: bool, trainer: L.Trainer) -> GradientCheck:
        copied = copy_to_host(norms) if deferred else HostCopy(norms, None)
        place = f"epoch {trainer.current_epoch}, batch {self._batch_idx}"
        return GradientCheck(copied, parameters, self._batch, self._batch_idx, trainer.global_step, place)

    def _handle_pending(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop, or count the step as skipped, if the recorded gradients are not finite."""
        check, self._pending = self._pending, None
        if check is None:
            return
        *each, total = check.norms.wait().isfinite().tolist()  # of the previous step, so this does not wait
        if total:
            self.skipped = 0
            return
        bad = {id(p) for p, good in zip(check.parameters, each, strict=True) if not good}
        names = [name for name, parameter in pl_module.named_parameters() if id(parameter) in bad]
        names = self._reducer.gather_names(names) if self._reducer else names
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        some = some or "all parameters together"  # each is finite, but the sum of their squares is not
        what = f"the gradient of {some} is not finite at {check.place}"
        if self.skipped < self.max_skipped_steps:
            self.skipped += 1
            rank_zero_warn(
                f"{what}; skipping step {check.step} ({self.skipped} of {self.max_skipped_steps} consecutive)"
            )
            return
        skip = "skip such steps with callback.guard.max_skipped_steps=5"
        self._stop(trainer, pl_module, check, f"{what}; the weights are those of step {check.step}", self._why(), skip)

    def _why(self) -> str:
        """The command that finds what a change of the step would do: what helps is not known before it is tried."""
        return f"{command('why', f'run={self.folder}')} tries what removes it"

    def _stop(self, trainer: L.Trainer, pl_module: Any, check: GradientCheck, what: str, *remedies: str) -> NoReturn:
        """Save the batch, and say what happened, where it began, and what may help."""
        file = self._write_batch(check.batch, trainer.global_rank) if self.save_batch else None
        saved = f"; the batch is saved as {file}" if file else ""
        origin = find_origin(trainer, pl_module, check.batch, check.batch_idx)
        if origin and origin.in_data:
            remedies = "correct or remove these samples", *remedies[1:]
        raise NonFiniteGradientError(f"{what}{f'; {origin.text}' if origin else ''}{saved}: {', or '.join(remedies)}")

    def _write_batch(self, batch: Any, rank: int) -> Path:
        path = self.folder / f"nonfinite-rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", opener=files.opener(self.folder)) as file:
            torch.save(move_data_to_device(batch, torch.device("cpu")), file)  # so that it loads on any machine
        return path


def _lacks_momentum(optimizer: Optimizer, parameters: list[Tensor]) -> bool:
    """Whether SGD takes its first step, which leaves the momentum uninitialized if the device skips it."""
    if not isinstance(optimizer, SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return False
    return any(optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter in parameters)
