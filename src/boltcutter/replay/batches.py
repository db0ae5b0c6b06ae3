"""Batches of any structure with some of their samples, and the values in a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from boltcutter.structure import count_samples


class IndivisibleBatchError(ValueError):
    """Samples cannot be taken out of a batch."""


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """A batch of other rows of this one.

    Raises:
        IndivisibleBatchError: It is of a class whose samples are not known.
    """
    count = count_samples(batch)
    if not count:
        raise IndivisibleBatchError(f"the samples of a {type(batch).__name__} cannot be told apart")
    taken = _take(batch, list(rows), count)
    if count_samples(taken) != len(rows):
        raise IndivisibleBatchError(f"the samples of a {type(batch).__name__} cannot be told apart")
    return taken


def without_rows(batch: Any, rows: Sequence[int]) -> Any:
    """A batch without some of its rows; the first of the others is repeated where it would be empty of pairs."""
    count = count_samples(batch) or 0
    left = [row for row in range(count) if row not in set(rows)]
    if not left:
        raise IndivisibleBatchError("a batch of this sample alone cannot be trained without it")
    return take_rows(batch, left)


def _take(value: Any, rows: list[int], count: int) -> Any:
    if isinstance(value, Tensor):
        return value[torch.tensor(rows, device=value.device)] if value.ndim and len(value) == count else value
    if isinstance(value, Mapping):
        taken = {key: _take(inner, rows, count) for key, inner in value.items()}
        return taken if type(value) is dict else type(value)(taken)  # type: ignore[call-arg]
    if isinstance(value, list) and len(value) == count and not all(_is_column(inner, count) for inner in value):
        return [value[row] for row in rows]
    if isinstance(value, list | tuple):
        items = [_take(inner, rows, count) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _take(getattr(value, f.name), rows, count) for f in fields(value) if f.init})
    return value


def _is_column(value: Any, count: int) -> bool:
    """Whether a value has an entry for each sample."""
    is_scalar = isinstance(value, Tensor) and not value.ndim
    return isinstance(value, Tensor | list | tuple) and not is_scalar and len(value) == count
