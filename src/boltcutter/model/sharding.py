"""Helpers of models that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from boltcutter.internals import NormWithStatistics


def fully_shard_modules(mesh: DeviceMesh, modules: Sequence[nn.Module], **options: Any) -> None:
    """Shard parameters, gradients and optimizer state of ``modules`` over ranks by FSDP2.

    Args:
        mesh: One-dimensional device mesh.
        modules: In order of application, submodules before the modules that contain them.
        options: Arguments of ``fully_shard``. With batch norms all weights stay in float32, as their statistics do.

    Source: Zhao et al., PyTorch FSDP, 2023.
    """
    from torch.distributed.fsdp import fully_shard

    if any(isinstance(part, NormWithStatistics) for module in modules for part in module.modules()):
        options.pop("mp_policy", None)
    for module in modules:
        fully_shard(module, mesh=mesh, **options)


def section_permutation(sections: Sequence[int], ranks: int) -> Tensor:
    """Return a permutation of rows such that an even split gives each rank an equal part of each section.

    Args:
        sections: Number of rows of each section of a fused matrix, such as queries, keys and values.
        ranks: Number of ranks, a divisor of each section.
    """
    chunks = [rows.chunk(ranks) for rows in torch.split(torch.arange(sum(sections)), list(sections))]
    return torch.cat([section[rank] for rank in range(ranks) for section in chunks])


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn the parameters of ``module`` into replicated DTensors, so that they mix with sharded ones.

    Args:
        module: Takes and returns plain tensors, also afterwards.
        mesh: One-dimensional device mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def to_replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, to_replicated, to_local)
