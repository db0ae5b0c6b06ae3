"""Sharded models: weights, gradients and optimizer state (FSDP2), and each matrix (tensor parallel)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
from lightning.pytorch import strategies
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.sharded_checkpoint import WEIGHTS, load_into
from boltcutter.internals import move_some, tree_map_only
from boltcutter.protocols import NativeTask, ShardsWeights
from boltcutter.strategy.averaging import FULL_MODEL, averages_full_model
from boltcutter.strategy.errors import StrategyError, raise_refusals, why_not
from boltcutter.strategy.units import fully_shard_units
from boltcutter.topology import PlannedTraining


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` for any model: sharded by blocks, and its matrices by ``shard(mesh)``.

    With ``bf16-mixed``, weights are gathered in bfloat16, and gradients reduced in float32.

    Args:
        data_parallel_size: Number of ranks over which the batch and the weights are sharded; ``auto``: the number of
            ranks divided by ``tensor_parallel_size``.
        tensor_parallel_size: Number of ranks over which each matrix is sharded; they see the same samples.
        save_distributed_checkpoint: Whether each rank writes its shard of a checkpoint, instead of rank 0 writing the
            full one. Either can be resumed with another number of ranks.
        cpu_offload: Whether to keep weights, gradients and optimizer state in host memory while they are not used.
        module: Name of the task's attribute that holds the model; a task with other weights is sharded as a whole.
        options: Arguments of Lightning's ``ModelParallelStrategy``.
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        *,
        save_distributed_checkpoint: bool = False,
        cpu_offload: bool = False,
        module: str = "model",
        **options: Any,
    ) -> None:
        if tensor_parallel_size < 1:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={tensor_parallel_size} is not a number of ranks; try 1"
            )
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, **options)
        self.module, self.cpu_offload = module, cpu_offload
        self._path = ""  # of the checkpoint that was last loaded

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """Numbers of ranks that do not divide, what needs the full model, and models that cannot be sharded."""
        ranks, split = planned.topology.world_size, int(self._tensor_parallel_size)
        whole = self._data_size(ranks)
        remedy = "tensor_parallel_size=1" if ranks % split else "data_parallel_size=auto"
        if whole * split != ranks:
            yield (
                f"trainer.strategy.data_parallel_size={whole}, tensor_parallel_size={split}: their product is not "
                f"{ranks}, the number of ranks; try {remedy}"
            )
        if self.cpu_offload and planned.device == "cpu":
            yield "trainer.strategy.cpu_offload=true: on CPUs everything is in host memory; set it to false"
        if self._save_distributed_checkpoint:
            setting, writer = "trainer.strategy.save_distributed_checkpoint=true", planned.checkpoint_io
            if not isinstance(writer, AtomicCheckpointIO):
                yield f"{setting}: {type(writer).__name__} does not support it; use the default checkpoint_io"
            elif writer.asynchronous:
                yield f"{setting}: ranks write their shards together; set checkpoint_io.asynchronous=false"
        if averages_full_model(planned.callbacks):
            yield FULL_MODEL
        model = getattr(planned.task, self.module, None)
        if split > 1 and isinstance(model, nn.Module):
            if not isinstance(model, ShardsWeights):
                yield self._no_shard(model)
            yield from why_not(getattr(model, "check_shards", None), split)

    def _data_size(self, ranks: int) -> int:
        """Number of ranks that shard the batch."""
        given = self._data_parallel_size
        return max(1, ranks // int(self._tensor_parallel_size)) if given == "auto" else int(given)

    def _no_shard(self, model: object) -> str:
        return (
            f"trainer.strategy.tensor_parallel_size={self._tensor_parallel_size}: {type(model).__name__} has "
            "no method shard(mesh), which shards its matrices; add one, or set tensor_parallel_size=1"
        )

    def setup_environment(self) -> None:
        """Initialize the process group, and shard the model when Lightning calls the task's ``configure_model``."""
        task: Any = self.lightning_module
        raise_refusals(self, task.trainer, task)
        self._data_parallel_size = self._data_size(self.num_nodes * self.num_processes)
        if self.cpu_offload:  # gradients in host memory are reduced by gloo
            self._process_group_backend = self._process_group_backend or f"cpu:gloo,{self.root_device.type}:nccl"
        super().setup_environment()
        configure = task.configure_model

        def configure_and_shard() -> None:
            configure()
            self._shard()

        task.configure_model = configure_and_shard

    def model_to_device(self) -> None:
        """Move the task to the device, except for offloaded weights."""
        task: Any = self.lightning_module
        if not self.cpu_offload:
            super().model_to_device()
            return
        offloaded = {id(parameter) for parameter in task.parameters()}
        move_some(task, self.root_device, lambda tensor: id(tensor) not in offloaded)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler; ranks of one tensor-parallel group see the same samples."""
        if self._device_mesh is None:  # before the process group is initialized
            size = self._data_size(self.num_nodes * self.num_processes)
            return {"num_replicas": size, "rank": self.global_rank // int(self._tensor_parallel_size)}
        return super().distributed_sampler_kwargs

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores optimizers, as with any other strategy."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights: the shard of each rank, or the full weights on rank 0."""
        task: Any = self.lightning_module
        orders = self._orders()
        return self._on_rank_zero({k: self._saved(value, orders.get(k)) for k, value in task.state_dict().items()})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer: the shard of each rank, or the full state on rank 0."""
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        orders = self._orders_of(optimizer)
        for number, kept in state["state"].items():
            state["state"][number] = {name: self._saved(value, orders.get(number)) for name, value in kept.items()}
        return self._on_rank_zero(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded checkpoint from all ranks, or a full one from rank 0."""
        path, writer = self.broadcast(str(filepath)), self.checkpoint_io
        if self._save_distributed_checkpoint:
            keys = [key for key in WEIGHTS if key in checkpoint]
            orders = {f"{key}.{name}": order for key in keys for name, order in self._orders().items()}
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            for place, (optimizer, saved) in enumerate(pairs):
                for number, order in self._orders_of(optimizer).items():
                    names = [n for n, v in saved["state"].get(number, {}).items() if isinstance(v, DTensor)]
                    orders |= {f"optimizer_states.{place}.state.{number}.{name}": order for name in names}
            writer.save_sharded(checkpoint, path, orders)  # type: ignore[attr-defined]
        elif self.is_global_zero:
            writer.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; each rank reads its shards of the tensors later."""
        self._path = self.broadcast(str(checkpoint_path))
        lazily = {"lazy": True} if isinstance(self.checkpoint_io, AtomicCheckpointIO) else {}
        return self.checkpoint_io.load_checkpoint(self._path, weights_only=weights_only, **lazily)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shard of the weights."""
        task: Any = self.lightning_module
        like = {name: (tensor, self._orders().get(name)) for name, tensor in task.state_dict().items()}
        state = checkpoint["state_dict"]
        # EMA passes the weights in place of the average.
        key = next(key for key in WEIGHTS if checkpoint.get(key) is state)
        task.load_state_dict(self._shards(checkpoint, key, state, like), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shard of the optimizer states."""
        for place, (optimizer, saved) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            weights, orders = _weights(optimizer), self._orders_of(optimizer)
            ours = {number: n for n, number in enumerate(n for group in saved["param_groups"] for n in group["params"])}
            kept = {(number, name): value for number, state in saved["state"].items() for name, value in state.items()}
            tensors = {f"{number}.{name}": v for (number, name), v in kept.items() if isinstance(v, Tensor)}
            like = {f"{n}.{name}": (weights[ours[n]], orders.get(ours[n])) for n, name in kept}
            parts = self._shards(checkpoint, f"optimizer_states.{place}.state", tensors, like)
            state: dict[Any, dict[str, Any]] = {number: {} for number in saved["state"]}
            for (number, name), value in kept.items():
                state[number][name] = parts.get(f"{number}.{name}", value)
            optimizer.load_state_dict({**saved, "state": state})

    def teardown(self) -> None:
        """Wait until checkpoints are written, which Lightning's strategy omits."""
        super().teardown()
        self.checkpoint_io.teardown()

    def _orders(self) -> dict[str, Tensor]:
        """Permutations of the rows of weights, by name, where the model has permuted them for sharding."""
        model: Any = getattr(self.lightning_module, self.module, None)
        permutations: dict[str, Tensor] = getattr(model, "row_permutations", {})
        return {f"{self.module}.{name}": order for name, order in permutations.items()}

    def _orders_of(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """The permutations by the index of the weight in the optimizer."""
        task: Any = self.lightning_module
        named = dict(task.named_parameters())
        orders = {id(named[name]): order for name, order in self._orders().items()}
        return {n: orders[id(weight)] for n, weight in enumerate(_weights(optimizer)) if id(weight) in orders}

    def _saved(self, value: Any, order: Tensor | None) -> Any:
        """The shard for a sharded checkpoint, else the full tensor in its original order."""
        if self._save_distributed_checkpoint or not isinstance(value, DTensor):
            return value
        full: Tensor = cast(DTensor, value.to(self.root_device)).full_tensor()  # collective: called on all ranks
        if not self.is_global_zero:
            return full.new_empty(0)
        return full.cpu() if order is None else full.cpu()[order.argsort()]

    def _on_rank_zero(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._save_distributed_checkpoint or self.is_global_zero else {}

    def _shards(
        self,
        checkpoint: Mapping[str, Any],
        key: str,
        given: Mapping[str, Tensor],
        like: Mapping[str, tuple[Tensor, Tensor | None]],
    ) -> dict[str, Tensor]:
        """This rank's shards of the tensors of a checkpoint, sharded and permuted like those of the same name.

        Args:
            checkpoint: The loaded checkpoint.
            key: Prefix of the names in a sharded checkpoint.
            given: Tensors by name; placeholders if the checkpoint is sharded.
            like: The model's tensors, with their permutations, by name.
        """
        found = dict(given)
        if "shards" in checkpoint:
            for name, tensor in given.items():
                model, order = like.get(name, (tensor, None))
                ordered = order is not None or f"{key}.{name}" in checkpoint["shards"]["orders"]
                direct = isinstance(model, DTensor) and model.shape == tensor.shape and not ordered
                found[name] = torch.empty_like(model) if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
            parts = {f"{key}.{name}": part for name, part in found.items()}
            load_into(self._path, checkpoint, parts, alone=False)
        return {name: shard_like(tensor, *like.get(name, (tensor, None))) for name, tensor in found.items()}

    def _shard(self) -> None:
        task: Any = self.lightning_module
        model: Any = getattr(task, self.module, None)
        if any(isinstance(parameter, DTensor) for parameter in task.parameters()):  # sharded already
            return
        if self._layer_sync:
            self._layer_sync.apply(task)
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if self.cpu_offload else {}
        if self.precision_plugin.precision == "bf16-mixed":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        has_all = isinstance(model, nn.Module) and len([*task.parameters()]) == len([*model.parameters()])
        root = model if has_all and isinstance(task, NativeTask) else task
        try:
            if isinstance(model, ShardsWeights):
                model.shard(self.device_mesh)
            elif self.device_mesh["tensor_parallel"].size() > 1:
                raise StrategyError(self._no_shard(model))
            fully_shard_units(root, self.device_mesh["data_parallel"], **options)
        except ValueError as error:
            raise StrategyError(str(error)) from error
        if isinstance(task, FSDPModule):
            for step in ("training_step", "validation_step", "test_step", "predict_step"):
                register_fsdp_forward_method(cast(nn.Module, task), step)


def shard_like(full: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """Shard a tensor like another one.

    Args:
        full: The full tensor, on all ranks.
        like: A tensor of the model; if it is not sharded or has another shape, ``full`` is returned unchanged.
        order: Permutation of the rows, if the model has permuted them.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(full, DTensor) or not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    shape, offset = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    own = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    rest = (slice(None), *own[1:])  # in brackets, mypy takes it for syntax of Python 3.11
    part = full[own] if order is None else full[order[own[0]]][rest]
    local = part.to(like.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _update_shards(operation: Any, args: Any, kwargs: Any) -> None:
    """Update each rank's shards, without waiting for the device; torch has no fused SGD for ``DTensor``."""
    operation(*tree_map_only(DTensor, DTensor.to_local, args), **kwargs)


handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
handlers |= dict.fromkeys((torch.ops.aten._fused_sgd_.default, torch.ops.aten._fused_sgd_.tensor_lr), _update_shards)


def _weights(optimizer: Optimizer) -> list[Tensor]:
    """The weights of an optimizer, in the order of the indices of its state."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]
