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
LAYERS = frozenset(("linear", "layer_norm", "embedding", "rms_norm"))
SAME_SHAPE = frozenset(("relu", "tanh", "gelu", "silu", "dropout", "normalize", "sigmoid", "add", "__add__"))
CENTERED = 1e-3  # of the deviation
MOST_VIEWS = 4  # of a sample
NORMS = frozenset(("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"))


class Lengths:
    """Follow columns over the samples that are scaled to length 1, to a product that compares samples.

    Args:
        size: Samples of the batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns = WeakTensorKeyDictionary()  # (N, D) of columns of length 1: the shape of views that have it
        self.norms = WeakTensorKeyDictionary()  # of columns: of which tensor
        self.rows = WeakTensorKeyDictionary()  # whose last dimension is of features
        self.found: list[str] = []

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a function has made of its arguments."""
        first, other = (*args, None, None)[:2]
        if name in JOINS and isinstance(first, list | tuple) and all(part in self.columns for part in first):
            self.columns[result] = self.columns[first[0]]  # of several views
        if not isinstance(first, Tensor) or not isinstance(result, Tensor):
            return
        if result.ndim > 2 or first.ndim > 2:
            self._follow_rows(name, first, args, kwargs, result)
        if first.ndim == 3 and first.requires_grad and len(first) == self.size:
            self._follow_views(name, first, args, kwargs, result)
        if first.ndim != 2 or not self.size or len(first) % self.size:  # of several views, too
            return
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        is_over_samples = name in ("normalize", *NORMS) and dim in (0, -2) and first.requires_grad
        if is_over_samples and float(first.detach().mean(0).abs().max()) < CENTERED * float(first.detach().std()):
            return  # columns are standardized over the samples
        if is_over_samples and name == "normalize":
            self.columns[result] = ()
        elif is_over_samples:
            self.norms[result] = first
        elif name in DIVISIONS and isinstance(other, Tensor) and other in self.norms and self.norms[other] is first:
            self.columns[result] = ()
        elif name in PRODUCTS and first in self.columns and isinstance(other, Tensor) and other.ndim == 2:
            views = self.columns[first]
            over = f"1 of {views}, the views" if views else "0, the samples"
            self.found.append(
                f"vectors of {len(first)} samples, {tuple(first.shape)}, are compared, but normalized over dimension "
                f"{over}, so their lengths differ, and depend on others; normalize over dimension -1"
            )

    def _follow_views(self, name: str, first: Tensor, args: Any, kwargs: Any, result: Tensor) -> None:
        """Note which of a few views of each sample, (N, V, D), have length 1 over the views."""
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
        if name == "normalize" and dim == 1 and first.shape[1] <= MOST_VIEWS < first.shape[2]:
            self.columns[result] = tuple(first.shape)
        elif name in ("__getitem__", "select") and first in self.columns and result.ndim == 2:
            self.columns[result] = self.columns[first]

    def _follow_rows(self, name: str, first: Tensor, args: Any, kwargs: Any, result: Tensor) -> None:
        """Follow features in the last of three dimensions or more, to a cosine over another one, by default."""
        if (name in LAYERS and result.ndim > 2) or (
            name in SAME_SHAPE and first in self.rows and result.shape == first.shape
        ):
            self.rows[result] = True
        elif name == "cosine_similarity" and not kwargs and len(args) == 2 and all(t in self.rows for t in args):
            self.found.append(
                f"features of a layer, {tuple(first.shape)}, are compared by a cosine over dimension 1, which torch "
                "takes if none is given, and not over the features; write dim=-1"
            )


@check("normalized-over-batch", "likely", at="probe")
def normalized_over_batch(seen: Evidence) -> Lines:
    """Vectors have length 1 over the samples (N, D), or views (N, V, D), or a cosine is over places by default."""
    yield from remarks(seen, "normalized-over-batch")
