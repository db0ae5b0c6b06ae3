"""The samples from which static quantization finds the ranges of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
from torch import Tensor

POOL = 4  # samples that are read for each that is used


def stratified(
    batches: Iterable[tuple[tuple[Tensor, ...], Tensor | None]], samples: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs in which each class has the same number of samples, as far as those that are read allow it.

    Args:
        batches: Inputs and targets in random order. Without one class index for each sample, inputs are passed on.
        samples: Number of samples that are used.
    """
    pool, classes, size = list[Tensor](), list[int](), 1
    for inputs, targets in batches:
        is_varied = bool(pool) and pool[0].shape != inputs[0].shape[1:]
        if targets is None or targets.ndim != 1 or targets.is_floating_point() or len(inputs) != 1 or is_varied:
            yield tuple(tensor[:samples] for tensor in inputs) if len({*map(len, inputs)}) == 1 else inputs
            if (samples := samples - len(inputs[0])) <= 0:
                return
            continue
        size = max(size, len(targets))
        pool += inputs[0]
        classes += targets.tolist()
        if len(pool) >= POOL * samples:
            break
    rows: dict[int, list[int]] = {}
    for row, label in enumerate(classes):
        rows.setdefault(label, []).append(row)
    order = [row for turn in zip_longest(*(rows[label] for label in sorted(rows))) for row in turn if row is not None]
    order = order[:samples]
    for first in range(0, len(order), size):
        yield (torch.stack([pool[row] for row in order[first : first + size]]),)
