"""A multilayer perceptron, for tables and small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from boltcutter.model.rescaling import Rescaling, check_sizes
from boltcutter.model.sharding import share

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS: dict[str, type[nn.Module] | None] = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class MLP(nn.Module):
    """Hidden layers of linear, norm, activation and dropout, then one linear layer.

    Args:
        inputs: Shape of one sample, without the batch.
        outputs: Number of classes or of targets.
        hidden: Width of each hidden layer.
        activation: After each hidden layer.
        dropout: Share of each hidden layer dropped while training.
        norm: Before each activation.

    Raises:
        ValueError: A size is not positive, ``hidden`` is empty, ``dropout`` is outside [0, 1), or a name is unknown.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: int,
        *,
        hidden: Sequence[int] = (256, 128),
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        dropout: float = 0.0,
        norm: Literal["none", "batch", "layer"] = "none",
    ) -> None:
        super().__init__()
        check_sizes(inputs, outputs)
        if not hidden:
            raise ValueError("model.hidden=[] leaves no hidden layer; try model=linear")
        if min(hidden) < 1:
            raise ValueError(f"model.hidden={list(hidden)} must be positive widths; try [256, 128]")
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.1")
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation={activation} is unknown; try one of {', '.join(ACTIVATIONS)}")
        if norm not in NORMS:
            raise ValueError(f"model.norm={norm} is unknown; try one of {', '.join(NORMS)}")
        self.rescaling = Rescaling()
        layers: list[nn.Module] = []
        for width, wider in pairwise((math.prod(inputs), *hidden)):
            # Batch norm subtracts the mean, and any bias with it.
            layers.append(nn.Linear(width, wider, bias=norm != "batch"))
            if (make_norm := NORMS[norm]) is not None:
                layers.append(make_norm(wider))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *inputs) to (B, O)."""
        features = self.hidden(self.rescaling(x).flatten(1))  # (B, F)
        outputs: Tensor = self.head(features)
        return outputs

    def shard(self, mesh: DeviceMesh, *, offload: bool = False) -> None:
        """Cut each layer over the ranks of ``mesh``.

        Over ``tensor_parallel`` layers are cut by columns and by rows in turn, so that two of them need one exchange.

        Args:
            mesh: With the dimensions ``data_parallel`` and ``tensor_parallel``.
            offload: Whether weights stay in the machine's memory while they are not used.

        Raises:
            ValueError: A norm or dropout would see a part of a layer alone.

        Source: Shoeybi et al., Megatron-LM, 2019 (columns and rows); Zhao et al., PyTorch FSDP, 2023.
        """
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            ParallelStyle,
            RowwiseParallel,
            parallelize_module,
        )

        layers = {name: part for name, part in self.named_modules() if isinstance(part, nn.Linear)}
        if mesh["tensor_parallel"].size() > 1:
            known: tuple[type[nn.Module], ...] = (nn.Linear, *ACTIVATIONS.values())
            other = next((type(part).__name__ for part in self.hidden if not isinstance(part, known)), None)
            if other:
                raise ValueError(
                    f"trainer.strategy.tensor_parallel_size: model=mlp with {other} cannot be cut within a layer; "
                    "set model.norm=none model.dropout=0, or tensor_parallel_size=1"
                )
            styles = (ColwiseParallel, RowwiseParallel)
            plan: dict[str, ParallelStyle] = {name: styles[place % 2]() for place, name in enumerate(layers)}
            if len(layers) % 2:
                plan["head"] = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self, mesh["tensor_parallel"], plan)
        share(mesh["data_parallel"], [*layers.values(), self], offload=offload)

    def stages(self, count: int) -> list[nn.Module]:
        """Modules that are to be called one after another, with about as many layers each.

        Raises:
            ValueError: There are fewer layers.
        """
        layers = [*self.hidden, self.head]
        starts = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        if count > len(starts):
            raise ValueError(
                f"trainer.devices={count}: model=mlp has {len(starts)} layers, and a stage needs one; "
                f"try trainer.devices={len(starts)}"
            )
        ends = [starts[len(starts) * stage // count] for stage in range(count)] + [len(layers)]
        parts = [nn.Sequential(*layers[first:last]) for first, last in pairwise(ends)]
        return [nn.Sequential(self.rescaling, nn.Flatten(), *parts[0]), *parts[1:]]
