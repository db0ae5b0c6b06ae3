"""Numerical precision, and those that Lightning lacks."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.settings import Settings
from boltcutter.strategy.precision import FLOAT8


def set_numerics(cfg: Settings) -> None:
    """Set TF32 for products and convolutions, and deterministic algorithms; before CUDA and Inductor are initialized.

    Lightning sets ``torch.use_deterministic_algorithms``, in spawned ranks too.
    """
    precision = cfg.matmul_precision
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"  # otherwise convolutions and RNNs would still use TF32
    torch.backends.cudnn.deterministic = bool(cfg.trainer.get("deterministic"))
    if torch.backends.cudnn.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # also read by the processes that compile
        if "torch._inductor.config" in sys.modules:
            sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]


def placeholder_precision(precision: str, device: str) -> str | None:
    """Return the precision to pass to the Trainer if ``set_precision`` replaces it afterwards; otherwise None."""
    return "32-true" if precision == FLOAT8 or (precision == "16-mixed" and device == "cpu") else None


def set_precision(trainer: L.Trainer, precision: str) -> None:
    """Set a precision that Lightning lacks: FP8, or float16 on CPU, where Lightning would use bfloat16.

    Raises:
        ConfigError: The strategy shards the model, which neither supports.
    """
    if isinstance(trainer.strategy, ModelParallelStrategy):
        reason = (
            "gradient scaling is not supported for sharded gradients"
            if precision == "16-mixed"
            else "not supported for a sharded model"
        )
        raise ConfigError(f"trainer.precision={precision}: {reason}; try bf16-true")
    if precision == FLOAT8:
        from boltcutter.strategy.float8 import Float8Precision  # needs torchao

        with as_config_error():
            trainer.strategy.precision_plugin = Float8Precision()
    else:
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def apply_precision(plugin: Precision, task: L.LightningModule, owner: nn.Module, method: str) -> None:
    """Convert a task for use without the trainer, and run a method of it or its model as the trainer would.

    Args:
        plugin: The trainer's precision.
        task: Its weights are converted in place.
        owner: Module whose method is replaced.
        method: Name of the method.
    """
    plugin.convert_module(task)
    compute, lock = getattr(owner, method), threading.Lock()  # the default dtype is not local to a thread

    def convert_and_compute(*inputs: Any, **options: Any) -> Any:
        with lock, plugin.forward_context():
            return compute(*plugin.convert_input(inputs), **options)

    if type(plugin) is not Precision:  # float32 needs no context
        setattr(owner, method, convert_and_compute)
