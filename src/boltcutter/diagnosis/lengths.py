"""Vectors that are scaled to length 1 in a pass of the user's own step: for probes only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.temperatures import DIVISIONS

PRODUCTS = frozenset(("matmul", "__matmul__", "mm"))
JOINS = frozenset(("cat", "concat", "concatenate", "vstack"))
NORMS = frozenset(("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"))


class Lengths:
    """Follow columns over the samples that are scaled to length 1, to a product that compares samples.

    Args:
        size: Samples of the batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns = WeakTensorKeyDictionary()  # (N, D), of which each column has length 1
        self.norms = WeakTensorKeyDictionary()  # of columns: of which tensor
        self.found: list[str] = []

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a function has made of its arguments."""
        first, other = (*args, None, None)[:2]
        if name in JOINS and isinstance(first, list | tuple) and all(part in self.columns for part in first):
            self.columns[result] = True  # of several views
        if not isinstance(first, Tensor) or not isinstance(result, Tensor):
            return
        if first.ndim != 2 or not self.size or len(first) % self.size:  # of several views, too
            return
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if name == "normalize" and dim in (0, -2) and first.requires_grad:
            self.columns[result] = True
        elif name in NORMS and dim in (0, -2) and first.requires_grad:
            self.norms[result] = first
        elif name in DIVISIONS and isinstance(other, Tensor) and other in self.norms and self.norms[other] is first:
            self.columns[result] = True
        elif name in PRODUCTS and first in self.columns and isinstance(other, Tensor) and other.ndim == 2:
            self.found.append(
                f"vectors of {len(first)} samples, {tuple(first.shape)}, are compared, but normalized over dimension "
                "0, the samples, so their lengths differ, and depend on the batch; normalize over dimension 1"
            )


@check("normalized-over-batch", "likely", at="probe")
def normalized_over_batch(seen: Evidence) -> Lines:
    """Vectors (N, D) are scaled to length 1 over the samples, and then compared with one another or others."""
    yield from remarks(seen, "normalized-over-batch")
