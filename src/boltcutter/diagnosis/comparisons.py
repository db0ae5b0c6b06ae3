"""What is compared in a pass of the user's own step, and does not fit: angles, numbers of columns, and margins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import DIFFERENCES, remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS
from boltcutter.diagnosis.results import is_part
from boltcutter.diagnosis.source import own_classes

# What leaves values what they are.
VIEWS = frozenset(
    (
        *("__getitem__", "squeeze", "unsqueeze", "view", "reshape", "contiguous", "flatten", "detach", "clone", "t"),
        *("float", "double", "to", "cpu", "expand", "expand_as", "view_as", "reshape_as", "long", "transpose"),
    )
)
SCALES = frozenset(("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "rad2deg", "deg2rad"))
KEEPS = frozenset(("abs", "square", "pow", "__pow__", "sqrt", "absolute", *VIEWS, *SCALES))
MEANS = frozenset(("mean", "sum", "nanmean", "median", *REGRESSIONS))
EQUALS = frozenset(("eq", "__eq__", "isin", "ne", "__ne__"))
PICKS = frozenset(("topk", "argmax", "argsort", "sort", "max"))
LOGITS = frozenset(("matmul", "__matmul__", "linear", "mm", "addmm", "einsum", "cosine_similarity", "clamp"))
LOSSES = frozenset(("cross_entropy", "nll_loss"))
FEWEST = 16  # values
MOST = 6  # logits that are kept
ROUNDING = 1e-3  # relative
BEYOND = 0.2  # share of angles over half a turn
ENDS = 0.02  # share of angles near each end of their range
NEAR = 0.8  # of half a turn
EQUAL = 1e-4  # relative
RAISED = 0.95  # share of samples


@dataclass
class Turn:
    """A difference of angles.

    Args:
        text: What is to be said.
        is_averaged: Whether its mean, or sum, was taken.
        is_wrapped: Whether something else was made of it, which may bring it within half a turn.
    """

    text: str
    is_averaged: bool = False
    is_wrapped: bool = False


class Comparisons:
    """Follow angles, indices of columns and logits to what compares them with parts of a batch.

    Args:
        batch: Its tensors.
    """

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self.batch = batch
        self.parts = WeakTensorKeyDictionary()  # what was made of parts of the batch
        self.angles = WeakTensorKeyDictionary()  # results of atan2: what half a turn is
        self.turns = WeakTensorKeyDictionary()  # differences of angles, and what was made of them
        self.columns = WeakTensorKeyDictionary()  # scores without their first columns: how many of how many
        self.indices = WeakTensorKeyDictionary()  # numbers of such columns
        self.all_turns: list[Turn] = []
        self.logits: deque[Tensor] = deque(maxlen=MOST)
        self.scored: list[tuple[int, Tensor]] = []  # columns and targets of cross-entropy
        self.shifted: list[tuple[int, int, Tensor]] = []  # left out of how many, and what is compared
        self.margin = ""

    def follow(self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        """Note what a function has made of its arguments."""
        if not given:
            return
        found = tensors_of(result) if isinstance(result, Tensor | tuple) else []
        self._follow_angles(name, args, given, found)
        self._follow_columns(name, args, kwargs, given, found)
        self._follow_logits(name, given, found)

    def said(self) -> Iterator[tuple[str, str]]:
        """Names of checks, and their lines."""
        yield from (("unwrapped-angle", t.text) for t in self.all_turns if t.is_averaged and not t.is_wrapped)
        for left_out, count, target in self.shifted:
            is_label = any(n == count and t.shape == target.shape and torch.equal(t, target) for n, t in self.scored)
            if int(target.max()) >= count - left_out or (is_label and int(target.min()) >= left_out):
                yield (
                    "shifted-indices",
                    f"the best of {count - left_out} columns are compared with numbers of the batch from "
                    f"{int(target.min())} to {int(target.max())}, but the first {left_out} of {count} columns are left "
                    f"out, so each index is {left_out} less than the number; add {left_out} to the indices",
                )
        if self.margin:
            yield "margin-sign", self.margin

    def _is_part(self, t: Tensor) -> bool:
        return t in self.parts or any(t is each or is_part(t, each) for each in self.batch)

    def _follow_angles(self, name: str, args: Any, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        first = given[0]
        for t in given:
            if t in self.turns:
                self._follow_turn(self.turns[t], name, args, found)
        if not found:
            return
        if name in ("atan2", "arctan2"):
            self.angles[found[0]] = math.pi
        elif name in VIEWS or (name in SCALES and len(given) == 1):
            is_scaled = name in SCALES and first.numel() and first.is_floating_point()
            largest = float(first.detach().abs().max()) if is_scaled else 0.0
            factor = float(found[0].detach().abs().max()) / largest if largest else 1.0
            if first in self.angles:
                self.angles[found[0]] = self.angles[first] * factor
            elif self._is_part(first):
                self.parts[found[0]] = True
        elif len(given) > 1 and (name in DIFFERENCES or name in REGRESSIONS):
            for one, other in (given[:2], given[1::-1]):
                if one in self.angles and self._is_part(other) and (text := _how_far(other, self.angles[one])):
                    turn = Turn(text, is_averaged=name in REGRESSIONS)
                    self.all_turns.append(turn)
                    if name in DIFFERENCES:
                        self.turns[found[0]] = turn

    def _follow_turn(self, turn: Turn, name: str, args: Any, found: Sequence[Tensor]) -> None:
        turn.is_averaged |= name in MEANS
        if name in KEEPS:
            self.turns.update(dict.fromkeys(found, turn))
        elif name not in MEANS:
            turn.is_wrapped |= name not in ("__get__", "size", "dim", "numel", "__len__", "is_floating_point")

    def _follow_columns(
        self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], found: Sequence[Tensor]
    ) -> None:
        first = given[0]
        if name in LOSSES and len(given) > 1 and first.ndim == 2 and not given[1].is_floating_point():
            self.scored.append((first.shape[1], given[1].detach()))
        if not found:
            return
        if name == "__getitem__" and first.ndim == 2 and first.is_floating_point() and found[0].ndim == 2:
            left_out = first.shape[1] - found[0].shape[1]
            is_slice = found[0].untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            at = found[0].storage_offset() - first.storage_offset()
            if (
                is_slice
                and len(first) == len(found[0])
                and 0 < left_out < first.shape[1]
                and at == left_out * first.stride(1)
            ):
                self.columns[found[0]] = left_out, first.shape[1]
        elif name in PICKS and first in self.columns and found[-1].dtype == torch.int64 and found[-1].ndim:
            dim = kwargs.get("dim", args[1] if name in ("argmax", "max") and len(args) > 1 else -1)
            if dim in (1, -1) and not found[-1].requires_grad:
                self.indices[found[-1]] = self.columns[first]
        elif name in VIEWS and first in self.indices:
            self.indices[found[0]] = self.indices[first]
        elif name in EQUALS and len(given) == 2:
            for one, other in (given, given[::-1]):
                is_number = not other.is_floating_point() and other.dtype != torch.bool and other.numel() > 1
                if one in self.indices and is_number and self._is_part(other):
                    self.shifted.append((*self.indices[one], other.detach().flatten()))

    def _follow_logits(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        if name in LOGITS and found and found[0].ndim == 2 and found[0].requires_grad and found[0].shape[1] > 2:
            self.logits.append(found[0].detach().clone())  # which may be changed in place
        elif name == "cross_entropy" and len(given) > 1 and not self.margin and given[0].requires_grad:
            logits, target = given[0].detach(), given[1].detach()
            is_index = logits.ndim == 2 and target.shape == logits.shape[:1] and not target.is_floating_point()
            if is_index and len(target) > 1 and int(target.min()) >= 0 and int(target.max()) < logits.shape[1]:
                raised = [raised for raw in self.logits if (raised := _raised(raw, logits, target)) > 0]
                if raised:
                    self.margin = (
                        f"cross-entropy gets logits of which those of the labels are raised by {raised[0]:.3g}, so the "
                        "task is easier in training; a margin is subtracted from the logit of the label, as "
                        "cos(angle + margin) or cosine - margin"
                    )


def _raised(raw: Tensor, logits: Tensor, target: Tensor) -> float:
    """By how much the logits of labels are larger than those of a layer, times a scale, as all others are; else 0."""
    if raw.shape != logits.shape:
        return 0.0
    own = torch.nn.functional.one_hot(target.long(), logits.shape[1]).bool()
    a, b = raw[~own].double(), logits[~own].double()
    scale = float((a * b).sum() / (a * a).sum().clamp_min(1e-30))
    if scale <= 0 or float((b - scale * a).abs().max()) > EQUAL * float(b.abs().max()):
        return 0.0
    more = logits[own].double() / scale - raw[own].double()
    is_raised = float((more > ROUNDING * float(a.abs().max())).double().mean()) >= RAISED
    return float(more.mean()) * is_raised


def _how_far(target: Tensor, half: float) -> str:
    """What is wrong with a difference of angles of -half to half and those of the batch; else empty."""
    if not target.is_floating_point() or target.numel() < FEWEST:
        return ""
    low, high = (float(v) for v in target.detach().aminmax())
    most = half * (1 + ROUNDING)
    if low >= 0 and most < high <= 2 * most and float((target > most).float().mean()) > BEYOND:
        how = "which are in another range: those over half a turn are never met"
    else:
        ends = [float((sign * target > NEAR * half).float().mean()) for sign in (1, -1)]
        if low < -most or high > most or min(ends) < ENDS:
            return ""
        how = "both of which end where they begin anew, where a small error becomes almost a whole turn"
    return (
        f"an angle of atan2, within {-half:.3g} to {half:.3g}, is compared with angles of the batch from {low:.3g} to "
        f"{high:.3g}, {how}; bring errors into half a turn: (error + {half:.4g}) % {2 * half:.4g} - {half:.4g}"
    )


@check("unwrapped-angle", "likely", at="probe")
def unwrapped_angle(seen: Evidence) -> Lines:
    """The mean error of an angle of atan2 has whole turns: targets have another range, or reach both ends."""
    yield from remarks(seen, "unwrapped-angle")


@check("shifted-indices", "likely", at="probe")
def shifted_indices(seen: Evidence) -> Lines:
    """Numbers of the batch are compared with indices of the best columns, of which the first ones are left out."""
    yield from remarks(seen, "shifted-indices")


@check("margin-sign", "likely", at="probe")
def margin_sign(seen: Evidence) -> Lines:
    """Cross-entropy gets the scores of a layer, all times one number, but those of the labels are raised."""
    own = (*map(vars, own_classes(type(seen.module))), getattr(seen.module, "hparams", {}), vars(seen.module))
    margins = [v for each in own for name, v in each.items() if "margin" in name and isinstance(v, float)]
    if not any(margin < 0 for margin in margins):  # which was asked for
        yield from remarks(seen, "margin-sign")
