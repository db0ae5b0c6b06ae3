"""Data parallel in a single process, which Lightning 2 no longer offers: replicas of the model on several devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from boltcutter.internals import tree_map
from boltcutter.strategy.errors import StrategyError, raise_refusals
from boltcutter.structure import map_tensors, tensors
from boltcutter.task.compiler import CUDA_GRAPH
from boltcutter.topology import PlannedTraining


class DataParallelStrategy(ParallelStrategy):
    """Replicate the model to all devices at each step, scatter the batch, and gather the outputs on the first device.

    The loss, the metrics and all logged values are those of the whole batch, and checkpoints are those of a single
    device.

    Args:
        module: Name of the task's attribute that holds the module to replicate.
        options: Arguments of Lightning's ``ParallelStrategy``.
    """

    strategy_name = "dp"
    # There is a single process, in which nothing is communicated.
    global_rank: Any = 0
    local_rank: Any = 0
    node_rank: Any = 0
    world_size: Any = 1
    reduce: Any = SingleDeviceStrategy.reduce
    all_gather: Any = SingleDeviceStrategy.all_gather
    barrier: Any = SingleDeviceStrategy.barrier
    broadcast: Any = SingleDeviceStrategy.broadcast
    reduce_boolean_decision: Any = SingleDeviceStrategy.reduce_boolean_decision
    model_to_device: Any = SingleDeviceStrategy.model_to_device

    def __init__(self, module: str = "model", **options: Any) -> None:
        super().__init__(**options)
        self.module = module
        self._replicated: nn.Module | None = None

    @property
    def root_device(self) -> torch.device:
        """The first device, which holds the original model and the outputs."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler yields whole batches."""
        return {"num_replicas": 1, "rank": 0}

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """A task without the module, and a compiled model."""
        if planned.topology.num_devices < 2:
            return
        if not hasattr(planned.task, self.module) and not is_overridden("configure_model", planned.task):
            yield f"trainer.strategy.module={self.module}: the task has no such module to replicate"
        if (compiled := getattr(planned.task, "compile_model", False)) not in (False, CUDA_GRAPH):
            yield (
                f"task.compile={str(compiled).lower()}: trainer=dp replicates the model at each step, and replicas are "
                "not compiled; use trainer=ddp, or set task.compile=false"
            )

    def setup(self, trainer: L.Trainer) -> None:
        """Move the model, and replace its ``forward`` by one that runs replicas."""
        super().setup(trainer)
        if len(self.parallel_devices or ()) < 2:
            return
        raise_refusals(self, trainer, self.lightning_module)
        model = getattr(self.lightning_module, self.module, None)
        if not isinstance(model, nn.Module):
            raise StrategyError(f"trainer.strategy.module={self.module}: the task has no such module to replicate")
        if self._replicated is None:
            print("hint: torch recommends trainer=ddp, which does not replicate the model", file=sys.stderr)
        self._restore_forward()
        # Set on the instance rather than by a wrapper, so that the keys of checkpoints do not change.
        model.forward = Replicas(model, self.parallel_devices or ())
        self._replicated = model

    def teardown(self) -> None:
        """Restore the model's own ``forward``."""
        self._restore_forward()
        super().teardown()

    def _restore_forward(self) -> None:
        if self._replicated is not None:
            vars(self._replicated).pop("forward", None)


class Replicas:
    """Call a module on the first of some devices like ``torch.nn.DataParallel``, on CPUs as well as on GPUs.

    The chunks of a batch differ by at most one sample, and have at least two samples if the batch has, as BatchNorm
    cannot compute the variance of one. Gradients accumulate in the original module, which also receives the running
    statistics of the first replica.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module, self.devices = module, list(devices)
        self.forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replicas, and gather their outputs on the first device."""
        sizes = chunk_sizes(batch_size(args, kwargs), len(self.devices))
        if len(sizes) < 2:
            return self.forward(*args, **kwargs)
        devices = self.devices[: len(sizes)]
        if devices[0].type == "cuda" and self.module.training:
            # Each device has its own generator, and only that of the first is seeded per step.
            seed = int(torch.randint(2**62, ()))
            for index, device in enumerate(devices[1:], start=1):
                torch.cuda.default_generators[device.index].manual_seed(seed + index)
        outputs = []
        for index, device in enumerate(devices):  # a GPU computes while the next one is given its work
            replica = replicate(self.module, device, copies_buffers=index > 0)
            vars(replica).pop("forward", None)  # use the forward of the class, not this object
            chunk_args, chunk_kwargs = _chunk((args, kwargs), sizes, index, device)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                outputs.append(replica(*chunk_args, **chunk_kwargs))
        return gather(outputs, devices[0])


def replicate(module: nn.Module, device: torch.device, *, copies_buffers: bool) -> nn.Module:
    """Replicate a module to a device, differentiably: gradients flow to the parameters of ``module``.

    The replicas of ``torch.nn.parallel.replicate`` are on GPUs only.
    """
    views = {p: p.view_as(p).to(device, non_blocking=True) for p in module.parameters()}
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in module.modules()}  # type: ignore[no-untyped-call]
    for part, copy in copies.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in part._parameters.items():
            setattr(copy, name, None if parameter is None else views[parameter])  # a view is not an nn.Parameter
        for name, buffer in part._buffers.items():
            copied = None if buffer is None else buffer.to(device, non_blocking=True, copy=copies_buffers)
            copy._buffers[name] = copied
    replica: nn.Module = copies[module]
    return replica


def chunk_sizes(count: int, devices: int) -> list[int]:
    """Sizes of the chunks of a batch, larger ones first; each at least 2, unless the batch is smaller."""
    used = max(1, min(devices, count // 2))
    return [count // used + (index < count % used) for index in range(used)]


def batch_size(*arguments: Any) -> int:
    """Size of the first dimension of all tensors in the arguments; 0 if it differs between them."""
    found = {len(tensor) for tensor in tensors(arguments) if tensor.ndim}
    return found.pop() if len(found) == 1 else 0


def _chunk(arguments: Any, sizes: list[int], index: int, device: torch.device) -> Any:
    begin = sum(sizes[:index])

    def select(tensor: Tensor) -> Tensor:
        chunk = tensor[begin : begin + sizes[index]] if tensor.ndim else tensor
        return chunk.to(device, non_blocking=True)

    return map_tensors(arguments, select)


def gather(results: Sequence[Any], device: torch.device) -> Any:
    """Concatenate tensors, also those in tuples, lists and dictionaries, in the order of the batch."""

    def join(first: Any, *others: Any) -> Any:
        if isinstance(first, Tensor):
            return torch.cat([tensor.to(device) for tensor in (first, *others)])
        if first is not None:
            raise TypeError(f"trainer=dp: the model returns a {type(first).__name__}, not tensors; use trainer=ddp")
        return None

    return tree_map(join, *results)
