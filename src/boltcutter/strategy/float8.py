"""Matrix multiplication in 8-bit floating point, with torchao."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from boltcutter.strategy.errors import StrategyError
from boltcutter.topology import PlannedTraining

MULTIPLE = 16  # of both dimensions of a weight, as the hardware requires
NO_LAYERS = (
    "trainer.precision=float8: the model has no linear layer whose dimensions are multiples of "
    f"{MULTIPLE}; try bf16-mixed"
)


class Float8Precision(MixedPrecision):
    """Linear layers multiply in float8, forward and backward; everything else is ``bf16-mixed``.

    Weights remain in float32 under the same names, so that checkpoints can be loaded with any precision. torchao
    recommends float8 for matrices with thousands of rows, together with ``task.compile=true``.

    Args:
        device: Device type; must be ``cuda`` unless ``emulate`` is set.
        emulate: Round to float8, but multiply in float32, which works on any device.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    def __init__(self, device: str = "cuda", *, emulate: bool = False) -> None:
        super().__init__("bf16-mixed", device)
        self.precision: Any = "float8"
        self.emulate = emulate

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast to bfloat16, as with ``bf16-mixed``."""
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """A model without layers to convert."""
        if next(planned.task.parameters(), None) is not None and not any(map(_fits, planned.task.modules())):
            yield NO_LAYERS

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers whose dimensions are multiples of 16 by float8 layers.

        Raises:
            StrategyError: There are no such layers.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        # A second call, for the test after training, finds layers that are already converted.
        if not any(_fits(part) or isinstance(part, Float8Linear) for part in module.modules()):
            raise StrategyError(NO_LAYERS)
        # Without padding, a last batch whose size is not a multiple of 16 would raise an error.
        config = Float8LinearConfig(emulate=self.emulate, pad_inner_dim=not self.emulate)
        convert_to_float8_training(module, module_filter_fn=lambda part, name: _fits(part), config=config)
        return module


def _fits(part: nn.Module) -> bool:
    return type(part) is nn.Linear and not (part.in_features % MULTIPLE or part.out_features % MULTIPLE)
