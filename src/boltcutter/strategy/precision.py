"""Names of precisions and devices, as the arguments ``precision`` and ``accelerator`` of Lightning's Trainer."""

from __future__ import annotations

import torch

CANONICAL = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}
FLOAT8 = "float8"  # not part of Lightning


def full_precision(requested: object) -> str:
    """The full name of a precision, such as ``16-mixed`` for ``16``."""
    return CANONICAL.get(str(requested), str(requested))


def device_type(accelerator: str) -> str:
    """The device type that an accelerator selects: ``cuda``, ``mps``, ``cpu``, or its own name."""
    if accelerator not in ("auto", "gpu"):
        return accelerator
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
