"""The base class of tasks: optimizer, schedule, penalties, and metrics that are exact for any number of ranks."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from torchmetrics import MeanMetric, Metric, MetricCollection

from boltcutter.internals import (
    batches_with_step,
    find_trainer,
    foreach_mul_,
    hook_name,
    is_accumulating,
    is_last_batch,
    logger_connector,
    scale_outside_step,
)
from boltcutter.protocols import data_parallel, gather_objects
from boltcutter.structure import inputs_of, map_tensors, split_batch
from boltcutter.task.compiler import CUDA_GRAPH, REDUCE_OVERHEAD, Inductor, forbids_graphs
from boltcutter.task.errors import CompilerError, TotalStepsError, call_with_batch
from boltcutter.task.metric_states import get_state, merge_states, plain_tensor, set_state
from boltcutter.task.penalty import penalty
from boltcutter.topology import PlannedTraining

Pair = tuple[Tensor, Tensor]
Observation = tuple[Tensor, ...]  # losses, outputs and targets of a batch
STAGES = ("train", "val", "test")
MAX_PENDING = 1 << 14  # elements in outputs that are accumulated before metrics are updated


class Task(L.LightningModule, ABC):
    """A LightningModule around a model, an optimizer, a scheduler and metrics; subclasses define the loss per sample.

    Losses and metrics are accumulated on the device and reduced over ranks at the end of an epoch, so that a step
    synchronizes neither with the host nor with other ranks.

    Args:
        model: Maps inputs (N, …), or a dictionary, tuple or dataclass of several, to outputs (N, …).
        optimizer: Called with the parameters; returns the optimizer.
        scheduler: Called with the optimizer, and with ``total_steps`` in units of ``interval`` if it has that argument.
        interval: Whether the scheduler is stepped after each optimizer step or each epoch.
        monitor: Metric for ``ReduceLROnPlateau``.
        metrics: By the name under which they are logged.
        l1: Factor of the L1 penalty of weights, without biases and norms, that is added to the training loss.
        l2: Factor of the squared L2 penalty of weights, without biases and norms, that is added to the training loss.
        compile: Whether to compile the model for training, with ``torch.compile``, also with CUDA graphs if
            ``reduce-overhead``, or with XLA if ``xla``; ``cuda-graph`` compiles nothing, but captures whole training
            steps as CUDA graphs. Results differ only by rounding.
        channels_last: Whether to use the channels-last memory format, which is faster for convolutions; ignored if the
            model is compiled, as compilers choose the format themselves.

    Attributes:
        kind: What targets are; compared with the ``kind`` of the data module.
        gradient_norm: Norm of all gradients before clipping, if a callback has computed it in this step.

    Raises:
        ValueError: A factor is negative, or ``ReduceLROnPlateau`` would be stepped after each optimizer step.
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
        compile: bool | Literal["reduce-overhead", "cuda-graph", "xla"] = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("l1", l1), ("l2", l2)):
            if value < 0:
                raise ValueError(f"task.{name}={value} would reward large weights; try 0")
        if interval == "step" and _needs_metric(scheduler):
            raise ValueError(
                f"task.interval={interval} does not fit ReduceLROnPlateau, as {monitor} is unknown after each step; "
                "set task.interval=epoch"
            )
        self.model = model
        self._has_groups = hasattr(model, "parameter_groups")  # checked before FSDP wraps the model
        self.compile_model, self.channels_last = compile, channels_last and compile in (False, CUDA_GRAPH)
        self._compiler: Any = None  # called with inputs, and has ``recompile_reasons``
        for weight in model.parameters() if self.channels_last else ():
            if weight.ndim == 4 and weight.shape[1] > 1:  # with one channel, gradients are contiguous
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.gradient_norm: Tensor | None = None
        self.optimizer, self.scheduler = optimizer, scheduler
        self.interval, self.monitor = interval, monitor
        self.l1, self.l2 = l1, l2
        self._num_weights = 0  # before the strategy shards them
        # Groups would be formed by states that happen to be equal after the first batches.
        collection = MetricCollection(dict(metrics or {}), compute_groups=False)
        self.metrics = nn.ModuleDict({f"{stage}_": collection.clone(prefix=f"{stage}/") for stage in STAGES})
        # Without the check for NaN, which would synchronize the host with the device at each step.
        self.means = nn.ModuleDict({f"{stage}_": MeanMetric(nan_strategy="disable") for stage in STAGES})
        self._pending: dict[str, list[Observation]] = {stage: [] for stage in STAGES}
        self._step_logs: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets _current_fx_name many times a step; skip nn.Module.__setattr__, which is slow.
        if name in ("_current_fx_name", "gradient_norm"):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, bypassing Lightning's result collection for scalars that are logged in a training step.

        The collection takes as long as a step of a small model. The values are logged at the end of the step.
        """
        scalar = isinstance(value, int | float | Tensor) and not args and options.keys() <= {"sync_dist", "batch_size"}
        if not scalar or hook_name(self) not in ("training_step", "on_train_batch_end"):
            super().log(name, value, *args, **options)
            return
        if isinstance(value, Tensor):
            value = value.detach()
            if options.get("sync_dist"):
                value = self.trainer.strategy.reduce(value, reduce_op="mean")
        self._step_logs[name] = value

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, shape (N,), as with ``reduction="none"``."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of ``losses``, the training loss; subclasses may compute it more directly."""
        return self.losses(outputs, targets).mean()

    @abstractmethod
    def predictions(self, outputs: Tensor) -> Tensor:
        """Convert outputs to predictions: class probabilities (N, C), or target values (N, T)."""

    @property
    def logged_metrics(self) -> set[str]:
        """Names of all metrics that this task logs, to check those that callbacks monitor."""
        names = {"train/loss", "train/loss_epoch", "val/loss", "test/loss"}
        for collection in self.metrics.values():
            names |= set(collection.keys(keep_base=False))  # type: ignore[operator]
        return names

    def setup(self, stage: str) -> None:
        """Prepare to compile the model for training only, as batch sizes vary in evaluation.

        Raises:
            CompilerError: The compiler is not installed, or does not support the strategy.
        """
        self._num_weights = sum(parameter.ndim > 1 for parameter in self.model.parameters())
        if self.compile_model == CUDA_GRAPH and stage == "fit":
            self._capture_steps()
        elif self.compile_model and stage == "fit":
            trainer, make = find_trainer(self), self._find_compiler()
            if trainer:
                data = getattr(trainer, "datamodule", None)
                for text in self.refuses_training(PlannedTraining.of(trainer, self, data)):
                    raise CompilerError(text)
            if self.compile_model == REDUCE_OVERHEAD:
                reason = forbids_graphs(trainer)
                make = partial(Inductor, graphs=reason is None)
                if reason:
                    rank_zero_warn(
                        f"task.compile={REDUCE_OVERHEAD}: {reason}; compiled without CUDA graphs, as by true"
                    )
            self._compiler = make(self.model)

    def _capture_steps(self) -> None:
        """Let steps of this training be captured as CUDA graphs, or say why they are not."""
        trainer = find_trainer(self)
        if reason := forbids_graphs(trainer, whole_step=True):
            rank_zero_warn(f"task.compile={CUDA_GRAPH}: {reason}; steps run without CUDA graphs, as by false")
            return
        from boltcutter.task import cuda_graph

        cuda_graph.CapturedSteps(trainer, self, cuda_graph.CudaGraphs(trainer.strategy.root_device))

    def _find_compiler(self) -> Any:
        """Class of the compiler that ``compile`` selects."""
        if self.compile_model == "xla":
            from boltcutter.task.xla import XLA

            return XLA
        return Inductor

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """What the compiler does not support, or this machine lacks to compile."""
        if self.compile_model and self.compile_model != CUDA_GRAPH:
            compiler = self._find_compiler()
            if planned.device:
                yield from compiler.missing()
            if compiler is not Inductor:
                yield from compiler.refusals(planned)

    def recompile_reasons(self) -> list[str]:
        """Return the reason of each recompilation of the model since training started."""
        reasons: list[str] = self._compiler.recompile_reasons() if self._compiler else []
        return reasons

    def forward(self, inputs: Any) -> Tensor:
        """Return the model's outputs, from the compiled model while training; inputs may have any structure."""
        if self.channels_last:
            inputs = map_tensors(inputs, _to_channels_last)
        outputs: Tensor
        if self._compiler and self.training:
            outputs = self._compiler(inputs)
            return outputs
        with torch.compiler.set_stance("force_eager") if self._compiler else nullcontext():
            outputs = self.model(inputs)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of the batch, with penalties."""
        loss = self._training_loss(batch)
        if self.l1 or self.l2:
            loss = loss + self.penalty()
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the values of the step, after the last of accumulated batches as Lightning does."""
        if not self._step_logs or is_accumulating(self.trainer):
            return
        values, self._step_logs = self._step_logs, {}
        self.trainer.callback_metrics.update(
            {name: value if isinstance(value, Tensor) else torch.tensor(float(value)) for name, value in values.items()}
        )
        connector = logger_connector(self.trainer)
        if connector.should_update_logs:
            connector.log_metrics(values)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update losses and metrics."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update losses and metrics, and return the loss and prediction of each sample."""
        losses, outputs = self._evaluate("test", batch)
        return {"losses": losses, "predictions": self.predictions(outputs)}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return predictions for a batch of inputs, or of inputs and targets."""
        return self.predictions(self(inputs_of(batch)))

    def on_train_epoch_end(self) -> None:
        """Log the epoch's metrics; keep their state if training stops within it, for a resumed run."""
        self._log_epoch("train", "train/loss_epoch", reset=is_last_batch(self.trainer))

    def on_validation_epoch_start(self) -> None:
        """Broadcast buffers from rank 0, which saves them, as BatchNorm statistics differ between DDP ranks."""
        if data_parallel(self.trainer.strategy).size == self.trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def on_validation_epoch_end(self) -> None:
        """Log the epoch's metrics."""
        self._log_epoch("val", "val/loss")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the split."""
        self._log_epoch("test", "test/loss")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set gradients to ``None``, without the profiler record of ``Optimizer.zero_grad``."""
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
        """Clip by ``gradient_norm`` if it is known and the precision plugin does not override clipping."""
        norm, self.gradient_norm = self.gradient_norm, None
        plugin = type(self.trainer.precision_plugin)
        overridden = (
            plugin.clip_gradients not in (Precision.clip_gradients, MixedPrecision.clip_gradients)
            or plugin.clip_grad_by_norm is not Precision.clip_grad_by_norm
        )
        if overridden or norm is None or not gradient_clip_val or gradient_clip_algorithm not in (None, "norm"):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif (
            norm.device.type != "cpu" or "is_capturing" in vars(self) or norm.item() > gradient_clip_val
        ):  # no synchronization with a GPU
            found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in found]  # shards of FSDP2
            if gradients:  # nn.utils.clip_grads_with_norm_ takes half as long again
                foreach_mul_(gradients, (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state of the training metrics within the epoch, of each data-parallel rank."""
        local: dict[str, Any] = {name: get_state(metric) for name, metric in self._train_metrics()}
        local["pending"] = [[plain_tensor(tensor) for tensor in observation] for observation in self._pending["train"]]
        ranks = gather_objects(local)
        checkpoint["train_metrics"] = ranks[:: len(ranks) // data_parallel(self.trainer.strategy).size]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the position of a schedule, but not its length, and the state of the training metrics.

        If the number of ranks has changed, rank 0 gets the merged state of all.
        """
        trainer = find_trainer(self)
        if trainer is None or trainer.state.fn != "fit":
            return
        for state in checkpoint.get("lr_schedulers", []):
            for name in ("total_steps", "_schedule_phases"):  # the latter are OneCycleLR's
                state.pop(name, None)
        if not (ranks := checkpoint.get("train_metrics")):
            return
        world_size, rank = data_parallel(trainer.strategy)
        same = len(ranks) == world_size
        states = [ranks[rank]] if same else ranks if rank == 0 else []
        self._pending["train"] = [
            tuple(tensor.to(self.device) for tensor in observation)
            for state in states
            for observation in state.get("pending", [])
        ]
        for name, metric in self._train_metrics():
            if same:
                set_state(metric, ranks[rank][name])
            elif rank == 0:
                try:
                    set_state(metric, merge_states(metric, [state[name] for state in ranks]))
                except ValueError as error:
                    rank_zero_warn(f"task.metrics.{name}: {error}; in this epoch it starts from the resumed step")

    def _train_metrics(self) -> list[tuple[str, Metric]]:
        metrics = {"mean": self.means["train_"], **dict(self.metrics["train_"].items(copy_state=False))}  # type: ignore[operator]
        return [(name, metric) for name, metric in metrics.items() if isinstance(metric, Metric)]

    def penalty(self) -> Tensor | float:
        """Return the L1 and L2 penalties of all trainable weights but biases and norms."""
        return penalty(self.model, self.l1, self.l2, self._num_weights)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create the optimizer over trainable parameters, and the scheduler."""
        model: Any = self.model
        groups = model.parameter_groups() if self._has_groups else [p for p in self.parameters() if p.requires_grad]
        optimizer = self.optimizer(groups)
        scale_outside_step(optimizer)
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler(optimizer, **self._total_steps(self.scheduler))
        lr_scheduler = {"scheduler": scheduler, "interval": self.interval, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}  # type: ignore[return-value]

    def _total_steps(self, scheduler: Callable[..., LRScheduler]) -> dict[str, int]:
        keywords = scheduler.keywords if isinstance(scheduler, partial) else {}
        if "total_steps" not in inspect.signature(scheduler).parameters or keywords.get("total_steps") is not None:
            return {}
        self.scheduled_steps = steps = self.trainer.estimated_stepping_batches
        if not 0 <= steps < math.inf:
            raise TotalStepsError(
                "scheduler: the number of training steps is unknown; set trainer.max_steps, or scheduler=constant"
            )
        if self.interval == "epoch":
            self.trainer.fit_loop.setup_data()
            batches = self.trainer.num_training_batches
            steps = math.ceil(steps / math.ceil(batches / self.trainer.accumulate_grad_batches))
        return {"total_steps": int(steps)}

    def _evaluate(self, stage: str, batch: Any) -> Pair:
        inputs, targets = split_batch(batch)
        outputs = self(inputs)
        losses = call_with_batch(self.losses, outputs, targets)
        self._accumulate(stage, (losses.detach(), outputs.detach(), targets))
        return losses, outputs

    def _training_loss(self, batch: Any) -> Tensor:
        inputs, targets = split_batch(batch)
        outputs = self(inputs)
        loss: Tensor = call_with_batch(self.mean_loss, outputs, targets)
        self._accumulate("train", (loss.detach().expand(len(outputs)), outputs.detach(), targets))
        return loss

    def _accumulate(self, stage: str, observation: Observation) -> None:
        """Update metrics with several small batches at once, as an update takes as long for one of them."""
        pending = self._pending[stage]
        if pending and pending[0][1].shape[1:] != observation[1].shape[1:]:
            self._update_metrics(stage)
        pending.append(observation)
        if len(pending) * observation[1].numel() >= MAX_PENDING:
            self._update_metrics(stage)

    def _update_metrics(self, stage: str) -> None:
        pending = self._pending[stage]
        if pending:
            losses, outputs, targets = (torch.cat(tensors) for tensors in zip(*pending, strict=True))
            pending.clear()
            self.means[f"{stage}_"].update(losses)  # type: ignore[operator]
            with CountOnDevice() if losses.is_cuda else nullcontext():
                call_with_batch(self.metrics[f"{stage}_"].update, outputs, targets)  # type: ignore[arg-type]

    def _log_epoch(self, stage: str, loss: str, *, reset: bool = True) -> None:
        self._update_metrics(stage)
        mean, metrics = self.means[f"{stage}_"], self.metrics[f"{stage}_"]
        values: dict[str, Any] = {loss: mean.compute(), **metrics.compute()}  # type: ignore[operator]
        if stage == "train":  # to loggers now, as Lightning logs after the checkpoint from which a killed run resumes
            self.log_dict(values, logger=False)
            step = batches_with_step(self.trainer) - 1  # the epoch's last, as in Lightning
            logger_connector(self.trainer).log_metrics(values | {"epoch": self.current_epoch}, step)
        else:
            self.log_dict(values)
        if reset:
            mean.reset()  # type: ignore[operator]
            metrics.reset()  # type: ignore[operator]


class CountOnDevice(TorchFunctionMode):
    """Counts without waiting for the device, as ``torch.bincount`` does for the largest value, which sets the length.

    Most metrics of torchmetrics give the length as ``minlength``; a larger value is then an error here, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or count."""
        options = kwargs or {}
        if func is torch.bincount and len(args) == 1 and options.get("minlength") and options.keys() == {"minlength"}:
            values = args[0].long()
            return values.new_zeros(options["minlength"]).scatter_add_(0, values, torch.ones_like(values))
        return func(*args, **options)


def _to_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _needs_metric(scheduler: Callable[..., LRScheduler] | None) -> bool:
    cls = scheduler.func if isinstance(scheduler, partial) else scheduler
    return isinstance(cls, type) and issubclass(cls, ReduceLROnPlateau)
