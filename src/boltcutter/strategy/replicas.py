"""Copies of a module, each on a device of its own, each given a part of the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


class Replicas:
    """Calls a module as ``torch.nn.DataParallel`` does, on processors as well as on GPUs.

    Parts of a batch differ by one sample at most, and none has a single one, for which batch norm has no variance,
    unless the batch has. Gradients add up in the module itself; so do the statistics that its first copy measures.

    Args:
        module: Takes tensors with the samples in their first dimension, and gives such.
        devices: The first is the module's own.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module, self.devices = module, list(devices)
        self.forward: Callable[..., Any] = module.forward
        # CPU copies draw from one generator, so that only one after another they draw the same each time.
        dropout = any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules())
        self.in_turn = dropout and self.devices[0].type == "cpu"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for the whole batch, on its own device."""
        sizes = shares(samples(args, kwargs), len(self.devices))
        if len(sizes) < 2:
            return self.forward(*args, **kwargs)
        devices = self.devices[: len(sizes)]
        parts = [_part((args, kwargs), sizes, place, device) for place, device in enumerate(devices)]
        if devices[0].type == "cuda" and self.module.training:
            # Each device draws from a generator of its own, which nobody else seeds.
            key = int(torch.randint(2**62, ()))
            for place, device in enumerate(devices[1:], start=1):
                torch.cuda.default_generators[device.index].manual_seed(key + place)
        copies = replicate(self.module, devices)
        for copy in copies:
            vars(copy).pop("forward", None)  # a module whose calls come here has that of its class in its copies
        return gather(self._apply(copies, parts, devices), self.devices[0])

    def _apply(
        self, copies: list[nn.Module], parts: list[tuple[Any, Any]], devices: list[torch.device]
    ) -> list[dict[str, Any]]:
        """Call each copy in a thread of its own.

        Threads begin without what is set for this one: gradients, precision, and streams.
        """
        kind = devices[0].type
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        cast, narrow = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        streams = [torch.cuda.current_stream(device) for device in devices] if kind == "cuda" else []
        results: list[Any] = [None] * len(copies)

        def call(place: int) -> None:
            args, kwargs = parts[place]
            try:
                with ExitStack() as stack:
                    if streams:
                        stack.enter_context(torch.cuda.device(devices[place]))
                        stack.enter_context(torch.cuda.stream(streams[place]))
                    stack.enter_context(torch.inference_mode(inference))
                    stack.enter_context(torch.set_grad_enabled(gradients))
                    stack.enter_context(torch.autocast(kind, narrow, enabled=cast))
                    results[place] = copies[place](*args, **kwargs)
            except BaseException as error:
                results[place] = error  # raised below, where it is seen

        threads = [threading.Thread(target=call, args=(place,)) for place in range(len(copies))]
        for thread in threads:
            thread.start()
            if self.in_turn and self.module.training:
                thread.join()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def shares(count: int, devices: int) -> list[int]:
    """Samples for each device that gets some, the larger shares first; two or more unless ``count`` is less."""
    used = max(1, min(devices, count // 2))
    return [count // used + (place < count % used) for place in range(used)]


def samples(*arguments: Any) -> int:
    """Length of the first dimension, which all tensors share; 0 where they do not."""
    found: set[int] = set()
    apply_to_collection(arguments, Tensor, lambda tensor: found.add(len(tensor)) if tensor.ndim else None)
    return found.pop() if len(found) == 1 else 0


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A copy for each device, through whose parameters gradients reach those of ``module``."""
    if devices[0].type == "cuda":
        copies: list[nn.Module] = nn.parallel.replicate(module, devices, detach=not torch.is_grad_enabled())
        return copies
    return [_copy(module, own=place > 0) for place in range(len(devices))]


def _copy(module: nn.Module, *, own: bool) -> nn.Module:
    """As torch copies a module to a GPU: with views of the parameters, and buffers of its ``own`` or shared ones."""
    views = {p: p.view_as(p) if torch.is_grad_enabled() else p.detach() for p in module.parameters()}
    parts = {part: part._replicate_for_data_parallel() for part in module.modules()}  # type: ignore[no-untyped-call]
    for part, copy in parts.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else parts[child]
        for name, parameter in part._parameters.items():
            vars(copy)[name] = None if parameter is None else views[parameter]  # a view is no parameter
        for name, buffer in part._buffers.items():
            copy._buffers[name] = buffer.clone() if own and buffer is not None else buffer
    made: nn.Module = parts[module]
    return made


def _part(arguments: Any, sizes: list[int], place: int, device: torch.device) -> Any:
    begin = sum(sizes[:place])

    def take(tensor: Tensor) -> Tensor:
        mine = tensor[begin : begin + sizes[place]] if tensor.ndim else tensor
        return mine.to(device, non_blocking=True)

    return apply_to_collection(arguments, Tensor, take)


def gather(results: Sequence[Any], device: torch.device) -> Any:
    """Join tensors, also those in tuples, lists and dictionaries, in the order of the batch.

    Raises:
        TypeError: The module gave something else.
    """
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat([result.to(device) for result in results])
    if isinstance(first, dict):
        return type(first)((key, gather([result[key] for result in results], device)) for key in first)
    if isinstance(first, list | tuple):
        joined = (gather(parts, device) for parts in zip(*results, strict=True))
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if first is None:
        return None
    raise TypeError(f"trainer=dp: the model gives a {type(first).__name__}, not tensors; take trainer=ddp")
