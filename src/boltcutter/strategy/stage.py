"""A model of which each rank keeps one stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class PipelineError(RuntimeError):
    """The model cannot be cut into stages, or the training asks for what they cannot do."""

    hide_traceback = True


class LocalStage:
    """One rank's stage; weights of other stages lose their numbers, but keep their names and places.

    So optimizers count weights as in one process, and leave alone those that never have a gradient.

    Args:
        model: With a method ``stages(count)``, which gives modules that are to be called one after another.
        rank: Of this process, and of its stage.
        count: Of all stages.

    Attributes:
        part: The stage.
        weights: Its own, in order.
        elsewhere: Identities of weights that a rank before this one has, too, or alone.

    Raises:
        PipelineError: There are not as many stages, or they leave weights out.
    """

    def __init__(self, model: nn.Module, rank: int, count: int) -> None:
        make: Any = model.stages
        try:
            stages: list[nn.Module] = make(count)
        except ValueError as error:
            raise PipelineError(str(error)) from error
        self.model, self.part = model, stages[rank]
        self.first, self.last = rank == 0, rank == count - 1
        owners: dict[int, list[int]] = {}
        for place, stage in enumerate(stages):
            for parameter in stage.parameters():
                owners.setdefault(id(parameter), []).append(place)
        for name, parameter in model.named_parameters():
            if id(parameter) not in owners:
                raise PipelineError(f"trainer.strategy: no stage of {type(model).__name__} has {name}; give it to one")
        self.weights = list(self.part.parameters())
        self._shared = self._groups(owners, rank, count)
        theirs = {number for number, places in owners.items() if rank not in places}
        del stages, make
        removed = _let_go(model, theirs)
        self.elsewhere = {id(weight) for weight in removed}
        self.elsewhere |= {id(weight) for weight in self.weights if owners[id(weight)][0] < rank}

    def add_shared_gradients(self) -> None:
        """Add up what several stages found for the same weight."""
        for weight, group in self._shared:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def _groups(self, owners: dict[int, list[int]], rank: int, count: int) -> list[tuple[nn.Parameter, Any]]:
        """This rank's weights that others have, too, with the ranks that have them."""
        groups: dict[tuple[int, ...], Any] = {tuple(range(count)): None}
        for places in map(tuple, owners.values()):
            if len(places) > 1 and places not in groups:
                groups[places] = dist.new_group(list(places))  # called on all ranks
        mine = {id(weight): weight for weight in self.weights}
        return [(mine[n], groups[tuple(p)]) for n, p in owners.items() if rank in p and len(p) > 1]


def _let_go(model: nn.Module, numbers: set[int]) -> list[nn.Parameter]:
    """Put weights without numbers in place of some."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in numbers:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    return list(made.values())
