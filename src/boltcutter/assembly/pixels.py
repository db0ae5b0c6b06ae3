"""Let models that take floats only be trained on uint8 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.data.seeding import seeded_generators
from boltcutter.environment.process import is_rank_zero


class ScalePixels:
    """A forward pre-hook that converts uint8 inputs to floats in [0, 1], as torchvision's ``ToTensor`` does."""

    def __init__(self) -> None:
        self.is_reported = False

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert the first input, and report it once."""
        if not (inputs and isinstance(inputs[0], Tensor) and inputs[0].dtype == torch.uint8):
            return inputs
        if not self.is_reported and not torch.compiler.is_compiling():
            self.is_reported = True
            if is_rank_zero():
                print(f"note: {type(model).__name__} takes no uint8, so inputs are divided by 255, to [0, 1]")
        return inputs[0].to(_float_dtype(model)) / 255, *inputs[1:]


def accept_pixels(model: nn.Module, shape: Sequence[int]) -> None:
    """Add ``ScalePixels`` to a model that fails with uint8 inputs of ``shape``, and works with floats.

    Such a model cannot have been meant for uint8, so nothing that worked changes. A copy is tried, as a forward pass
    may change buffers; models of the library convert pixels themselves.

    Args:
        model: The network.
        shape: Shape of one sample; only images, (C, H, W), are pixels.
    """
    is_ours = type(model).__module__.startswith("boltcutter.")
    if len(shape) != 3 or is_ours or next(model.parameters(), None) is None:
        return
    with suppress(Exception), seeded_generators(0), torch.no_grad():  # of user code, and of what cannot be copied
        trial, pixels = deepcopy(model).eval(), torch.zeros(1, *shape, dtype=torch.uint8)
        if not _fails(trial, pixels):
            return
        trial(pixels.to(_float_dtype(trial)))
        model.register_forward_pre_hook(ScalePixels())


def _fails(model: nn.Module, inputs: Tensor) -> bool:
    try:
        model(inputs)
    except (RuntimeError, NotImplementedError, TypeError):
        return True
    return False


def _float_dtype(model: nn.Module) -> torch.dtype:
    found = (each.dtype for each in model.parameters() if each.is_floating_point())
    return next(found, torch.get_default_dtype())
