"""What is added to a loss without a gradient is found, unless the loss has it with one, too."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.addends import AddendFinder, Addends
from boltcutter.diagnosis.evidence import tensors_of


class Followed(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.finder = AddendFinder()

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = tensors_of([args, kwargs])
        self.finder.follow(function, getattr(function, "__name__", ""), args, given, tensors_of(result))
        return result


def added(compute: Any) -> Addends:
    weight = nn.Parameter(torch.tensor([0.5, 1.234]))
    with Followed() as mode:
        loss: Tensor = compute(weight)
    return mode.finder.of_loss([loss])


def test_numbers_and_detached_values_are_constants() -> None:
    for compute in (
        lambda w: (w - 1).square().mean() + w.abs().sum().item(),
        lambda w: 0.5 * ((w - 1).square().mean() - w.detach().abs().sum()),
        lambda w: torch.stack([(w - 1).square().mean(), w.data.norm()]).sum(),
    ):
        assert len(added(compute).constants) == 1, compute


def test_values_that_the_loss_has_otherwise_are_not() -> None:
    for compute in (
        lambda w: w.abs().sum() - 0 * w.square().sum().detach(),
        lambda w: (x := w.square().sum()) + (w.abs().max() - x).detach(),
        lambda w: (w.detach() * w).sum() + w.detach().square().sum(),
        lambda w: (w.square().sum() + w.detach().abs().sum()).exp(),
    ):
        assert not added(compute).constants, compute
