"""Peak FLOPS of GPUs, and FLOPs of a model."""

from __future__ import annotations

import copy

import torch
from lightning.fabric.utilities.throughput import measure_flops
from torch import Tensor, nn

# Dense matrix products in TFLOPS: 16-bit with 32-bit accumulation, TF32, 32-bit. The first name that the device's name
# contains is used, so longer names come first.
# Source: NVIDIA's data sheets (V100, T4, A10, A30, A40, A100, L4, L20, L40, L40S, H20, H100, H200, H800, GB200, GB300,
# HGX B200 and B300) and whitepapers on the GA102, AD102, Blackwell RTX and RTX PRO architectures; numbers with sparsity
# are halved. A server's RTX PRO 6000 has the ratios of the others at its data sheet's 120 TFLOPS.
PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "GB300": (2500, 1250, 80),
    "GB200": (2500, 1250, 80),
    "B300": (2250, 1125, 75),
    "B200": (2250, 1125, 80),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "H800 PCIe": (756, 378, 51.2),
    "H800": (989.4, 494.7, 66.9),
    "H20": (148, 74, 44),
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
    "L20": (119.5, 59.8, 59.8),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX PRO 6000 Blackwell Max Q": (438.9, 219.5, 109.7),
    "RTX PRO 6000 Blackwell Server": (480, 240, 120),
    "RTX PRO 6000": (503.8, 251.9, 126),
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
        device: Device name, such as ``NVIDIA A100-SXM4-80GB``; the peak of a MIG slice, a part of a GPU, is unknown.
        precision: Precision as in ``Trainer(precision=...)``.
    """
    tokens = device.replace("-", " ").split()
    name = next((n for n in PEAK_TFLOPS if _contains(tokens, n.split())), None)
    if (
        name is None
        or "MIG" in tokens
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


def meta_copy(model: nn.Module) -> nn.Module | None:
    """Copy a model without memory for its weights; None if it cannot be copied, as after it was sharded.

    Args:
        model: Weights and buffers of the copy are on the meta device.
    """
    tensors = [(tensor, torch.empty_like(tensor, device="meta")) for tensor in model.buffers()]
    parameters = [(p, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)) for p in model.parameters()]
    try:
        return copy.deepcopy(model, {id(tensor): meta for tensor, meta in [*tensors, *parameters]})
    except Exception:  # models hold anything
        return None


def count_flops(model: nn.Module, inputs: Tensor) -> float | None:
    """FLOPs of one training step; None if they cannot be counted.

    The forward pass is counted on meta tensors, which takes neither time nor memory; the backward pass counts twice as
    many.

    Args:
        model: Called with ``inputs``; it is not changed.
        inputs: A batch, (B, ...).

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """
    meta, batch = meta_copy(model), torch.empty_like(inputs, device="meta")
    if meta is None:
        return None
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            return 3.0 * measure_flops(meta, lambda: meta(batch)) or None
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a model whose control flow depends on values
        return None
