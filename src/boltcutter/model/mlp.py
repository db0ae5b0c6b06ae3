"""A multilayer perceptron for tabular data and small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from boltcutter.model.rescaling import Rescaling, check_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS: dict[str, type[nn.Module] | None] = {"none": None, "batchnorm": nn.BatchNorm1d, "layernorm": nn.LayerNorm}


class MLP(nn.Module):
    """A multilayer perceptron, each of whose hidden layers is linear, norm, activation and dropout.

    Args:
        input_shape: Shape of one sample, without the batch dimension.
        num_classes: Number of classes; of target columns for regression.
        hidden_sizes: Number of units of each hidden layer.
        activation: Activation function of the hidden layers.
        dropout: Dropout probability of the hidden layers.
        norm: Normalization before each activation.

    Raises:
        ValueError: A size is not positive, ``hidden_sizes`` is empty, ``dropout`` is outside [0, 1), or a name is
            unknown.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        hidden_sizes: Sequence[int] = (256, 128),
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        dropout: float = 0.0,
        norm: Literal["none", "batchnorm", "layernorm"] = "none",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        if not hidden_sizes:
            raise ValueError("model.hidden_sizes=[] has no hidden layer; try model=linear")
        if min(hidden_sizes) < 1:
            raise ValueError(f"model.hidden_sizes={list(hidden_sizes)} must be positive; try [256, 128]")
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.1")
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation={activation} is unknown; try one of {', '.join(ACTIVATIONS)}")
        if norm not in NORMS:
            raise ValueError(f"model.norm={norm} is unknown; try one of {', '.join(NORMS)}")
        self.rescaling = Rescaling()
        layers: list[nn.Module] = []
        for in_features, out_features in pairwise((math.prod(input_shape), *hidden_sizes)):
            # Batch normalization subtracts the mean, which would cancel a bias.
            layers.append(nn.Linear(in_features, out_features, bias=norm != "batchnorm"))
            if (make_norm := NORMS[norm]) is not None:
                layers.append(make_norm(out_features))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(hidden_sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *input_shape) to (B, num_classes)."""
        features = self.hidden(self.rescaling(x).flatten(1))  # (B, F)
        outputs: Tensor = self.head(features)
        return outputs

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the matrices over ``tensor_parallel``, columns and rows in turn: two layers need one all-reduce.

        Args:
            mesh: Device mesh with the dimension ``tensor_parallel``.

        Raises:
            ValueError: The model has normalization or dropout, which would see only a shard of the activations.

        Source: Shoeybi et al., Megatron-LM, 2019.
        """
        from torch.distributed.tensor import Replicate  # takes time, and most models are not sharded
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        ranks = mesh["tensor_parallel"].size()
        if ranks == 1:
            return
        self.check_shards(ranks)
        layers = [name for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        styles = (ColwiseParallel, RowwiseParallel)
        plan: dict[str, Any] = {name: styles[index % 2]() for index, name in enumerate(layers)}
        if len(layers) % 2:
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self, mesh["tensor_parallel"], plan)

    def check_shards(self, ranks: int) -> None:
        """Check that the matrices can be sharded over so many ranks.

        Raises:
            ValueError: The model has normalization or dropout.
        """
        supported: tuple[type[nn.Module], ...] = (nn.Linear, *ACTIVATIONS.values())
        other = next((type(part).__name__ for part in self.hidden if not isinstance(part, supported)), None)
        if other:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={ranks} does not support {other} in "
                "model=mlp; set model.norm=none model.dropout=0, or tensor_parallel_size=1"
            )

    def stages(self, count: int) -> list[nn.Module]:
        """Split the model into ``count`` pipeline stages with about the same number of layers.

        Raises:
            ValueError: There are fewer linear layers than stages.
        """
        layers = [*self.hidden, self.head]
        starts = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        if count > len(starts):
            raise ValueError(
                f"trainer.devices={count} exceeds the {len(starts)} layers of model=mlp, and each pipeline stage needs "
                f"one; try trainer.devices={len(starts)}"
            )
        ends = [starts[len(starts) * stage // count] for stage in range(count)] + [len(layers)]
        parts = [nn.Sequential(*layers[first:last]) for first, last in pairwise(ends)]
        return [nn.Sequential(self.rescaling, nn.Flatten(), *parts[0]), *parts[1:]]
