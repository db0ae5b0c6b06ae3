"""How many samples a batch has, whatever its author made it of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

COUNTS = ("num_graphs", "batch_size")  # attributes by which libraries tell the size of their batches


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor of a batch: its inputs; None where there is none."""
    while not isinstance(batch, Tensor):
        if type(batch) not in (list, tuple):
            return next((found for part in parts(batch) if (found := first_tensor(part)) is not None), None)
        if not batch:
            return None
        batch = batch[0]
    return batch


def parts(batch: Any) -> Iterable[Any]:
    """What a batch is made of, as far as its kind is known."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


def count_samples(batch: Any) -> int | None:
    """Samples of one rank's batch; None where nothing tells.

    It is the length of the first tensor; of a class of a library's own, what one of ``COUNTS`` says, or ``len``.
    """
    while type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor | list | tuple):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # sequences that have a first element: all of them
    told = next((count for name in COUNTS if isinstance(count := getattr(batch, name, None), int)), None)
    if told is not None or isinstance(batch, str | bytes):
        return told
    for part in parts(batch):
        if not isinstance(part, int | float) and (found := count_samples(part)) is not None:
            return found
    if isinstance(batch, list) or (hasattr(batch, "__len__") and not isinstance(batch, tuple | Mapping)):
        return len(batch)
    return None
