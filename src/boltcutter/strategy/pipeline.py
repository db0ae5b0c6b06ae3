"""Pipeline parallel: layers are partitioned over ranks, which process a batch in microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from boltcutter.internals import BatchNorm, foreach_norm, move_some
from boltcutter.protocols import NativeTask, SplitsIntoStages, gather_objects
from boltcutter.strategy.averaging import FULL_MODEL, averages_full_model
from boltcutter.strategy.errors import StrategyError, raise_refusals, why_not
from boltcutter.structure import BatchError, split_batch
from boltcutter.task.compiler import CUDA_GRAPH
from boltcutter.topology import PlannedTraining

MAX_SCHEDULES = 8  # cached, one for each shape of batch, each with its buffers


class PipelineStrategy(strategies.DDPStrategy):
    """Split the model into one stage per rank, by its method ``stages(count)``.

    In a training step the microbatches of a batch are scheduled by 1F1B. The outputs of the last stage are broadcast to
    all ranks, and passed to the task's ``training_step`` in place of the model's outputs, so the loss, the metrics and
    all logged values are those of one process, on each rank; a task with ``forward_summary`` is passed the summary
    only. Gradients are those of the mean of ``task.losses``. Checkpoints are those of one process, too.

    Args:
        num_microbatches: Number of microbatches; at least the number of stages. The more, the smaller the bubble.
        module: Name of the task's attribute that holds the model.

    Source: Harlap et al., PipeDream, 2018 (1F1B); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training,
    2021 (flushed at each step).
    """

    strategy_name = "pipeline"

    def __init__(self, num_microbatches: int = 4, *, module: str = "model") -> None:
        if num_microbatches < 1:
            raise ValueError(f"trainer.strategy.num_microbatches={num_microbatches} is not positive; try 4")
        super().__init__()
        self.num_microbatches, self.module = num_microbatches, module
        self._stage: Any = None  # the LocalStage, once there are ranks
        self._schedules: dict[Any, Any] = {}
        self._samples = 1  # of the batch
        self._outputs: list[Tensor | None] = []  # of the whole batch, on the last stage; empty once the task used them
        self._gradients: list[Tensor | None] = []  # of the batch, not yet added to the weights
        self._is_loss_checked = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler; all ranks see the same samples."""
        return {"num_replicas": 1, "rank": 0}

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """Models without stages, batches that do not divide, and what needs all weights or samples in one process."""
        task: Any = planned.task
        model: Any = getattr(task, self.module, None)
        size, count, stages = planned.batch_size, self.num_microbatches, planned.topology.world_size
        if count < stages:
            yield f"trainer.strategy.num_microbatches={count}: fewer than the {stages} stages; try {2 * stages}"
        if size % count:
            yield (
                f"data.batch_size={size} does not divide into trainer.strategy.num_microbatches={count}; "
                f"try data.batch_size={size + -size % count}"
            )
        if model is None and not is_overridden("configure_model", task):
            yield f"trainer.strategy.module={self.module}: the task has no such module to split"
        elif model is not None and not isinstance(model, SplitsIntoStages):
            yield f"trainer.strategy: {type(model).__name__} has no method stages(count); add one, or use trainer=ddp"
        elif model is not None:
            yield from why_not(split_into_stages, model, stages)
        if not hasattr(task, "losses"):
            yield "task: it has no method losses(outputs, targets), which stages need; use trainer=ddp"
        if not task.automatic_optimization:
            yield "task: manual optimization is not supported; use trainer=ddp"
        if isinstance(task, NativeTask) and (task.l1 or task.l2):
            yield "task.l1, task.l2: each rank has only some of the weights; set optimizer.weight_decay instead"
        compiled = getattr(task, "compile_model", False)
        if compiled not in (False, CUDA_GRAPH) or getattr(model, "_compiled_call_impl", None):
            yield f"task.compile={str(compiled or True).lower()}: stages are not compiled; set it to false"
        if averages_full_model(planned.callbacks):
            yield FULL_MODEL
        if planned.precision == "16-mixed":
            yield "trainer.precision=16-mixed: loss scaling is not supported; try bf16-mixed"
        if any(isinstance(part, BatchNorm) for part in task.modules()):
            yield "model.norm=batchnorm: its statistics would be those of microbatches; use another norm"

    def setup(self, trainer: L.Trainer) -> None:
        """Split the model, and replace its ``forward`` by one that runs all stages."""
        task: Any = self.lightning_module
        raise_refusals(self, trainer, task)
        model: Any = getattr(task, self.module, None)
        if model is None:
            raise StrategyError(f"trainer.strategy.module={self.module}: the task has no such module to split")
        if self._stage is None or self._stage.model is not model:
            self._stage, self._schedules = LocalStage(model, self.global_rank, self.world_size), {}
        model.forward = self._forward  # on the instance, so that the keys of checkpoints do not change
        if hasattr(task, "forward_summary"):
            vars(task)["forward_summary"] = self._forward_summary
        # Lightning would clip by the norm of this rank's gradients only.
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip
        super(strategies.DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def model_to_device(self) -> None:
        """Move the task to the device, except for the weights of other stages."""
        move_some(self.lightning_module, self.root_device, lambda tensor: not tensor.is_meta)

    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run the forward and backward passes of all stages, and then the task's step on the outputs."""
        stage = self._stage
        inputs, targets = split_batch(batch)
        if not isinstance(inputs, Tensor):
            raise BatchError("trainer=pipeline: the stages take one tensor, not several inputs; use trainer=fsdp2")
        self._samples = len(inputs)
        before = [weight.grad for weight in stage.weights]
        for weight in stage.weights:
            weight.grad = None
        losses: list[Tensor] = []  # of microbatches, on the last stage
        first, target = [inputs] if stage.first else [], targets if stage.last else None
        self._outputs = [self._schedule(inputs, train=True).step(*first, target=target, losses=losses)]
        stage.add_shared_gradients()
        self._gradients = [weight.grad for weight in stage.weights]
        for weight, gradient in zip(stage.weights, before, strict=True):
            weight.grad = gradient
        loss = super().training_step(batch, *rest, **kwargs)
        if not self._is_loss_checked:
            self._check_loss(loss, self._broadcast("loss", inputs, torch.stack(losses).sum() if losses else None))
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients, which are already computed, to those of the weights."""
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        task: Any = self.lightning_module
        parts = task.trainer.accumulate_grad_batches
        for weight, gradient in zip(self._stage.weights, self._gradients, strict=True):
            if gradient is not None:
                gradient = gradient / parts if parts > 1 else gradient
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self._gradients = []
        return loss

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Total norm of the gradients of all ranks, counting shared parameters once.

        Args:
            parameters: Parameters of this rank.
            norms: Norm of the gradient of each, of shape (number of parameters,).
        """
        not_owned = self._stage.not_owned
        # Selected on the host: copying a mask to a GPU would wait for it.
        counted = [norm for norm, p in zip(norms.unbind(), parameters, strict=True) if id(p) not in not_owned]
        total = torch.stack(counted).square().sum() if counted else norms.new_zeros(())
        dist.all_reduce(total)
        return total.sqrt()

    def gather_names(self, names: list[str]) -> list[str]:
        """Parameter names of all ranks, in the order of stages."""
        return [name for some in gather_objects(names) for name in some]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights on rank 0, those of the stage on other ranks."""
        task: Any = self.lightning_module
        state = task.state_dict(keep_vars=True)
        mine = {key: v.detach().cpu() for key, v in state.items() if id(v) not in self._stage.not_owned}
        return self._gather_on_rank_zero(mine, list(state))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer for all weights on rank 0, for those of the stage on other ranks."""
        found: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {n: kept for n, kept in found["state"].items() if id(weights[n]) not in self._stage.not_owned}
        mine = {n: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in kept.items()} for n, kept in mine.items()}
        return {**found, "state": self._gather_on_rank_zero(mine, list(range(len(weights))))}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the stage, or all weights if the model is not yet split."""
        task: Any = self.lightning_module
        own = task.state_dict()
        found = {k: own[k] if k in own and own[k].is_meta else v for k, v in checkpoint["state_dict"].items()}
        task.load_state_dict(found, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of the stage's weights."""
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            mine = {n for n, weight in zip(numbers, weights, strict=True) if not weight.is_meta}
            states.append({**saved, "state": {n: kept for n, kept in saved["state"].items() if n in mine}})
        super().load_optimizer_state_dict({"optimizer_states": states})

    def teardown(self) -> None:
        """Restore the model's own ``forward``, without moving the task to the CPU: meta tensors cannot be moved."""
        if self._stage is not None:
            vars(self._stage.model).pop("forward", None)
            vars(self.lightning_module).pop("forward_summary", None)
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        task, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = task

    def _forward(self, inputs: Tensor) -> Tensor:
        """Run all stages, in place of the model's own ``forward``."""
        return self._broadcast("outputs", inputs, self._run(inputs))

    def _forward_summary(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run all stages, in place of the task's own ``forward_summary``, which only the last stage calls."""
        stage, task = self._stage, self.lightning_module
        stage.model.forward = self._run  # no broadcast
        made = type(task).forward_summary(task, inputs, targets) if stage.last else self._run(inputs)  # type: ignore
        stage.model.forward = self._forward
        return self._broadcast(targets.shape, inputs, made)

    def _run(self, inputs: Tensor) -> Any:
        """The model's outputs, on the last stage only; those of a training step are already computed."""
        if not self._is_training():
            extra = -len(inputs) % self.num_microbatches  # the last batch of a split may have any size
            padded = torch.cat([inputs, inputs[-1:].expand(extra, *inputs.shape[1:])]) if extra else inputs
            made = self._schedule(inputs, train=False).step(*([padded] if self._stage.first else []))
            return None if made is None else made[: len(inputs)]
        if not self._outputs:
            raise StrategyError("trainer=pipeline: the task calls its model twice in a step; use trainer=ddp")
        return self._outputs.pop()

    def _is_training(self) -> bool:
        return self._stage.model.training and torch.is_grad_enabled()

    def _schedule(self, inputs: Tensor, *, train: bool) -> Any:
        """The schedule for batches of this shape, cached."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        key = (train, inputs.shape, inputs.dtype)
        if key not in self._schedules:
            if len(self._schedules) >= MAX_SCHEDULES:
                self._schedules.clear()
            part = PrecisionStage(self._stage.module, self.precision_plugin)
            stage = PipelineStage(part, self.global_rank, self.world_size, self.root_device)
            if train:
                made: Any = Schedule1F1B(stage, self.num_microbatches, loss_fn=self._loss, scale_grads=False)
            else:
                made = ScheduleGPipe(stage, self.num_microbatches)
            self._schedules[key] = made
        return self._schedules[key]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The contribution of a microbatch to the mean loss of the batch."""
        task: Any = self.lightning_module
        with self.precision_plugin.forward_context():
            loss: Tensor = task.losses(outputs, targets).sum() / self._samples
        return loss

    def _broadcast(self, key: Any, inputs: Tensor, made: Tensor | None) -> Tensor:
        """Broadcast a tensor from the last stage to all ranks; those of one key and shape of inputs are alike."""
        training = self._is_training()
        specs = vars(self._schedule(inputs, train=training)).setdefault("specs", {})
        if key not in specs:
            spec = [(made.shape, made.dtype) if made is not None else None]
            dist.broadcast_object_list(spec, self.world_size - 1)
            specs[key] = spec[0]
        shape, dtype = specs[key]
        made = torch.empty(shape, dtype=dtype, device=self.root_device) if made is None else made.detach().contiguous()
        dist.broadcast(made, self.world_size - 1)
        # The gradients are computed; requires_grad_ lets Lightning call backward on the task's loss all the same.
        return made.requires_grad_(training)

    def _gather_on_rank_zero(self, mine: dict[Any, Any], order: list[Any]) -> dict[Any, Any]:
        """The dictionaries of all ranks merged, in this order of keys, on rank 0; on other ranks their own."""
        gathered: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(mine, gathered)
        if gathered is None:
            return mine
        found = {key: value for some in gathered for key, value in some.items()}
        return {key: found[key] for key in order if key in found}

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        weights = [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
        gradients = [weight.grad for weight in weights]
        # A stage whose weights are all frozen has no gradient, but must take part in the collective.
        norms = torch.stack(foreach_norm(gradients)) if gradients else torch.zeros(0, device=self.root_device)
        norm = self.global_grad_norm(weights, norms)
        nn.utils.clip_grads_with_norm_(weights, clip_val, norm)

    def _check_loss(self, loss: Any, expected: Tensor) -> None:
        """Check that the task's loss is the one whose gradients were computed."""
        tolerance = max(1e-3, 4 * torch.finfo(expected.dtype).eps)  # bfloat16 has 8 significant bits
        if not isinstance(loss, Tensor) or not torch.allclose(loss.detach(), expected, rtol=tolerance, equal_nan=True):
            raise StrategyError(
                "trainer=pipeline: training_step returns another loss than the mean of task.losses; use trainer=ddp"
            )
        self._is_loss_checked = True


class PrecisionStage(nn.Module):
    """A stage that runs in the forward context of the trainer's precision."""

    def __init__(self, module: nn.Module, precision: Any) -> None:
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, x: Tensor) -> Tensor:
        """The stage's outputs."""
        with self.precision.forward_context():
            outputs: Tensor = self.module(x)
        return outputs


class LocalStage:
    """The stage of one rank; parameters of other stages are moved to the meta device, but keep their names.

    So the indices of parameters in optimizers are those of one process; optimizers skip parameters without gradients.

    Args:
        model: Model with a method ``stages(count)``, which returns modules that are called in sequence.
        rank: Rank of this process, and index of its stage.
        count: Number of stages.

    Attributes:
        module: The stage.
        weights: Parameters of the stage, in order.
        not_owned: IDs of parameters that are counted and saved by another rank: those not in this stage, and those
            shared with an earlier one.

    Raises:
        StrategyError: The model does not have as many stages, or a parameter belongs to none.
    """

    def __init__(self, model: nn.Module, rank: int, count: int) -> None:
        stages, owners = split_into_stages(model, count)
        self.model, self.module = model, stages[rank]
        self.first, self.last = rank == 0, rank == count - 1
        self.weights = list(self.module.parameters())
        self._shared = self._shared_parameters(owners, rank, count)
        remote = {key for key, ranks in owners.items() if rank not in ranks}
        del stages  # references to the parameters of other stages
        self.not_owned = {id(weight) for weight in _move_to_meta(model, remote)}
        self.not_owned |= {id(weight) for weight in self.weights if owners[id(weight)][0] < rank}

    def add_shared_gradients(self) -> None:
        """Sum the gradients of parameters that several stages share."""
        for weight, group in self._shared:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def _shared_parameters(self, owners: dict[int, list[int]], rank: int, count: int) -> list[tuple[nn.Parameter, Any]]:
        """Parameters of this stage that other stages share, with the process groups of their ranks."""
        groups: dict[tuple[int, ...], Any] = {tuple(range(count)): None}
        for ranks in map(tuple, owners.values()):
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))  # collective: called on all ranks
        local = {id(weight): weight for weight in self.weights}
        return [(local[key], groups[tuple(ranks)]) for key, ranks in owners.items() if rank in ranks and len(ranks) > 1]


def split_into_stages(model: Any, count: int) -> tuple[list[nn.Module], dict[int, list[int]]]:
    """Split a model, and return the stages, and those that have each parameter, by its ID.

    Raises:
        StrategyError: The model does not have as many stages, or a parameter belongs to none.
    """
    try:
        stages: list[nn.Module] = model.stages(count)
    except ValueError as error:
        raise StrategyError(str(error)) from error
    owners: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            owners.setdefault(id(parameter), []).append(index)
    for name, parameter in model.named_parameters():
        if id(parameter) not in owners:
            raise StrategyError(f"trainer.strategy: no stage of {type(model).__name__} has {name}; add it to one")
    return stages, owners


def _move_to_meta(model: nn.Module, keys: set[int]) -> list[nn.Parameter]:
    """Replace parameters, given by their IDs, by parameters on the meta device; return the new ones."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in keys:
                if id(parameter) not in replaced:
                    empty = torch.empty_like(parameter, device="meta")
                    replaced[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = replaced[id(parameter)]
    return list(replaced.values())
