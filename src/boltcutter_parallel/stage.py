"""The pipeline stage of one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from boltcutter.strategy.errors import StrategyError


class LocalStage:
    """The stage of one rank; parameters of other stages are moved to the meta device, but keep their names.

    So the indices of parameters in optimizers are those of one process; optimizers skip parameters without gradients.

    Args:
        model: Model with a method ``stages(count)``, which returns modules that are called in sequence.
        rank: Rank of this process, and index of its stage.
        count: Number of stages.

    Attributes:
        module: The stage.
        weights: Parameters of the stage, in order.
        not_owned: IDs of parameters that are counted and saved by another rank: those not in this stage, and those
            shared with an earlier one.

    Raises:
        StrategyError: The model does not have as many stages, or a parameter belongs to none.
    """

    def __init__(self, model: nn.Module, rank: int, count: int) -> None:
        split: Any = model.stages
        try:
            stages: list[nn.Module] = split(count)
        except ValueError as error:
            raise StrategyError(str(error)) from error
        self.model, self.module = model, stages[rank]
        self.first, self.last = rank == 0, rank == count - 1
        owners: dict[int, list[int]] = {}
        for index, stage in enumerate(stages):
            for parameter in stage.parameters():
                owners.setdefault(id(parameter), []).append(index)
        for name, parameter in model.named_parameters():
            if id(parameter) not in owners:
                raise StrategyError(f"trainer.strategy: no stage of {type(model).__name__} has {name}; add it to one")
        self.weights = list(self.module.parameters())
        self._shared = self._shared_parameters(owners, rank, count)
        remote = {key for key, ranks in owners.items() if rank not in ranks}
        del stages, split  # references to the parameters of other stages
        removed = _move_to_meta(model, remote)
        self.not_owned = {id(weight) for weight in removed}
        self.not_owned |= {id(weight) for weight in self.weights if owners[id(weight)][0] < rank}

    def add_shared_gradients(self) -> None:
        """Sum the gradients of parameters that several stages share."""
        for weight, group in self._shared:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def _shared_parameters(self, owners: dict[int, list[int]], rank: int, count: int) -> list[tuple[nn.Parameter, Any]]:
        """Parameters of this stage that other stages share, with the process groups of their ranks."""
        groups: dict[tuple[int, ...], Any] = {tuple(range(count)): None}
        for ranks in map(tuple, owners.values()):
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))  # collective: called on all ranks
        local = {id(weight): weight for weight in self.weights}
        return [(local[key], groups[tuple(ranks)]) for key, ranks in owners.items() if rank in ranks and len(ranks) > 1]


def _move_to_meta(model: nn.Module, keys: set[int]) -> list[nn.Parameter]:
    """Replace parameters, given by their IDs, by parameters on the meta device; return the new ones."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in keys:
                if id(parameter) not in replaced:
                    empty = torch.empty_like(parameter, device="meta")
                    replaced[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = replaced[id(parameter)]
    return list(replaced.values())
