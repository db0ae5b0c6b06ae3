"""Matrix products in 8 bits, by torchao."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

STEP = 16  # of a matrix's sides, as the hardware takes them


class Float8Error(RuntimeError):
    """The model has nothing to do in 8 bits."""

    hide_traceback = True


class Float8Precision(MixedPrecision):
    """Linear layers multiply in 8-bit floating point, forward and backward; all else is as with ``bf16-mixed``.

    Weights stay in 32 bits under the same names, so that checkpoints fit any precision. torchao recommends it for
    matrices of thousands of rows, together with ``task.compile=true``.

    Args:
        device: ``cuda``; or another, where ``emulate`` is set.
        emulate: Round as 8 bits do but multiply in more of them, which any device can.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    def __init__(self, device: str = "cuda", *, emulate: bool = False) -> None:
        super().__init__("bf16-mixed", device)
        self.precision: Any = "float8"
        self.emulate = emulate

    def autocast_context_manager(self) -> torch.autocast:
        """As with ``bf16-mixed``."""
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Put 8-bit layers in place of linear ones whose sides are multiples of 16.

        Raises:
            Float8Error: There is none.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        # A second call, for the test after training, finds them in place.
        if not any(_fits(part) or isinstance(part, Float8Linear) for part in module.modules()):
            raise Float8Error(
                f"trainer.precision=float8: the model has no linear layer whose sides are multiples of {STEP}; "
                "try bf16-mixed"
            )
        # Without padding a last batch whose size is no multiple of 16 would end the training.
        config = Float8LinearConfig(emulate=self.emulate, pad_inner_dim=not self.emulate)
        convert_to_float8_training(module, module_filter_fn=lambda part, name: _fits(part), config=config)
        return module


def _fits(part: nn.Module) -> bool:
    return type(part) is nn.Linear and not (part.in_features % STEP or part.out_features % STEP)
