"""Pipeline parallel: each rank has some of the layers, and parts of a batch flow through all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from boltcutter.strategy.stage import LocalStage, PipelineError

SCHEDULES = 8  # one for each shape of batch, each with buffers


class PipelineStrategy(strategies.DDPStrategy):
    """Has the model cut itself, by its method ``stages(count)``, into as many modules as there are ranks.

    In a training step a batch goes through in parts, forward and backward by turns (1F1B). The outputs of the last
    stage then go to all ranks, and the task's ``training_step`` makes of them what it would make of the whole model's:
    loss, metrics and what is logged are those of one process, on each rank. Gradients are those of the mean of
    ``task.losses``. Checkpoints are those of one process, too.

    Args:
        num_microbatches: Parts of a batch; as many as there are stages, or more: the more, the less do stages wait.
        module: Which part of the task is cut.
        process_group_backend: None: what the device asks for.

    Source: Harlap et al., PipeDream, 2018 (1F1B); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training,
    2021 (flushed at each step).
    """

    strategy_name = "pipeline"

    def __init__(
        self, num_microbatches: int = 4, *, module: str = "model", process_group_backend: str | None = None
    ) -> None:
        if num_microbatches < 1:
            raise ValueError(f"trainer.strategy.num_microbatches={num_microbatches} is not a number of parts; try 4")
        super().__init__(process_group_backend=process_group_backend)
        self.num_microbatches, self.module = num_microbatches, module
        self._cut: LocalStage | None = None
        self._schedules: dict[Any, Any] = {}
        self._samples = 1  # of the batch
        self._outputs: Tensor | None = None  # of the whole batch, not yet taken by the task
        self._gradients: list[Tensor | None] = []  # of the batch, not yet given to the weights
        self._expected: Tensor | None = None  # loss, as long as nobody has seen whether the task gives it
        self._looked = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks see the same samples."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: L.Trainer) -> None:
        """Cut the model, and have its calls go through all stages.

        Raises:
            PipelineError: It cannot be, or the training asks for what pipelines have not.
        """
        self._check(trainer)
        task: Any = self.lightning_module
        model: Any = getattr(task, self.module)
        if self._cut is None or self._cut.model is not model:
            self._cut, self._schedules = LocalStage(model, self.global_rank, self.world_size), {}
        model.forward = self._forward  # on the instance, so that keys of checkpoints stay as they are
        # Lightning would clip by the norm of this rank's gradients.
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip
        super(strategies.DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def model_to_device(self) -> None:
        """Move the task, but for weights that other ranks have."""
        task: Any = self.lightning_module
        task._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))
        task._device = self.root_device

    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Send the batch through, forward and back; then let the task see the outputs."""
        task: Any = self.lightning_module
        cut = self._known()
        inputs, targets = batch
        self._samples = len(inputs)
        before = [weight.grad for weight in cut.weights]
        for weight in cut.weights:
            weight.grad = None
        schedule = self._schedule(inputs, train=True)
        made = schedule.step(*([inputs] if cut.first else []), **({"target": targets} if cut.last else {}))
        cut.add_shared_gradients()
        self._gradients = [weight.grad for weight in cut.weights]
        for weight, gradient in zip(cut.weights, before, strict=True):
            weight.grad = gradient
        # Not the numbers: those are there. What the task makes of it needs something to go backward to.
        self._outputs = self._from_last(schedule, made).detach().requires_grad_()
        if not self._looked:
            with self.precision_plugin.forward_context():
                self._expected = task.losses(self._outputs, targets).mean().detach()
        loss = super().training_step(batch, *rest, **kwargs)
        if not self._looked:
            self._look(loss)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Give the weights their gradients, which are there already."""
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        parts = self._trainer_of().accumulate_grad_batches
        for weight, gradient in zip(self._known().weights, self._gradients, strict=True):
            if gradient is not None:
                gradient = gradient / parts if parts > 1 else gradient
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self._gradients = []
        return loss

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        """The norm of all ranks' gradients, those that several have counted once.

        Args:
            parameters: This rank's.
            norms: Of the gradient of each.
        """
        elsewhere = self._known().elsewhere
        counted = torch.tensor([id(p) not in elsewhere for p in parameters], dtype=torch.bool, device=norms.device)
        total = torch.where(counted, norms, 0).square().sum()
        dist.all_reduce(total)
        return total.sqrt()

    def gather_names(self, mine: list[str]) -> list[str]:
        """What all ranks have, one after another."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return [one for some in everyone for one in some]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights on the first rank, this rank's own on others."""
        task: Any = self.lightning_module
        state = task.state_dict(keep_vars=True)
        kept = {key: v.detach().cpu() for key, v in state.items() if not v.is_meta}
        return self._gathered(
            {k: v for k, v in kept.items() if id(state[k]) not in self._known().elsewhere}, list(state)
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Likewise of an optimizer."""
        found: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {n: kept for n, kept in found["state"].items() if id(weights[n]) not in self._known().elsewhere}
        mine = {n: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in kept.items()} for n, kept in mine.items()}
        return {**found, "state": self._gathered(mine, list(range(len(weights))))}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's weights, or all as long as the model is not cut."""
        task: Any = self.lightning_module
        own = task.state_dict()
        found = {k: own[k] if k in own and own[k].is_meta else v for k, v in checkpoint["state_dict"].items()}
        task.load_state_dict(found, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what belongs to this rank's weights."""
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            mine = {n for n, weight in zip(numbers, weights, strict=True) if not weight.is_meta}
            states.append({**saved, "state": {n: kept for n, kept in saved["state"].items() if n in mine}})
        super().load_optimizer_state_dict({"optimizer_states": states})

    def teardown(self) -> None:
        """Give the model its own calls back; weights that are elsewhere cannot be moved anywhere."""
        if self._cut is not None:
            vars(self._cut.model).pop("forward", None)
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        task, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = task

    def _forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the model's own."""
        cut = self._known()
        if inputs.is_meta or args or kwargs:  # somebody counts operations, on the whole model without numbers
            counted: Tensor = type(cut.model).forward(cut.model, inputs, *args, **kwargs)
            return counted
        if cut.model.training and torch.is_grad_enabled():
            outputs, self._outputs = self._outputs, None
            if outputs is None:
                raise PipelineError("trainer=pipeline: the task calls its model twice in a step; take trainer=ddp")
            return outputs
        schedule = self._schedule(inputs, train=False)
        return self._from_last(schedule, schedule.step(*([inputs] if cut.first else [])))

    def _schedule(self, inputs: Tensor, *, train: bool) -> Any:
        """What sends batches of this shape through."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        key = (train, inputs.shape, inputs.dtype)
        if key not in self._schedules:
            if len(self._schedules) >= SCHEDULES:
                self._schedules.clear()
            part = PrecisionStage(self._known().part, self.precision_plugin)
            stage = PipelineStage(part, self.global_rank, self.world_size, self.root_device)
            if train:
                made: Any = Schedule1F1B(stage, self.num_microbatches, loss_fn=self._loss, scale_grads=False)
            else:  # the last batch of a split may have any size
                made = ScheduleGPipe(stage, self.num_microbatches if len(inputs) % self.num_microbatches == 0 else 1)
            self._schedules[key] = made
        return self._schedules[key]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A part's share of the loss of the batch."""
        task: Any = self.lightning_module
        with self.precision_plugin.forward_context():
            share: Tensor = task.losses(outputs, targets).sum() / self._samples
        return share

    def _from_last(self, schedule: Any, made: Tensor | None) -> Tensor:
        """The outputs of the last stage, on all ranks."""
        if not hasattr(schedule, "form"):
            form = [(made.shape, made.dtype) if made is not None else None]
            dist.broadcast_object_list(form, self.world_size - 1)
            schedule.form = form[0]
        shape, dtype = schedule.form
        outputs = torch.empty(shape, dtype=dtype, device=self.root_device) if made is None else made.detach()
        dist.broadcast(outputs, self.world_size - 1)
        return outputs

    def _gathered(self, mine: dict[Any, Any], order: list[Any]) -> dict[Any, Any]:
        """What all ranks have, in order, on the first; on others their own."""
        everyone: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(mine, everyone)
        if everyone is None:
            return mine
        found = {key: value for some in everyone for key, value in some.items()}
        return {key: found[key] for key in order if key in found}

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        weights = [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
        gradients = [weight.grad for weight in weights]
        # A stage whose weights are all frozen has no gradient, but must answer the others.
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0, device=self.root_device)
        norm = self.global_grad_norm(weights, norms)
        if gradients:
            torch._foreach_mul_(gradients, (clip_val / (norm + 1e-6)).clamp(max=1.0))

    def _look(self, loss: Any) -> None:
        """See that the task's loss is the one whose gradients were made."""
        assert self._expected is not None
        if not isinstance(loss, Tensor) or not torch.allclose(loss.detach(), self._expected, rtol=1e-3, equal_nan=True):
            raise PipelineError(
                "trainer=pipeline: training_step gives another loss than the mean of task.losses; take trainer=ddp"
            )
        self._looked = True

    def _known(self) -> LocalStage:
        assert self._cut is not None
        return self._cut

    def _trainer_of(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _check(self, trainer: L.Trainer) -> None:
        """Refuse what pipelines have not.

        Raises:
            PipelineError: There is some.
        """
        task: Any = self.lightning_module
        model = getattr(task, self.module, None)
        size = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
        parts, stages = self.num_microbatches, self.world_size
        if parts < stages:
            raise PipelineError(
                f"trainer.strategy.num_microbatches={parts}: {stages} stages need as many; try {2 * stages}"
            )
        if size and size % parts:
            raise PipelineError(
                f"data.batch_size={size} does not divide into trainer.strategy.num_microbatches={parts}; "
                f"try data.batch_size={size + -size % parts}"
            )
        if not callable(getattr(model, "stages", None)):
            raise PipelineError(
                f"trainer.strategy: {type(model).__name__} does not say how it is cut into stages; give it a method "
                "stages(count), or take trainer=ddp"
            )
        for text, holds in _refused(trainer, task, model).items():
            if holds:
                raise PipelineError(text)


def _refused(trainer: L.Trainer, task: Any, model: Any) -> dict[str, bool]:
    """What pipelines cannot do, and whether it is asked for."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return {
        "task: it has no losses(outputs, targets), which stages need; take trainer=ddp": not hasattr(task, "losses"),
        "task: it steps its optimizers itself, which stages cannot; take trainer=ddp": not task.automatic_optimization,
        "task.l1, task.l2: each rank has some of the weights alone; set optimizer.weight_decay instead": bool(
            getattr(task, "l1", 0) or getattr(task, "l2", 0)
        ),
        "task.compile=true: stages are not compiled; set it to false": bool(
            getattr(model, "_compiled_call_impl", None)
        ),
        "callback.ema: each rank has some of the weights alone; leave it out": any(
            isinstance(callback, WeightAveraging) for callback in callbacks
        ),
        "trainer.precision=16-mixed: no gradients are scaled where ranks have other layers; try bf16-mixed": (
            getattr(trainer.precision_plugin, "scaler", None) is not None
        ),
        "model.norm=batchnorm: parts of a batch would be measured; take another norm": any(
            isinstance(part, _BatchNorm) for part in task.modules()
        ),
    }


class PrecisionStage(nn.Module):
    """A stage that computes as the trainer's precision says."""

    def __init__(self, part: nn.Module, precision: Any) -> None:
        super().__init__()
        self.part, self.precision = part, precision

    def forward(self, x: Tensor) -> Tensor:
        """The stage's outputs."""
        with self.precision.forward_context():
            outputs: Tensor = self.part(x)
        return outputs
