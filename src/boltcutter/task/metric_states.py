"""States of metrics: not shared by chance; in checkpoints plain types, and merged if the number of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum

from boltcutter.internals import disable_compute_groups, reductions

UPDATE_COUNT = "_update_count"

State = dict[str, Any]


def get_state(metric: Metric) -> State:
    """Return a copy of a metric's state on the CPU: a tensor or a list of tensors for each of its variables."""
    state: State = {UPDATE_COUNT: metric.update_count}
    for name, value in metric.metric_state.items():
        state[name] = [plain_tensor(tensor) for tensor in value] if isinstance(value, list) else plain_tensor(value)
    return state


def plain_tensor(value: Tensor) -> Tensor:
    """Return a copy on the CPU without the subclass of a tensor, of which a checkpoint could hold no instance."""
    return value.detach().as_subclass(Tensor).cpu().clone()


def separate(module: nn.Module) -> None:
    """Let each metric in the collections of a module have its own state, unless the user has grouped them."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            disable_compute_groups(part)


def set_state(metric: Metric, state: State) -> None:
    """Restore a metric's state as returned by ``get_state``.

    Raises:
        ValueError: An entry is not of the metric, or of another type.
    """
    own = get_state(metric)
    for name, value in state.items():
        kind, items = int if name == UPDATE_COUNT else Tensor, value if isinstance(value, list) else [value]
        if name not in own or not all(isinstance(item, kind) for item in items):
            raise ValueError(f"{type(metric).__name__} has no state {name!r} of the type {type(value).__name__}")
        if isinstance(value, list):
            value = [tensor.to(metric.device) for tensor in value]
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)


def merge_states(metric: Metric, states: Sequence[State]) -> State:
    """Merge the states of several ranks by the reduction of each variable.

    Raises:
        ValueError: A variable has no reduction.
    """
    counts = [state[UPDATE_COUNT] for state in states]
    merged: State = {UPDATE_COUNT: sum(counts)}
    for name, reduction in reductions(metric).items():
        values = [state[name] for state in states]
        if any(isinstance(value, list) for value in values):
            lists = [value if isinstance(value, list) else [value] for value in values]
            merged[name] = [tensor for tensors in lists for tensor in tensors]
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
