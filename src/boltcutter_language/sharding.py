"""Tensor parallelism of transformers: the order of rows of fused matrices, and modules that each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def section_permutation(sections: Sequence[int], ranks: int) -> Tensor:
    """Return a permutation of rows such that an even split gives each rank an equal part of each section."""
    chunks = [rows.chunk(ranks) for rows in torch.split(torch.arange(sum(sections)), list(sections))]
    return torch.cat([section[rank] for rank in range(ranks) for section in chunks])


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn parameters into replicated DTensors, which mix with sharded ones; ``module`` still takes plain tensors."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def to_replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, to_replicated, to_local)
