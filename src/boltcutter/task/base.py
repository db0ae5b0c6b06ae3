"""What all tasks share: penalties, optimizer and schedule, and means that are right over any number of ranks."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import MeanMetric, Metric, MetricCollection

from boltcutter.task.compiler import Compiler, compiler
from boltcutter.task.states import merge, restore, state_of

Pair = tuple[Tensor, Tensor]
Observed = tuple[Tensor, ...]  # losses, outputs and targets of a batch
AT_ONCE = 1 << 14  # numbers in outputs that are counted together


class NoTotalSteps(ValueError):
    """A scheduler spans the whole training, whose length is not known."""

    hide_traceback = True  # needs no traceback


class Task(L.LightningModule, ABC):
    """A model with what it takes to train it. A subclass says what the loss of each sample is.

    Losses and metrics are gathered on the device, many batches at a time, and reduced over ranks at the end of an
    epoch, so a step waits neither for the host nor for other ranks. On CUDA a metric that counts classes with
    ``bincount`` does wait.

    Args:
        model: Takes inputs (N, …) and gives outputs (N, …).
        optimizer: Called with the parameters.
        scheduler: Called with the optimizer; given ``total_steps``, counted in ``interval``, where it takes them.
        interval: Whether the scheduler moves each optimizer step or each epoch.
        monitor: What a scheduler that watches a metric watches.
        metrics: By the name under which they are logged.
        l1: Factor of the sum of absolute weights that is added to the loss; biases and norms are left out.
        l2: Factor of the sum of squared weights, likewise.
        compile: Make machine code of the model for training; worth its minute where convolutions or attention train
            long. It changes no more than the rounding. ``xla`` takes XLA in place of torch's own compiler.
        channels_last: Keep images and filters with their channels innermost in memory, which is faster where
            convolutions are; a compiler chooses for itself.

    Attributes:
        gradient_norm: Of all gradients of this step, where a callback has measured it before they are clipped.

    Raises:
        ValueError: A factor is negative, or a scheduler would look for a metric after each step.
    """

    kind: ClassVar[Literal["classification", "regression", "language_modeling"]]

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        interval: Literal["step", "epoch"] = "step",
        monitor: str = "val/loss",
        metrics: Mapping[str, Metric] | None = None,
        l1: float = 0.0,
        l2: float = 0.0,
        compile: bool | Literal["xla"] = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("l1", l1), ("l2", l2)):
            if value < 0:
                raise ValueError(f"task.{name}={value} would reward large weights; give 0 or more")
        if interval == "step" and _watches(scheduler):
            raise ValueError(
                f"task.interval={interval}, but ReduceLROnPlateau watches {monitor}, which is not there after each "
                "step; set task.interval=epoch"
            )
        self.model = model
        self.compile_model, self.channels_last = compile, channels_last and not compile
        self._compiler: Compiler | None = None
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.gradient_norm: Tensor | None = None
        self.optimizer, self.scheduler = optimizer, scheduler
        self.interval, self.monitor = interval, monitor
        self.l1, self.l2 = l1, l2
        collection = MetricCollection(dict(metrics or {}))
        self.metrics = nn.ModuleDict({f"{stage}_": collection.clone(prefix=f"{stage}/") for stage in STAGES})
        # Without the check for NaN, which makes the host wait for the device at each step.
        self.means = nn.ModuleDict({f"{stage}_": MeanMetric(nan_strategy="disable") for stage in STAGES})
        self._waiting: dict[str, list[Observed]] = {stage: [] for stage in STAGES}
        self._told: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes here which hook runs, dozens of times a step; torch would look for a parameter each time.
        if name in ("_current_fx_name", "gradient_norm"):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """As Lightning's, but without its bookkeeping where a training step tells a number of its own.

        It takes as long as a step of a small model does. What is told is handed on once the step is over.
        """
        plain = isinstance(value, int | float | Tensor) and not args and options.keys() <= {"sync_dist"}
        if not plain or self._current_fx_name not in ("training_step", "on_train_batch_end"):
            super().log(name, value, *args, **options)
            return
        if isinstance(value, Tensor):
            value = value.detach()
            if options.get("sync_dist"):
                value = self.trainer.strategy.reduce(value, reduce_op="mean")
        self._told[name] = value

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, shape (N,)."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean of ``losses``, which training brings down; a subclass may know a shorter way to it."""
        return self.losses(outputs, targets).mean()

    @abstractmethod
    def predictions(self, outputs: Tensor) -> Tensor:
        """What a person asks for: probabilities of classes (N, C), or numbers (N, T)."""

    @property
    def logged(self) -> set[str]:
        """The names of everything that this task logs, for callbacks that monitor one."""
        names = {"train/loss", "train/loss_epoch", "val/loss", "test/loss"}
        for collection in self.metrics.values():
            names |= set(collection.keys(keep_base=False))  # type: ignore[operator]
        return names

    def setup(self, stage: str) -> None:
        """Have the model compiled when it is first trained; evaluation, of batches of many sizes, goes without.

        Raises:
            NoCompiler: There is none, or not for this strategy.
        """
        if self.compile_model and stage == "fit":
            self._compiler = compiler(self.model, self.compile_model, getattr(self._trainer, "strategy", None))

    def recompiled(self) -> list[str]:
        """Why the model was compiled anew, once for each time since training began."""
        return self._compiler.recompiled() if self._compiler else []

    def outputs(self, inputs: Tensor) -> Tensor:
        """What the model makes of ``inputs``."""
        if self.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if self._compiler and self.training:
            return self._compiler(inputs)
        with torch.compiler.set_stance("force_eager") if self._compiler else nullcontext():
            found: Tensor = self.model(inputs)
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's outputs."""
        return self.outputs(inputs)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        """Mean loss of the batch, with penalties."""
        loss = self._observe_training(batch)
        if self.l1 or self.l2:
            loss = loss + self.penalty()
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Hand on what the step has told, when and as Lightning does."""
        if not self._told or self.trainer.fit_loop._should_accumulate():
            return
        told, self._told = self._told, {}
        self.trainer.callback_metrics.update(
            {name: value if isinstance(value, Tensor) else torch.tensor(float(value)) for name, value in told.items()}
        )
        connector = self.trainer._logger_connector
        if connector.should_update_logs:
            connector.log_metrics(told)

    def validation_step(self, batch: Pair, batch_idx: int) -> None:
        """Gather losses and metrics."""
        self._observe("val", batch)

    def test_step(self, batch: Pair, batch_idx: int) -> dict[str, Tensor]:
        """Gather losses and metrics; give out what a report shows of each sample."""
        losses, outputs = self._observe("test", batch)
        return {"losses": losses, "predictions": self.predictions(outputs)}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Predictions for inputs, or for the inputs of (inputs, targets)."""
        return self.predictions(self(batch[0] if isinstance(batch, list | tuple) else batch))

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means; where training ends within the epoch, a resumed run goes on gathering them."""
        complete = self.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        self._report("train", "train/loss_epoch", reset=complete)

    def on_validation_epoch_start(self) -> None:
        """Measure what the first rank will keep: with DDP each rank has statistics of BatchNorm of its own."""
        ranks = (getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)
        if ranks == self.trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def on_validation_epoch_end(self) -> None:
        """Log the epoch's means."""
        self._report("val", "val/loss")

    def on_test_epoch_end(self) -> None:
        """Log the means over the split."""
        self._report("test", "test/loss")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Let go of the gradients, without torch's record of it."""
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm that is known already, if it is, and if Lightning would clip in no way of its own."""
        norm, self.gradient_norm = self.gradient_norm, None
        plugin = type(self.trainer.precision_plugin)
        special = (
            plugin.clip_gradients is not Precision.clip_gradients
            or plugin.clip_grad_by_norm is not Precision.clip_grad_by_norm
        )
        if special or norm is None or not gradient_clip_val or gradient_clip_algorithm not in (None, "norm"):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif norm.device.type != "cpu" or norm.item() > gradient_clip_val:  # a device is not waited for
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # a pipeline's stage may be frozen
                torch._foreach_mul_(gradients, (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what is gathered of an epoch that is not over, of each rank that sees other samples."""
        mine: dict[str, Any] = {name: state_of(metric) for name, metric in self._train_metrics()}
        mine["waiting"] = [[part.cpu() for part in observed] for observed in self._waiting["train"]]
        ranks: list[Any] = [mine]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ranks, mine)
        checkpoint["train_metrics"] = ranks[:: len(ranks) // _shares(self.trainer)[0]]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep a schedule's position but not its length, and go on gathering.

        Where the number of ranks has changed, the first one takes what all had gathered.
        """
        for state in checkpoint.get("lr_schedulers", []):
            for name in ("total_steps", "_schedule_phases"):  # the latter are OneCycleLR's
                state.pop(name, None)
        ranks = checkpoint.get("train_metrics", [])
        trainer = self._trainer
        if trainer is None or not ranks:
            return
        shares, mine = _shares(trainer)
        same = len(ranks) == shares
        found = [ranks[mine]] if same else ranks if mine == 0 else []
        self._waiting["train"] = [
            tuple(part.to(self.device) for part in observed) for rank in found for observed in rank.get("waiting", [])
        ]
        for name, metric in self._train_metrics():
            if same:
                restore(metric, ranks[mine][name])
            elif mine == 0:
                try:
                    restore(metric, merge(metric, [rank[name] for rank in ranks]))
                except ValueError as error:
                    rank_zero_warn(f"task.metrics: {error}; of this epoch it counts the samples from here on")

    def _train_metrics(self) -> list[tuple[str, Metric]]:
        found = {"mean": self.means["train_"], **dict(self.metrics["train_"].items(copy_state=False))}  # type: ignore[operator]
        return [(name, metric) for name, metric in found.items() if isinstance(metric, Metric)]

    def penalty(self) -> Tensor | float:
        """L1 and L2 penalties of all matrices and filters."""
        if not (self.l1 or self.l2):
            return 0.0
        weights: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad and p.ndim > 1]
        if not weights:
            return 0.0
        penalty = weights[0].new_zeros(())
        if self.l1:
            penalty = penalty + self.l1 * torch.stack(torch._foreach_norm(weights, 1)).sum()
        if self.l2:
            penalty = penalty + self.l2 * torch.stack(torch._foreach_norm(weights)).square().sum()
        return penalty

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over trainable parameters, with its schedule."""
        groups = getattr(self.model, "parameter_groups", None)  # of a model that says which weights decay
        optimizer = self.optimizer(groups() if groups else [p for p in self.parameters() if p.requires_grad])
        # A fused optimizer would undo a gradient scaler's factor itself, too late for gradients to be clipped.
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler(optimizer, **self._total_steps(self.scheduler))
        plan = {"scheduler": scheduler, "interval": self.interval, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": plan}  # type: ignore[return-value]

    def _total_steps(self, scheduler: Callable[..., LRScheduler]) -> dict[str, int]:
        given = scheduler.keywords if isinstance(scheduler, partial) else {}
        if "total_steps" not in inspect.signature(scheduler).parameters or given.get("total_steps") is not None:
            return {}
        steps = self.trainer.estimated_stepping_batches
        if not 0 <= steps < math.inf:
            raise NoTotalSteps(
                "scheduler: the number of training steps is not known; set trainer.max_steps, or scheduler=constant"
            )
        if self.interval == "epoch":
            self.trainer.fit_loop.setup_data()
            batches = self.trainer.num_training_batches
            steps = math.ceil(steps / math.ceil(batches / self.trainer.accumulate_grad_batches))
        return {"total_steps": int(steps)}

    def _observe(self, stage: str, batch: Pair) -> Pair:
        inputs, targets = batch
        outputs = self(inputs)
        losses = self.losses(outputs, targets)
        self._gather(stage, (losses.detach(), outputs.detach(), targets))
        return losses, outputs

    def _observe_training(self, batch: Pair) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs)
        loss = self.mean_loss(outputs, targets)
        self._gather("train", (loss.detach().expand(len(outputs)), outputs.detach(), targets))
        return loss

    def _gather(self, stage: str, observed: Observed) -> None:
        """Count now or later: metrics take as long for a small batch as for many of them."""
        waiting = self._waiting[stage]
        if waiting and waiting[0][1].shape[1:] != observed[1].shape[1:]:
            self._count(stage)
        waiting.append(observed)
        if len(waiting) * observed[1].numel() >= AT_ONCE:
            self._count(stage)

    def _count(self, stage: str) -> None:
        waiting = self._waiting[stage]
        if waiting:
            losses, outputs, targets = (torch.cat(parts) for parts in zip(*waiting, strict=True))
            waiting.clear()
            self.means[f"{stage}_"].update(losses)  # type: ignore[operator]
            self.metrics[f"{stage}_"].update(outputs, targets)  # type: ignore[operator]

    def _report(self, stage: str, loss: str, *, reset: bool = True) -> None:
        self._count(stage)
        mean, metrics = self.means[f"{stage}_"], self.metrics[f"{stage}_"]
        found: dict[str, Any] = {loss: mean.compute(), **metrics.compute()}  # type: ignore[operator]
        if stage == "train":  # to the loggers now: Lightning's turn is after the checkpoint that a kill goes back to
            self.log_dict(found, logger=False)
            told: Any = found | {"epoch": self.current_epoch}
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped - 1  # the epoch's last, as Lightning has it
            self.trainer._logger_connector.log_metrics(told, step)
        else:
            self.log_dict(found)
        if reset:
            mean.reset()  # type: ignore[operator]
            metrics.reset()  # type: ignore[operator]


def _shares(trainer: L.Trainer) -> tuple[int, int]:
    """Ranks that share the samples out, and which of them this is; others see the same as one of these."""
    told = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return told.get("num_replicas", 1), told.get("rank", 0)


STAGES = ("train", "val", "test")


def _watches(scheduler: Callable[..., LRScheduler] | None) -> bool:
    made = scheduler.func if isinstance(scheduler, partial) else scheduler
    return isinstance(made, type) and issubclass(made, ReduceLROnPlateau)
