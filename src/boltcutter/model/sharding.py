"""Helpers of models that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
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
