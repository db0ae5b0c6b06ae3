"""Peak FLOPS of GPUs, and FLOPs of a model."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import torch
import yaml
from lightning.fabric.utilities.throughput import measure_flops
from torch import Tensor, nn

WITHOUT_BF16 = ("V100", "T4")  # no bfloat16 tensor cores


@cache
def read_peaks() -> dict[str, list[float]]:
    """Return the peak TFLOPS of GPUs from ``flops.yaml``: 16-bit, TF32 and 32-bit, by a part of their names."""
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOPS of matrix products on a GPU; None if unknown.

    Args:
        device: Device name, such as ``NVIDIA A100-SXM4-80GB``; the peak of a MIG slice, a part of a GPU, is unknown.
        precision: Precision as in ``Trainer(precision=...)``.
    """
    words, known = f" {device.replace('-', ' ')} ", read_peaks()
    name = next((name for name in known if f" {name} " in words), None)
    if (
        name is None
        or " MIG " in words
        or precision.startswith(("64", "float8", "transformer-engine"))
        or (precision.startswith("bf16") and name in WITHOUT_BF16)
    ):
        return None
    half, tf32, full = known[name]
    if precision.startswith(("16", "bf16")):
        return half * 1e12
    return (full if torch.get_float32_matmul_precision() == "highest" else tf32) * 1e12


def meta_copy(model: nn.Module) -> nn.Module | None:
    """Copy a model to the meta device; None if it cannot be copied, as after it was sharded, or with lazy layers."""
    try:
        tensors = [(tensor, torch.empty_like(tensor, device="meta")) for tensor in model.buffers()]
        parameters = [
            (p, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)) for p in model.parameters()
        ]
        return copy.deepcopy(model, {id(tensor): meta for tensor, meta in [*tensors, *parameters]})
    except Exception:  # models hold anything
        return None


def count_flops(model: nn.Module, inputs: Tensor) -> float | None:
    """FLOPs of one training step; None if they cannot be counted.

    The forward pass is counted on meta tensors, which takes neither time nor memory; the backward pass counts twice as
    many.

    Args:
        model: On the meta device, as by ``meta_copy``; called with ``inputs``.
        inputs: A batch, (B, ...).

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """
    batch = torch.empty_like(inputs, device="meta")
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            return 3.0 * measure_flops(model, lambda: model(batch)) or None
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a model whose control flow depends on values
        return None
