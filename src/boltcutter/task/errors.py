"""Errors of tasks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

LIBRARIES = "site-packages"  # in the paths of frames that are not shown


class CompilerError(RuntimeError):
    """The compiler that ``task.compile`` selects is not available, or does not support the model or strategy."""

    hide_traceback = True


class TotalStepsError(ValueError):
    """A scheduler needs the number of training steps, which is unknown."""

    hide_traceback = True


class MismatchError(ValueError):
    """Outputs of the model and targets do not match each other or the loss."""

    hide_traceback = True


def call_with_batch(function: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor) -> Any:
    """Call a method of a task, or the update of its metrics.

    Raises:
        MismatchError: It fails; the shapes and types in the message explain why.
    """
    try:
        result = function(outputs, targets)
        if function.__name__ == "losses" and result.ndim == 0:
            raise ValueError('returned one value instead of the loss of each sample; use reduction="none"')
        return result
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):
            raise
        owner: Any = getattr(function, "__self__", None)
        where = "task.metrics" if isinstance(owner, MetricCollection) else function.__qualname__
        frames = [frame for frame in extract_tb(error.__traceback__)[1:] if LIBRARIES not in frame.filename]
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        remedy = "correct the model or the data"
        if getattr(owner, "kind", "") == "classification":
            remedy = "outputs should have the shape (N, C), and targets (N,) should be class indices from 0 to C - 1"
        raise MismatchError(
            f"{where}{place}: {' '.join(str(error).split()).rstrip('.')}; "
            f"outputs: {_describe(outputs)}; targets: {_describe(targets)}; {remedy}"
        ) from error


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    limits = ""
    if value.numel() and not value.dtype.is_floating_point and value.dtype != torch.bool:
        with suppress(RuntimeError):  # a CUDA device cannot be used after an index out of range
            limits = f" from {value.min()} to {value.max()}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{limits}"
