"""Numbers in fewer or more bytes: what the device can do, told before training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy

from boltcutter import build
from boltcutter.config import ConfigError, DictConfig
from boltcutter.locate import locate, parameters

CANONICAL = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}
FLOAT8 = "float8"  # which Lightning has not
EIGHT_BITS = {FLOAT8: "torchao", "transformer-engine": "transformer_engine"}  # and what each needs
EPS = 1e-4  # that float16 can tell from zero, also where it is added to what is small


def check_precision(cfg: DictConfig) -> str:
    """The precision that is asked for, in the field's full words.

    Args:
        cfg: The run's.

    Raises:
        ConfigError: The device, or the optimizer, cannot do it.
    """
    asked = str(cfg.trainer.get("precision"))
    precision, device = CANONICAL.get(asked, asked), device_type(str(cfg.trainer.get("accelerator", "auto")))
    where = f"trainer.precision={precision}"
    if device == "mps" and precision.endswith("-mixed"):
        raise ConfigError(f"{where}: Lightning mixes precisions on CUDA and processors alone; try 16-true or 32-true")
    if device == "mps" and precision == "64-true":
        raise ConfigError(f"{where}: Apple's GPU has no 64-bit floating point numbers; try 32-true")
    if precision.startswith(tuple(EIGHT_BITS)) and device != "cuda":
        raise ConfigError(f"{where}: 8-bit numbers need a CUDA GPU of compute capability 8.9 or more; try bf16-mixed")
    if device == "cuda":
        _check_cuda(where, precision)
    if precision == "16-true" and cfg.get("optimizer") is not None:
        _check_eps(where, cfg.optimizer)
    return precision


def device_type(accelerator: str) -> str:
    """cuda, mps, cpu, or whatever else an accelerator is called."""
    if accelerator not in ("auto", "gpu"):
        return accelerator
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def placeholder_precision(precision: str, device: str) -> str | None:
    """What Lightning is told in place of a precision that ``set_precision`` puts in afterwards; None for all others."""
    return "32-true" if precision == FLOAT8 or (precision == "16-mixed" and device == "cpu") else None


def set_precision(trainer: L.Trainer, precision: str) -> None:
    """Take a precision that Lightning has not: 8 bits, or float16 on a processor, where it would take bfloat16.

    Raises:
        ConfigError: The model is cut over ranks, and its gradients with it.
    """
    if isinstance(trainer.strategy, ModelParallelStrategy):
        told = (
            "no gradients are scaled where ranks share them"
            if precision == "16-mixed"
            else "not for a model that is cut over ranks"
        )
        raise ConfigError(f"trainer.precision={precision}: {told}; try bf16-true")
    if precision == FLOAT8:
        plugin = {"_target_": "boltcutter.strategy.float8.Float8Precision"}
        trainer.strategy.precision_plugin = build.build(plugin, "trainer")
    else:
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def _check_cuda(where: str, precision: str) -> None:
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if precision.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"{where}: {name} has no bfloat16; try {precision.replace('bf16', '16')}")
    for eight, library in EIGHT_BITS.items():
        if precision.startswith(eight):
            if capability < (8, 9):
                raise ConfigError(
                    f"{where}: {name} has no 8-bit numbers (it takes compute capability 8.9); try bf16-mixed"
                )
            if find_spec(library) is None:
                raise ConfigError(f"{where}: {library} is not installed; pip install {library}, or try bf16-mixed")


def _check_eps(where: str, optimizer: DictConfig) -> None:
    """Refuse what would divide by zero."""
    default: Any = parameters(locate(optimizer["_target_"])).get("eps")
    eps = optimizer.get("eps", default.default if default else None)
    if isinstance(eps, float) and not torch.tensor(eps, dtype=torch.float16):
        raise ConfigError(f"{where}: optimizer.eps={eps:g} is zero in float16; try +optimizer.eps={EPS}")
