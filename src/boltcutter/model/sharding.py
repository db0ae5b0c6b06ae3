"""What models use to say how they are cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def share(mesh: DeviceMesh, modules: Sequence[nn.Module], *, offload: bool) -> None:
    """Cut weights, gradients and optimizer state of ``modules``, the innermost first, over ranks (FSDP2).

    Source: Zhao et al., PyTorch FSDP, 2023.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for module in modules:
        fully_shard(module, mesh=mesh, **options)


def order_of_shares(sections: Sequence[int], ranks: int) -> Tensor:
    """The rows of a matrix, made of ``sections`` of so many rows, in the order in which ranks have them.

    Cut into equal pieces, each rank's then has its share of each section.
    """
    pieces = [part.chunk(ranks) for part in torch.split(torch.arange(sum(sections)), list(sections))]
    return torch.cat([section[rank] for rank in range(ranks) for section in pieces])


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have each rank of ``mesh`` compute the same with ``module``, whose weights go with those that are cut."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, enter, leave)
