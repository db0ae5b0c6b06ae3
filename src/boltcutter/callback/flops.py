"""What devices can do at best, and what a model asks of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Dense matrix products, in 10¹² operations a second: of 16 bits adding up in 32, of TF32, of 32 bits. The first name
# that stands in the device's own counts, so the longer ones come first.
# Source: NVIDIA's data sheets (V100, T4, A10, A30, A40, A100, L4, L40, L40S, H100, H200, B200) and whitepapers on the
# GA102, AD102 and Blackwell RTX architectures; where a sheet gives numbers with sparsity, half of them.
PEAKS: dict[str, tuple[float, float, float]] = {
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
WITHOUT_BF16 = ("V100", "T4")  # their matrix units have no bfloat16


def peak_flops(device: str, precision: str) -> float | None:
    """Operations a second of matrix products at best, or None where it is not known.

    Args:
        device: Its own name, as ``NVIDIA A100-SXM4-80GB``.
        precision: As the trainer's.
    """
    words = device.replace("-", " ").split()
    name = next((n for n in PEAKS if _stands_in(n.split(), words)), None)
    if (
        name is None
        or precision.startswith(("64", "float8", "transformer-engine"))
        or (precision.startswith("bf16") and name in WITHOUT_BF16)
    ):
        return None
    half, tf32, full = PEAKS[name]
    if precision.startswith(("16", "bf16")):
        return half * 1e12
    return (full if torch.get_float32_matmul_precision() == "highest" else tf32) * 1e12


def _stands_in(name: list[str], words: list[str]) -> bool:
    return any(words[at : at + len(name)] == name for at in range(len(words)))


def count_flops(model: nn.Module, inputs: Tensor) -> float | None:
    """Operations of one training step, or None where they cannot be counted.

    Those of the forward pass are counted on tensors without contents, so that it costs neither time nor memory;
    the backward pass takes twice as many.

    Args:
        model: Called with ``inputs``.
        inputs: A batch.

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B (what counts).
    """
    from torch.utils.flop_counter import FlopCounterMode  # half a second, which not every training needs

    named: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}
        with torch.compiler.set_stance("force_eager"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, empty, (torch.empty_like(inputs, device="meta"),))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a model that looks at its numbers
        return None
    return 3.0 * counter.get_total_flops() or None
