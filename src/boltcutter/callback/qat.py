"""Quantization-aware training."""

from __future__ import annotations

from importlib.util import find_spec

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from boltcutter.protocols import find_model


class QAT(Callback):
    """Train with the rounding errors of int8, so that ``boltcutter export export=int8-dynamic`` loses less.

    Linear layers round weights (one scale for each output channel) and activations (one for each row) in the forward
    pass, and pass gradients through the rounding. Parameters keep their names and stay in floating point. Checkpoints
    are therefore those of the plain model: a run can be resumed with or without this callback, and the export converts
    the weights.

    Raises:
        ImportError: torchao is not installed.

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
    2018.
    """

    def __init__(self) -> None:
        if find_spec("torchao") is None:
            raise ImportError("callback.qat: torchao is not installed; pip install 'boltcutter[export]'")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace the linear layers before the optimizer is created."""
        from torchao.quantization import quantize_
        from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig, QATConfig

        model = find_model(pl_module)
        model = model if isinstance(model, nn.Module) else pl_module
        if stage == "fit" and not any(isinstance(module, FakeQuantizedLinear) for module in model.modules()):
            rows = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)  # torchao has no other
            channels = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
            quantize_(model, QATConfig(activation_config=rows, weight_config=channels, step="prepare"))
