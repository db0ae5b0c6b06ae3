"""Find the inputs and the number of samples in batches of any structure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

SIZE_ATTRIBUTES = ("num_graphs", "batch_size")  # of the batch classes of libraries such as PyTorch Geometric


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch, which holds its inputs; None if it has no tensor."""
    while not isinstance(batch, Tensor):
        if type(batch) not in (list, tuple):
            return next((found for part in children(batch) if (found := first_tensor(part)) is not None), None)
        if not batch:
            return None
        batch = batch[0]
    return batch


def children(batch: Any) -> Iterable[Any]:
    """Return the elements of a mapping, sequence or dataclass; empty for any other type."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


def count_samples(batch: Any) -> int | None:
    """Count the samples in the batch of one rank; None if the count is unknown.

    It is the length of the first tensor; for other batch classes, one of ``SIZE_ATTRIBUTES`` or ``len``.
    """
    while type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor | list | tuple):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # the number of sequences that have a first time step, which all have
    size = next((count for name in SIZE_ATTRIBUTES if isinstance(count := getattr(batch, name, None), int)), None)
    if size is not None or isinstance(batch, str | bytes):
        return size
    for part in children(batch):
        if not isinstance(part, int | float) and (found := count_samples(part)) is not None:
            return found
    if isinstance(batch, list) or (hasattr(batch, "__len__") and not isinstance(batch, tuple | Mapping)):
        return len(batch)
    return None
