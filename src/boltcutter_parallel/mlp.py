"""How a multilayer perceptron is sharded over ranks, and split into pipeline stages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from boltcutter.model.mlp import ACTIVATIONS, MLP
from boltcutter_parallel.units import fully_shard_modules


def shard(model: MLP, mesh: DeviceMesh, **options: Any) -> None:
    """Shard the parameters of each layer over the ranks of ``mesh``.

    Over ``tensor_parallel``, layers alternate between column-wise and row-wise sharding, so that each pair of layers
    needs one all-reduce.

    Args:
        model: The model.
        mesh: Device mesh with the dimensions ``data_parallel`` and ``tensor_parallel``.
        options: Arguments of torch's ``fully_shard``.

    Raises:
        ValueError: The model has normalization or dropout, which would see only a shard of the activations.

    Source: Shoeybi et al., Megatron-LM, 2019 (tensor parallelism); Zhao et al., PyTorch FSDP, 2023.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    ranks = mesh["tensor_parallel"].size()
    if ranks > 1:
        supported: tuple[type[nn.Module], ...] = (nn.Linear, *ACTIVATIONS.values())
        other = next((type(part).__name__ for part in model.hidden if not isinstance(part, supported)), None)
        if other:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={ranks} does not support {other} in "
                "model=mlp; set model.norm=none model.dropout=0, or tensor_parallel_size=1"
            )
        styles = (ColwiseParallel, RowwiseParallel)
        plan: dict[str, ParallelStyle] = {name: styles[index % 2]() for index, name in enumerate(layers)}
        if len(layers) % 2:
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tensor_parallel"], plan)
    fully_shard_modules(mesh["data_parallel"], [*layers.values(), model], **options)


def stages(model: MLP, count: int) -> list[nn.Module]:
    """Split the model into ``count`` pipeline stages with about the same number of layers.

    Raises:
        ValueError: There are fewer linear layers than stages.
    """
    layers = [*model.hidden, model.head]
    starts = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    if count > len(starts):
        raise ValueError(
            f"trainer.devices={count} exceeds the {len(starts)} layers of model=mlp, and each pipeline stage needs "
            f"one; try trainer.devices={len(starts)}"
        )
    ends = [starts[len(starts) * stage // count] for stage in range(count)] + [len(layers)]
    parts = [nn.Sequential(*layers[first:last]) for first, last in pairwise(ends)]
    return [nn.Sequential(model.rescaling, nn.Flatten(), *parts[0]), *parts[1:]]
