"""Warn of a plan of training that the number of batches, epochs or optimizers contradicts."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.optim import lr_scheduler

VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|eval|dev)([^a-z]|$)", re.I)
VANISHED = 1e-8  # factor of the learning rate after which a model no longer changes


class PlanCheck(Callback):
    """Print one line for each setting that has another effect than its value says; training goes on.

    - More accumulated batches than an epoch has: the optimizer steps at the end of an epoch, with fewer.
    - A learning rate schedule that is planned over steps, but stepped once an epoch, or the reverse.
    - ``max_steps`` or ``min_steps`` with several optimizers, all of whose steps Lightning counts.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check what is known before the first batch."""
        if trainer.is_global_zero:
            print(*(f"warning: {line}\n" for line in _faults(trainer, pl_module)), sep="", end="", file=sys.stderr)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the accumulation, if a stream has told its number of batches only by its end."""
        if trainer.is_global_zero and math.isinf(trainer.num_training_batches):
            for line in _long_accumulations(trainer, trainer.fit_loop.batch_idx + 1):
                print(f"warning: {line}", file=sys.stderr)
        vars(self)["on_train_epoch_end"] = None  # Lightning skips hooks that are not callable

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the hook for another training."""
        vars(self).pop("on_train_epoch_end", None)


def _faults(trainer: L.Trainer, module: L.LightningModule) -> Iterator[str]:
    batches = trainer.num_training_batches
    if not math.isinf(batches):
        yield from _long_accumulations(trainer, int(batches))
    count = len(trainer.optimizers)
    for name in ("max_steps", "min_steps"):
        limit = getattr(trainer, name)
        if count > 1 and limit is not None and limit > 0:
            yield (
                f"trainer.{name}={limit} counts the steps of all {count} optimizers, as Lightning does: about "
                f"{math.ceil(limit / count)} batches if each makes one; set trainer.{name}={limit * count} for {limit}"
            )
    found = {finding.check for each in trainer.callbacks for finding in getattr(each, "findings", ())}  # type: ignore[attr-defined]
    if module.automatic_optimization and not found & {"schedule-unit", "schedule-dead"}:  # which say the same
        for config in trainer.lr_scheduler_configs:
            yield from _misplaced_schedule(trainer, config)


def _long_accumulations(trainer: L.Trainer, batches: int) -> Iterator[str]:
    given = {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            given |= {f"{type(callback).__name__} from epoch {e}": n for e, n in callback.scheduling.items()}
    for name, number in given.items():
        if number > batches > 0:
            yield (
                f"{name}={number} exceeds the batches of an epoch, {batches}, at whose end the optimizer steps in any "
                f"case; set {name}={batches}, or a smaller batch size"
            )


def _misplaced_schedule(trainer: L.Trainer, config: Any) -> Iterator[str]:
    scheduler, name = config.scheduler, type(config.scheduler).__name__
    remedy = "in configure_optimizers return {'scheduler': …, 'interval': '%s'}, or set task.interval=%s"
    if config.reduce_on_plateau:
        if config.interval == "step" and VALIDATION.search(str(config.monitor)):
            yield (
                f"scheduler: {name} reads {config.monitor} after each step, though it changes only with a validation; "
                + remedy.replace("%s", "epoch")
            )
        return
    steps, epochs = _planned(trainer)
    if not epochs < steps < math.inf:
        return
    done = math.floor((steps if config.interval == "step" else epochs) / config.frequency)
    horizon = planned_length(scheduler)
    if config.interval == "epoch":
        if horizon is not None and horizon > 2 * done and _is_nearer(horizon, steps, epochs):
            yield (
                f"scheduler: {name} is planned over {horizon:,.0f} steps, but stepped once an epoch, {done:,} times; "
                + remedy.replace("%s", "step")
            )
        return
    decay = vanishing(scheduler, done)
    is_short = horizon is not None and horizon <= 2 * epochs and _is_nearer(horizon, epochs, steps)
    is_short = is_short and not isinstance(scheduler, lr_scheduler.OneCycleLR)  # which raises an error after its steps
    if decay or (is_short and not _is_warmup(scheduler)):
        what = f"is planned over {horizon:,.0f}" if is_short else decay
        yield f"scheduler: {name} {what}, but is stepped after each of {done:,} steps; {remedy.replace('%s', 'epoch')}"


def _planned(trainer: L.Trainer) -> tuple[float, float]:
    """Number of optimizer steps and epochs of the training; infinite if unknown."""
    if math.isinf(trainer.num_training_batches):
        return math.inf, math.inf
    each = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    epochs = math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)
    steps = min(math.inf if trainer.max_steps == -1 else float(trainer.max_steps), epochs * each)
    return steps, min(epochs, steps / each if each else math.inf)


def _is_nearer(length: float, near: float, far: float) -> bool:
    return abs(math.log(max(length, 1) / max(near, 1))) < abs(math.log(max(length, 1) / max(far, 1)))


def planned_length(scheduler: Any) -> float | None:
    """After how many calls of ``step`` a schedule of torch has run its course, or a period; None if unknown.

    A ``LambdaLR`` has the largest of the numbers that its function was made with, such as ``num_training_steps``.
    """
    match scheduler:
        case lr_scheduler.SequentialLR():
            rest = planned_length(scheduler._schedulers[-1])
            return (scheduler._milestones[-1] if scheduler._milestones else 0) + (rest or 0)
        case lr_scheduler.ChainedScheduler():
            return max((n for s in scheduler._schedulers if (n := planned_length(s)) is not None), default=None)
        case lr_scheduler.MultiStepLR():
            return float(max(scheduler.milestones, default=0)) or None
        case lr_scheduler.LambdaLR() | lr_scheduler.MultiplicativeLR():
            return max((n for function in scheduler.lr_lambdas for n in _numbers(function)), default=None)
        case lr_scheduler.CyclicLR():
            return float(scheduler.total_size)
    names = ("total_steps", "T_max", "total_iters", "T_0", "step_size")
    return next((float(value) for name in names if isinstance(value := vars(scheduler).get(name), int | float)), None)


def _numbers(function: Any) -> Iterator[float]:
    """The whole numbers above 1 that a closure, or a function with defaults or of ``partial``, was made with."""
    values: list[Any] = []
    if isinstance(function, partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    if inspect.isfunction(function):
        values += [*inspect.getclosurevars(function).nonlocals.values(), *(function.__defaults__ or ())]
    yield from (float(n) for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 1)


def vanishing(scheduler: Any, steps: int) -> str | None:
    """How a schedule by constant factors ends, if its rate vanishes long before the end; None if it does not."""
    if not isinstance(scheduler, lr_scheduler.ExponentialLR | lr_scheduler.StepLR) or not 0 < scheduler.gamma < 1:
        return None
    every = getattr(scheduler, "step_size", 1)
    needed = math.ceil(math.log(VANISHED) / math.log(scheduler.gamma)) * every
    return f"multiplies the rate by {VANISHED:g} within {needed:,}" if needed < steps / 2 else None


def _is_warmup(scheduler: Any) -> bool:
    """Whether a schedule only begins training, which goes on with the full rate."""
    if isinstance(scheduler, lr_scheduler.LinearLR):
        return bool(scheduler.end_factor >= scheduler.start_factor)
    return isinstance(scheduler, lr_scheduler.ConstantLR | lr_scheduler.LambdaLR | lr_scheduler.MultiplicativeLR)
