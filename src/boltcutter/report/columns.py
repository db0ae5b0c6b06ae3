"""Columns of a table, made from the outputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.report.csv_table import MAX_COLUMNS, Table, spread


def select_rows(table: Table, rows: Sequence[int] | npt.NDArray[Any]) -> Table:
    """The given rows, in this order."""
    chosen = np.asarray(rows, np.int64)
    return {name: column[chosen] for name, column in table.items()}


def concatenate(tables: Sequence[Table]) -> Table:
    """The rows of all tables, with the columns that all of them have."""
    if len(tables) == 1:
        return dict(tables[0])  # without a copy, which may be large
    common = [name for name in (tables[0] if tables else ()) if all(name in table for table in tables)]
    return {name: np.concatenate([table[name] for table in tables]) for name in common}


def to_columns(outputs: Any, targets: Any, count: int) -> tuple[Table, dict[str, str]]:
    """Convert the outputs of a step to columns of a table.

    A tensor of shape (B,) or (B, 1) is one column, one of shape (B, C) or (B, C, 1) C columns. In a mapping, ``losses``
    become the column ``loss``. ``predictions`` (B, C) are class probabilities if ``targets`` (an entry, or else the
    second element of the batch) are integers; then the most probable class and its confidence are columns.

    Args:
        outputs: Output of the step: a tensor, a mapping, or anything else.
        targets: Targets of the batch, if any.
        count: Number of samples of the batch.

    Returns:
        Columns by name, and the skipped outputs with the reason.
    """
    if outputs is None or (isinstance(outputs, Tensor) and outputs.ndim == 0):
        return {}, {}
    named = dict(outputs) if isinstance(outputs, Mapping) else {"prediction": outputs}
    named, targets = {name: _flat(value) for name, value in named.items()}, _flat(targets)
    targets = named.pop("targets", targets)
    predictions = named.pop("predictions", None)
    if predictions is None and isinstance(outputs, Tensor) and outputs.ndim and len(outputs) == count:
        predictions = named.pop("prediction")
    found: Table = {}
    skipped: dict[str, str] = {}
    if "losses" in named:
        named = {"loss": named.pop("losses"), **named}
    if isinstance(predictions, Tensor):
        if _is_class(predictions, targets, count):
            confidence, predicted = predictions.float().max(dim=-1)
            named |= {"target": targets, "prediction": predicted, "confidence": confidence}
        else:
            named |= {"target": targets, "prediction": predictions}
    for name, value in named.items():
        fault = _skip_reason(value, count)
        if fault is None:
            found |= spread(name, to_numpy(value))
        elif fault:
            skipped[name] = fault
    return found, skipped


def _flat(value: Any) -> Any:
    """Series of one variable, shape (B, T, 1), as (B, T)."""
    return value.squeeze(2) if isinstance(value, Tensor) and value.ndim == 3 and value.size(2) == 1 else value


def to_numpy(value: Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to NumPy, half precision to float32: NumPy has no bfloat16."""
    value = value.detach()
    half = value.dtype in (torch.bfloat16, torch.float16)
    found: npt.NDArray[Any] = (value.float() if half else value).cpu().numpy()
    return found


def _is_class(predictions: Tensor, targets: Any, count: int) -> bool:
    """Whether targets are class indices and predictions have a value per class."""
    whole = isinstance(targets, Tensor) and targets.shape == (count,) and not targets.is_floating_point()
    return whole and predictions.ndim == 2 and len(predictions) == count and predictions.is_floating_point()


def _skip_reason(value: Any, count: int) -> str | None:
    """Reason why an output cannot be a column; empty if it is skipped silently."""
    if not isinstance(value, Tensor):
        return "" if value is None else f"a {type(value).__name__}, not a tensor"
    if value.ndim == 0:
        return "one value for the batch"
    if len(value) != count:
        return f"{len(value)} values for {count} samples"
    each = value[0].numel() if count else 0
    if value.ndim > 2 or each > MAX_COLUMNS:
        shape = " × ".join(map(str, value.shape[1:]))
        return f"{shape} values per sample, of which a table has at most {MAX_COLUMNS:,} in one dimension"
    return None
