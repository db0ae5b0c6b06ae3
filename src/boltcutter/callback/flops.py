"""Peak FLOPS of GPUs, and FLOPs of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Dense matrix products in TFLOPS: 16-bit with 32-bit accumulation, TF32, 32-bit. The first name that the device's name
# contains is used, so longer names come first.
# Source: NVIDIA's data sheets (V100, T4, A10, A30, A40, A100, L4, L40, L40S, H100, H200, B200) and whitepapers on the
# GA102, AD102 and Blackwell RTX architectures; numbers with sparsity are halved.
PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "B200": (2250, 1125, 80),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756, 378, 51.2),
    "H100 NVL": (835, 417.5, 60),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A30": (165, 82, 10.3),
    "A40": (149.7, 74.8, 37.4),
    "A10G": (70, 35, 35),
    "A10": (125, 62.5, 31.2),
    "RTX A6000": (154.8, 77.4, 38.7),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "V100": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
}
WITHOUT_BF16 = ("V100", "T4")  # no bfloat16 tensor cores


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOPS of matrix products on a GPU; None if unknown.

    Args:
        device: Device name, such as ``NVIDIA A100-SXM4-80GB``.
        precision: Precision as in ``Trainer(precision=...)``.
    """
    tokens = device.replace("-", " ").split()
    name = next((n for n in PEAK_TFLOPS if _contains(tokens, n.split())), None)
    if (
        name is None
        or precision.startswith(("64", "float8", "transformer-engine"))
        or (precision.startswith("bf16") and name in WITHOUT_BF16)
    ):
        return None
    half, tf32, full = PEAK_TFLOPS[name]
    if precision.startswith(("16", "bf16")):
        return half * 1e12
    return (full if torch.get_float32_matmul_precision() == "highest" else tf32) * 1e12


def _contains(tokens: list[str], name: list[str]) -> bool:
    return any(tokens[at : at + len(name)] == name for at in range(len(tokens)))


def count_flops(model: nn.Module, inputs: Tensor) -> float | None:
    """FLOPs of one training step; None if they cannot be counted.

    The forward pass is counted on meta tensors, which takes neither time nor memory; the backward pass counts twice as
    many.

    Args:
        model: Called with ``inputs``.
        inputs: A batch, (B, ...).

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes half a second, so imported only if used

    named: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}
        with torch.compiler.set_stance("force_eager"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, meta, (torch.empty_like(inputs, device="meta"),))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a model whose control flow depends on values
        return None
    return 3.0 * counter.get_total_flops() or None
