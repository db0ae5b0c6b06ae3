"""How a multilayer perceptron is sharded over ranks, and split into pipeline stages."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from boltcutter.model.mlp import ACTIVATIONS, MLP


def shard(model: MLP, mesh: DeviceMesh) -> None:
    """Shard the matrices over ``tensor_parallel``, columns and rows in turn: two layers need one all-reduce.

    Args:
        model: The model.
        mesh: Device mesh with the dimension ``tensor_parallel``.

    Raises:
        ValueError: The model has normalization or dropout, which would see only a shard of the activations.

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    ranks = mesh["tensor_parallel"].size()
    if ranks == 1:
        return
    supported: tuple[type[nn.Module], ...] = (nn.Linear, *ACTIVATIONS.values())
    other = next((type(part).__name__ for part in model.hidden if not isinstance(part, supported)), None)
    if other:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={ranks} does not support {other} in "
            "model=mlp; set model.norm=none model.dropout=0, or tensor_parallel_size=1"
        )
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    styles = (ColwiseParallel, RowwiseParallel)
    plan: dict[str, ParallelStyle] = {name: styles[index % 2]() for index, name in enumerate(layers)}
    if len(layers) % 2:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor_parallel"], plan)


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
