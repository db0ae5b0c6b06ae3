"""Indices that are computed of two others, in a pass of the user's own step: for probes only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence

PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply"))
SUMS = frozenset(("add", "__add__", "__radd__"))
READS = frozenset(("one_hot", "embedding", "scatter_add", "index_add", "scatter_add_", "index_add_"))
FEWEST, MOST = 16, 65_536  # pairs


class Indices:
    """Follow ``a * k + b`` to what it is an index of."""

    def __init__(self) -> None:
        self.scaled = WeakTensorKeyDictionary()  # integers, times a number: these, and the number
        self.joined = WeakTensorKeyDictionary()  # plus others: what is to be said
        self.found: list[str] = []

    def follow(self, name: str, args: Any, result: Any) -> None:
        """Note what a function has made of its arguments."""
        if name in PRODUCTS and isinstance(result, Tensor) and _are_integers(result) and len(args) == 2:
            factor = next((a for a in args if type(a) is int), 0)
            first = next((a for a in args if isinstance(a, Tensor)), None)
            if factor > 1 and first is not None and first.numel() >= FEWEST:
                self.scaled[result] = (first, factor)
        elif name in SUMS and isinstance(result, Tensor) and len(args) == 2:
            scaled = next((a for a in args if isinstance(a, Tensor) and a in self.scaled), None)
            other = next((a for a in args if isinstance(a, Tensor) and a is not scaled), None)
            if scaled is not None and other is not None and _are_integers(other) and other.shape == scaled.shape:
                first, factor = self.scaled[scaled]
                self._join(first, factor, other, result)
        elif name in READS:
            self.found += [self.joined[t] for t in _tensors(args) if t in self.joined]

    def _join(self, first: Tensor, factor: int, other: Tensor, result: Tensor) -> None:
        """Whether pairs of numbers have the same index, as the second ones are not all below the factor."""
        most = int(other.max()) if other.numel() <= MOST else 0
        if most < factor or int(other.min()) < 0:
            return
        count = len(torch.unique(torch.stack([first.flatten(), other.flatten()]), dim=1).T)
        if len(torch.unique(result)) < count:
            self.joined[result] = (
                f"an index is computed as a * {factor} + b, but b is up to {most}, so {count} pairs of a and b have "
                f"{len(torch.unique(result))} indices, and others are mixed; multiply by the number of values of b"
            )


def _tensors(args: Any) -> list[Tensor]:
    inner = [t for a in args for t in (a if isinstance(a, tuple | list) else (a,))]
    return [t for t in inner if isinstance(t, Tensor)]


def _are_integers(t: Tensor) -> bool:
    return t.dtype in (torch.int64, torch.int32)


@check("colliding-index", "likely", at="probe")
def colliding_index(seen: Evidence) -> Lines:
    """Rows are read by ``a * k + b``, where b is not always below k, so that different pairs have the same index."""
    yield from remarks(seen, "colliding-index")
