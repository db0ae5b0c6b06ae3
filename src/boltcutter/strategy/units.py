"""Which modules of a model are sharded as units, whose weights are gathered and freed together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from boltcutter.internals import NormWithStatistics

LISTS = (nn.ModuleList, nn.ModuleDict)  # have no forward, before which weights could be gathered
LARGE = 0.1  # fraction of the parameters from which a child is a unit, where no block is repeated


def find_units(root: nn.Module) -> list[nn.Module]:
    """Return the modules in ``root`` that are sharded as units; what they do not contain is sharded with the root.

    These are the repeated blocks: children of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that have one class.
    Without such blocks they are the largest children. No unit shares a parameter with another module, as sharding one
    of them would untie the weights.

    Args:
        root: The model. Units must be called by their ``forward``.
    """
    uses = _count_uses(root)

    def fits(module: nn.Module) -> bool:
        own = _count_uses(module)
        return bool(own) and not isinstance(module, LISTS) and all(uses[key] == count for key, count in own.items())

    def repeated(module: nn.Module) -> list[nn.Module]:
        blocks = [child for child in module.children() if isinstance(module, (*LISTS, nn.Sequential)) and fits(child)]
        classes = Counter(type(block) for block in blocks)
        found: list[nn.Module] = []
        for child in module.children():
            is_block = child in blocks and classes[type(child)] > 1
            inner = [] if is_block and not isinstance(child, nn.Sequential) else repeated(child)
            found += inner or ([child] if is_block else [])
        return found

    units, large, top = repeated(root), [root], root
    while not units and len(large) == 1:  # a wrapper of a single module
        (top,) = large
        large = [child for child in top.children() if _size(child) > LARGE * _size(top)]
    # Models with tied weights often use those of an embedding without calling it.
    return units or [module for module in large if fits(module) and not isinstance(module, nn.Embedding)]


def fully_shard_units(root: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shard parameters, gradients and optimizer state of each unit of ``root``, and of the rest, by FSDP2.

    Args:
        root: The model, called by its ``forward``.
        mesh: One-dimensional device mesh.
        options: Arguments of ``fully_shard``. Batch norms stay in float32, as their statistics do.

    Raises:
        ValueError: torch cannot shard a parameter, such as one without dimensions.

    Source: Zhao et al., PyTorch FSDP, 2023.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if any(isinstance(module, FSDPModule) for module in root.modules()):  # it has sharded itself
        return
    for parameter in root.parameters():
        parameter.data = parameter.data.contiguous()  # which torch requires; convolutions may be channels-last
    units, of_units = find_units(root), dict(options)
    if policy := of_units.pop("mp_policy", None):
        norms = [module for module in root.modules() if isinstance(module, NormWithStatistics) and module.affine]
        for norm in norms:
            fully_shard(norm, mesh=mesh, **of_units)
        units = [unit for unit in units if unit not in norms]
        # The inputs of the root keep their precision: they may not be scaled yet.
        of_units["mp_policy"] = replace(policy, cast_forward_inputs=True)
    for unit in units:
        fully_shard(unit, mesh=mesh, **of_units)
    fully_shard(root, mesh=mesh, **options)


def _count_uses(root: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its ID."""
    return Counter(id(p) for module in root.modules() for p in module._parameters.values() if p is not None)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
