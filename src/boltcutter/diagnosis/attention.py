"""Attention in a pass of the user's own step: scores that are not scaled, and what its weights leave out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.source import is_own_file

VIEWS = frozenset(
    ("chunk", "split", "view", "reshape", "transpose", "permute", "unbind", "unflatten", "contiguous", "__getitem__")
) | {"squeeze", "unsqueeze", "swapaxes", "movedim", "mT", "T", "__get__"}
PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "einsum"))
MASKED = frozenset(("masked_fill", "where", "add", "__add__"))
FEWEST = 16  # dimensions of a head
LARGE = 1.2  # deviation of scores before training, where it is about 0.3 if they are scaled
MOST = 16  # masks of a pass
LEFT_OUT = 1e-6  # a weight


class Attention:
    """Follow queries and keys of one layer's input to a softmax of their products.

    Args:
        size: Samples of the batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.origins = WeakTensorKeyDictionary()  # of what linear layers computed: of which input
        self.inputs = WeakTensorKeyDictionary()  # numbers of inputs
        self.scores = WeakTensorKeyDictionary()  # products of queries and keys: dimensions of a head
        self.weights = WeakTensorKeyDictionary()  # softmax of scores: these, and dimensions of a head
        self.masks: list[Tensor] = []  # (N, T): True where all attention of a sample leaves a place out
        self.found: list[str] = []

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a function has made of its arguments."""
        given = [a for a in args if isinstance(a, Tensor)]
        first = given[0] if given else None
        if first is None:
            return
        if name == "linear":
            if first not in self.inputs:
                self.inputs[first] = len(self.inputs)
            self.origins[result] = self.inputs[first]
        elif name in VIEWS and first in self.origins:
            self.origins.update(dict.fromkeys(tensors_of(result), self.origins[first]))
        elif name in (*PRODUCTS, "dropout") and first in self.weights:
            if name == "dropout":
                self.weights[result] = self.weights[first]
            else:
                self._rate(*self.weights[first])
        elif name in PRODUCTS and len(given) == 2 and result.ndim > 2 and all(t in self.origins for t in given):
            if self.origins[given[0]] == self.origins[given[1]]:
                self.scores[result] = first.shape[-1]
        elif name in MASKED and any(t in self.scores for t in given):
            self.scores[result] = next(self.scores[t] for t in given if t in self.scores)
        elif name == "softmax" and isinstance(result, Tensor):
            self._leave_out(result)
            if first in self.scores and self.scores[first] >= FEWEST and _is_called_by_user():
                self.weights[result] = (first.detach(), self.scores[first])
        elif name == "scaled_dot_product_attention":
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim > 1:
                self._leave_out(mask.float())

    def _rate(self, scores: Tensor, dims: int) -> None:
        deviation = float(scores[scores > -1e3].double().std())
        if deviation > LARGE:
            self.found.append(
                f"scores of attention, {tuple(scores.shape)}, are products of queries and keys of {dims} dimensions, "
                f"which are not divided by their root (deviation {deviation:.2g}), so the softmax is almost hard from "
                f"the start, and learns slowly; divide by {dims} ** 0.5"
            )

    def _leave_out(self, weights: Tensor) -> None:
        """Keep which places no query of a sample attends to, where some are left out, and not all."""
        if len(self.masks) >= MOST or weights.is_nested or weights.ndim < 2 or len(weights) != self.size:
            return
        mask = weights.detach().abs().amax(dim=[*range(1, weights.ndim - 1)]) if weights.ndim > 2 else weights.detach()
        out = mask < LEFT_OUT
        if bool(out.any()) and not bool(out.all()):
            self.masks.append(out)


def _is_called_by_user() -> bool:
    """Whether the function that is being called is called by the user's own code, and by no library."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("boltcutter.", "torch.")):
        frame = frame.f_back
    return is_own_file(frame.f_code.co_filename)


@check("attention-scale", "likely", at="probe")
def attention_scale(seen: Evidence) -> Lines:
    """Products of queries and keys of one input go to a softmax unscaled, and vary by more than 1.2 at the start."""
    yield from remarks(seen, "attention-scale")
