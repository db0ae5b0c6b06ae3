"""A callback of replays: notes each step, leaves out samples, looks into a step, and ends after the last one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from boltcutter.callback.guard import NonFiniteGradientError
from boltcutter.callback.nonfinite import find_origin
from boltcutter.data.sampler import find_sampler
from boltcutter.protocols import gather_objects
from boltcutter.replay.batches import without_rows
from boltcutter.replay.job import RESULT, Job
from boltcutter.replay.layers import Layers
from boltcutter.replay.rows import describe_rows, locate, rows_of, unreadable
from boltcutter.replay.step_trace import StepTrace

LOOKED_AT = 20  # steps before that which is looked at, with which its layers are compared
BEFORE = "before.ckpt"
READ_AHEAD = 3  # batches whose samples are read once more, if one could not be read


class ReplayEndError(RuntimeError):
    """The last step of a replay was done."""

    hide_traceback = True


class Watch(Callback):
    """Follows the steps of a replay.

    Args:
        job: What the replay does.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.losses: dict[int, list[Tensor]] = {}
        self.found: dict[str, Any] = {
            "saved": None,
            "rows": [],
            "names": {},
            "origin": None,
            "bad": [],
            "unreadable": [],
        }
        self.layers: Layers | None = None
        self.trace: StepTrace | None = None
        self._seen, self._stride, self._batch_of_step = 0, 1, 0
        self._is_training = False  # never in a process that forks the ranks, whose callbacks learn of their errors
        self._handles: list[Any] = []
        self._kept: list[Any] = []  # batches of the altered step, which the next one is to have

    # Life cycle

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Multiply learning rates, and note where the replay begins."""
        self._is_training = True
        self._seen, self.found["begins"] = trainer.global_step, trainer.global_step
        if self.job.lr_factor != 1:
            for optimizer in trainer.optimizers:
                inner: Any = getattr(optimizer, "optimizer", optimizer)
                self._handles.append(inner.register_step_pre_hook(self._scale))
                self._handles.append(inner.register_step_post_hook(self._scale_back))
        if self.job.inspect is not None:
            self.layers = Layers(pl_module)
        if self.job.trace:
            self.trace = StepTrace(pl_module, Path(self.job.folder), trainer.global_rank)
        self._save_before_others(trainer)

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.job.lr_factor

    def _scale_back(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / self.job.lr_factor

    def _is_in(self, step: int | None, trainer: L.Trainer) -> bool:
        """Whether the current batch belongs to a step."""
        return step is not None and trainer.global_step < step <= trainer.global_step + self._stride

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look into the batch, or leave samples out of it."""
        job = self.job
        if self._is_in(job.inspect, trainer):
            self._inspect(trainer, pl_module, batch, batch_idx)
        if self.layers and job.inspect is not None and trainer.global_step >= job.inspect - LOOKED_AT - 1:
            self.layers.begin()
        if self._is_in(job.alter, trainer):
            rows = [
                row for rank, number, row in job.without if (rank, number) == (trainer.global_rank, self._batch_of_step)
            ]
            _replace_batch(trainer, without_rows(batch, rows) if rows else batch)
            self._kept += [batch] if job.delays else []
        elif self._kept:
            _replace_batch(trainer, self._kept.pop(0))
        if self.trace and any(self._is_in(step, trainer) for step in job.trace):
            self.trace.begin(trainer, batch, self._indices(trainer, batch_idx))

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Note the loss, also of a step that is not done."""
        if self._is_in(self.job.inspect, trainer) and not bool(loss.detach().isfinite()):
            self._find_bad(pl_module)  # as a hook of the module may have changed them since the batch began
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        if self.trace:
            self.trace.note_loss(loss)
        self.losses.setdefault(trainer.global_step + self._stride, []).append(loss.detach() * scale)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Note gradients and weights."""
        if self.layers:
            self.layers.before_step()
        if self.trace:
            self.trace.before_step()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, save the state, or end.

        Raises:
            ReplayEndError: The last step was done.
        """
        _restore_step(trainer)
        step, job = trainer.global_step, self.job
        self._batch_of_step += 1
        if step == self._seen:
            return
        self._stride, self._seen, self._batch_of_step = step - self._seen, step, 0
        if self.layers:
            self.layers.after_step(step)
        if self.trace:
            self.trace.after_step(trainer, step)
        self._save_before_others(trainer)
        if step >= job.last:
            self._write(trainer, "")
            raise ReplayEndError(f"step {step} was done")
        if job.save_before is not None and step < job.save_before <= step + self._stride:
            path = f"{job.folder}/{BEFORE}"
            trainer.save_checkpoint(path)
            self.found["saved"] = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write what there is."""
        if self.layers:
            self.layers.after_step(trainer.global_step + self._stride)
        if self.job.inspect is not None and not (self.found["rows"] or "whole" in self.found):  # none was given a batch
            first = trainer.fit_loop.epoch_loop.batch_idx
            batches = (self._indices(trainer, number) for number in range(max(first, 0), first + READ_AHEAD))
            self.found["unreadable"] = [*unreadable(trainer, (index for each in batches for index in each or ()))]
        self._write(trainer, f"{type(exception).__name__}: {exception}")
        if isinstance(exception, NonFiniteGradientError | ReplayEndError):  # which all ranks raise
            trainer.strategy.barrier()  # else one rank may be ended before it has written

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training ended before the last step."""
        self._write(trainer, "" if trainer.global_step >= self.job.last else f"training ended at {trainer.global_step}")

    def _write(self, trainer: L.Trainer, error: str) -> None:
        if not self._is_training:
            return
        self._is_training = False
        for handle in self._handles:
            handle.remove()
        self._save(trainer, error)

    def _save_before_others(self, trainer: L.Trainer) -> None:
        """Write what there is, as a rank is ended without notice when another one fails."""
        if trainer.world_size > 1 and (self._seen >= self.job.last - LOOKED_AT - 1 or not self.losses):
            self._save(trainer, "")

    def _save(self, trainer: L.Trainer, error: str) -> None:
        losses = {step: [str(float(loss)) for loss in each] for step, each in self.losses.items()}
        layers = self.layers.table() if self.layers else []
        found = {**self.found, "losses": losses, "layers": layers, "error": error, "ended": trainer.global_step}
        path = Path(self.job.folder, RESULT.format(trainer.global_rank))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(as_plain(found)))
        part.replace(path)  # as this process may be ended at any time

    # What a step is made of

    def _indices(self, trainer: L.Trainer, batch_idx: int) -> list[Any] | None:
        sampler = find_sampler(trainer.train_dataloader)
        found = None if sampler is None else sampler.indices_of(batch_idx)
        return (
            None
            if found is None
            else [int(index) if isinstance(index, (int,)) or hasattr(index, "__index__") else index for index in found]
        )

    def _find_bad(self, module: L.LightningModule) -> None:
        """Note weights and buffers that are not finite."""
        if not self.found["bad"]:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            self.found["bad"] = [name for name, tensor in tensors if _is_bad(tensor)]

    def _inspect(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Compute each sample alone, and find what is not finite first."""
        self._find_bad(module)
        indices = self._indices(trainer, batch_idx)
        rows, whole = rows_of(trainer, module, batch, batch_idx)
        for row in rows:
            row |= {"rank": trainer.global_rank, "batch": self._batch_of_step}
            if indices is not None and row["row"] < len(indices):
                row["index"] = indices[row["row"]]
                row["where"] = locate(trainer, row["index"])
        describe_rows(trainer, batch, rows)
        self.found["rows"] += rows
        self.found["whole"] = whole
        if any(errors := gather_objects(whole["error"])):  # the step raises it, too, which may end the other ranks
            self._save(trainer, errors[trainer.global_rank])
            return
        is_finite = math.isfinite(whole["loss"]) and math.isfinite(whole["gradient_norm"])
        if not all(gather_objects(is_finite)):  # find_origin communicates
            with torch.random.fork_rng(devices=[]):
                origin = find_origin(trainer, module, batch, batch_idx)
            self.found["origin"] = origin.text if origin else None


def _is_bad(value: Tensor) -> bool:
    return value.is_floating_point() and not value.is_meta and not bool(value.detach().isfinite().all())


def _replace_batch(trainer: L.Trainer, batch: Any) -> None:
    """Have the next step train on another batch."""
    strategy: Any = trainer.strategy
    original = type(strategy).training_step

    def training_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return original(strategy, batch, *args, **kwargs)

    vars(strategy)["training_step"] = training_step


def _restore_step(trainer: L.Trainer) -> None:
    vars(trainer.strategy).pop("training_step", None)


def as_plain(value: Any) -> Any:
    """Values that JSON has: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {str(key): as_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
