"""Replicas of a module on several devices, each of which runs a chunk of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from boltcutter_parallel.internals import tree_map


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
        chunks = [_chunk((args, kwargs), sizes, index, device) for index, device in enumerate(devices)]
        if devices[0].type == "cuda" and self.module.training:
            # Each device has its own generator, and only that of the first is seeded per step.
            seed = int(torch.randint(2**62, ()))
            for index, device in enumerate(devices[1:], start=1):
                torch.cuda.default_generators[device.index].manual_seed(seed + index)
        replicas = replicate(self.module, devices)
        for replica in replicas:
            vars(replica).pop("forward", None)  # use the forward of the class, not this object
        return gather(_apply(replicas, chunks, devices), self.devices[0])


def _apply(replicas: list[nn.Module], chunks: list[tuple[Any, Any]], devices: list[torch.device]) -> list[Any]:
    """Run each replica: on GPUs in its own thread, with the gradient mode, autocast and stream of this thread."""
    if devices[0].type != "cuda":  # their random numbers come from one generator, so they are reproducible in order
        return [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, chunks, strict=True)]
    grad_enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    streams = [torch.cuda.current_stream(device) for device in devices]

    def call(replica: nn.Module, chunk: tuple[Any, Any], stream: Any) -> Any:
        with (
            torch.cuda.stream(stream),
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad_enabled),
            torch.autocast("cuda", dtype, enabled=autocast),
        ):
            return replica(*chunk[0], **chunk[1])

    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(call, replicas, chunks, streams))


def chunk_sizes(count: int, devices: int) -> list[int]:
    """Sizes of the chunks of a batch, larger ones first; each at least 2, unless the batch is smaller."""
    used = max(1, min(devices, count // 2))
    return [count // used + (index < count % used) for index in range(used)]


def batch_size(*arguments: Any) -> int:
    """Size of the first dimension of all tensors in the arguments; 0 if it differs between them."""
    found: set[int] = set()
    apply_to_collection(arguments, Tensor, lambda tensor: found.add(len(tensor)) if tensor.ndim else None)
    return found.pop() if len(found) == 1 else 0


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Replicate a module to each device, differentiably: gradients flow to the parameters of ``module``."""
    if devices[0].type == "cuda":
        replicas: list[nn.Module] = nn.parallel.replicate(module, devices, detach=not torch.is_grad_enabled())
        return replicas
    return [_replicate_on_cpu(module, clone_buffers=index > 0) for index in range(len(devices))]


def _replicate_on_cpu(module: nn.Module, *, clone_buffers: bool) -> nn.Module:
    """Like torch's replication to a GPU, with views of the parameters, and buffers that are cloned or shared."""
    views = {p: p.view_as(p) if torch.is_grad_enabled() else p.detach() for p in module.parameters()}
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}  # type: ignore[no-untyped-call]
    for part, copy in copies.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in part._parameters.items():
            vars(copy)[name] = None if parameter is None else views[parameter]  # a view is not an nn.Parameter
        for name, buffer in part._buffers.items():
            copy._buffers[name] = buffer.clone() if clone_buffers and buffer is not None else buffer
    replica: nn.Module = copies[module]
    return replica


def _chunk(arguments: Any, sizes: list[int], index: int, device: torch.device) -> Any:
    begin = sum(sizes[:index])

    def select(tensor: Tensor) -> Tensor:
        chunk = tensor[begin : begin + sizes[index]] if tensor.ndim else tensor
        return chunk.to(device, non_blocking=True)

    return apply_to_collection(arguments, Tensor, select)


def gather(results: Sequence[Any], device: torch.device) -> Any:
    """Concatenate tensors, also those in tuples, lists and dictionaries, in the order of the batch."""

    def join(first: Any, *others: Any) -> Any:
        if isinstance(first, Tensor):
            return torch.cat([tensor.to(device) for tensor in (first, *others)])
        if first is not None:
            raise TypeError(f"trainer=dp: the model returns a {type(first).__name__}, not tensors; use trainer=ddp")
        return None

    return tree_map(join, *results)
