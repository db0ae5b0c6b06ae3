"""States of metrics in checkpoints: kept in plain types, and merged where the number of ranks has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum

COUNT = "_update_count"

State = dict[str, Any]


def state_of(metric: Metric) -> State:
    """What a metric has gathered so far: a tensor, or a list of tensors, for each of its states."""
    found: State = {COUNT: metric._update_count}
    for name in metric._defaults:
        value = getattr(metric, name)
        found[name] = [part.cpu().clone() for part in value] if isinstance(value, list) else value.cpu().clone()
    return found


def restore(metric: Metric, state: State) -> None:
    """Give a metric what ``state_of`` has returned."""
    for name, value in state.items():
        if isinstance(value, list):
            value = [part.to(metric.device) for part in value]
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)


def merge(metric: Metric, states: Sequence[State]) -> State:
    """One state that counts what several ranks have gathered, by the reduction of each state.

    Raises:
        ValueError: A state has no reduction by which it could be merged.
    """
    counts = [state[COUNT] for state in states]
    merged: State = {COUNT: sum(counts)}
    reductions: dict[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        values = [state[name] for state in states]
        if any(isinstance(value, list) for value in values):
            lists = [value if isinstance(value, list) else [value] for value in values]
            merged[name] = [part for parts in lists for part in parts]
        elif reduction is dim_zero_sum:
            merged[name] = torch.stack(values).sum(dim=0)
        elif reduction is dim_zero_mean:
            weights = torch.tensor(counts, dtype=values[0].dtype) / max(1, sum(counts))
            merged[name] = torch.tensordot(weights, torch.stack(values), dims=1)
        elif reduction is dim_zero_cat:
            merged[name] = torch.cat(values)
        elif reduction is None:
            raise ValueError(f"{type(metric).__name__}.{name} has no reduction over ranks")
        else:
            merged[name] = reduction(torch.stack(values))
    return merged
