"""Batches of any structure with some of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from boltcutter import structure
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
    taken = structure.take_rows(batch, rows, count)
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
