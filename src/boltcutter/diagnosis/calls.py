"""Calls of loss functions and suspicious reshapes in one pass of the user's own step: for probes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.checks import Lines
from boltcutter.diagnosis.graph import MOVES, REGRESSIONS, Loss, name_of, operation_behind

if TYPE_CHECKING:
    from boltcutter.diagnosis.evidence import Evidence

CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")  # whose targets are indices
PAIRS = ("margin_ranking_loss", "cosine_embedding_loss")  # of two inputs and a target
LOSSES = frozenset(
    (
        *(*CLASSES, *REGRESSIONS, *PAIRS, "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
        *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
    )
)
OPTIONS = {"ignore_index": -100, "log_target": False, "log_input": True}  # those that checks read, and their defaults
RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten"))
DIFFERENCES = frozenset(("sub", "__sub__", "rsub", "__rsub__"))
EQUALITIES = frozenset(("eq", "__eq__", "ne", "__ne__"))
CASTS = frozenset(("float", "double", "to", "type", "int", "long"))
MEANS = frozenset(("mean", "sum"))
CUMULATIVE = frozenset(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))


def rows_of(call: Loss) -> tuple[Tensor, Tensor] | None:
    """Predictions (R, …) and targets (R, …), a row for each target; None if they do not belong together."""
    p, t = call.prediction, call.target
    if p is None or t is None:
        return None
    if call.kind in CLASSES and not t.is_floating_point():
        p = p.movedim(1, -1) if p.ndim == t.ndim + 1 > 1 else p
        return (p.reshape(t.numel(), -1), t.reshape(-1, 1)) if t.numel() else None
    if p.shape != t.shape or p.ndim == 0:
        return None
    return p.reshape(len(p), -1), t.reshape(len(t), -1)


class Remark(NamedTuple):
    """What was seen: the name of a check, and the text of its line."""

    check: str
    text: str


def remarks(seen: Evidence, name: str) -> Lines:
    """What was seen in the steps."""
    yield from [remark.text for remark in seen.remarks if remark.check == name][:1]


class LossCalls(TorchFunctionMode):
    """Record the calls of loss functions, until the weights change, and reshapes that are rarely meant.

    Args:
        batch: Tensors of the batch.
        parameters: Trained parameters: once they have changed, predictions depend on the batch by them.
    """

    def __init__(self, batch: Sequence[Tensor] = (), parameters: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.calls: list[Loss] = []
        self.remarks: list[Remark] = []
        self.batch, self.parameters = batch, parameters
        self.versions = [p._version for p in parameters]
        self.flattened: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.has_generator = self.has_stepped = False
        self.cumulative = ""  # name of a cumulative operation over the samples
        self.compared: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # results of (N, 1) == (N,), and what they compare

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        self.has_generator |= kwargs.get("generator") is not None
        if name in LOSSES:
            self._loss(name, args, kwargs)
        elif name in DIFFERENCES and len(args) > 1:
            self._difference(*args[:2])
        elif name in MEANS and len(args) == 1 and not kwargs and id(args[0]) in self.compared:
            _, column, line = self.compared[id(args[0])]
            self._compared_with_all("an equality", column, line)
        if name in CUMULATIVE and args and (kwargs.get("dim", (*args, None)[1])) == 0:
            first = next((t for t in self.batch if t.ndim), None)
            self.cumulative = name if first is not None and args[0].shape[:1] == first.shape[:1] else self.cumulative
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
            return result
        if name in RESHAPES:
            self._reshape(args[0], result)
        elif name in EQUALITIES and len(args) > 1 and (pair := column_and_line(*args[:2])):
            if not torch.equal(pair[0].flatten(), pair[1]):  # pairs of labels of one batch are meant
                self.compared[id(result)] = result, *pair
        elif name in CASTS and id(args[0]) in self.compared:
            self.compared[id(result)] = result, *self.compared[id(args[0])][1:]
        return result

    def notice_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called after a step that an optimizer makes within this one, as on a copy of the weights."""
        self.has_stepped = True

    def _loss(self, name: str, args: Any, kwargs: Any) -> None:
        values = [*args, *(kwargs[key] for key in ("input", "input1", "input2", "target") if key in kwargs)]
        values = values[::2] if name in PAIRS else values
        if len(values) < 2 or not all(isinstance(value, Tensor) for value in values[:2]):
            return
        prediction, target = values[:2]
        source = operation_behind_result(prediction)
        options = {key: kwargs.get(key, default) for key, default in OPTIONS.items()}
        if not self.has_stepped and [p._version for p in self.parameters] == self.versions:
            call = Loss(name, prediction.detach(), target.detach(), name_of(source), None, "", options)
            self.calls.append(call)
        if name == "cross_entropy" and id(prediction) in self.flattened:
            shape = self.flattened[id(prediction)][1]
            self._remark(
                "channels-flattened",
                f"logits of shape {shape} are flattened to {tuple(prediction.shape)} before their classes, dimension "
                "1, are moved to the end, so each row mixes pixels; use movedim(1, -1) first, or cross_entropy "
                "without flattening",
            )

    def _difference(self, a: Any, b: Any) -> None:
        pair = column_and_line(a, b)
        if pair and a.requires_grad != b.requires_grad:
            fixed = (b if a.requires_grad else a).flatten()
            if any(t.numel() == len(fixed) and torch.equal(t.flatten().to(fixed), fixed) for t in self.batch):
                self._compared_with_all("a difference", *pair)

    def _compared_with_all(self, name: str, a: Tensor, b: Tensor) -> None:
        self._remark(
            "broadcasting",
            f"{name} compares each value of {tuple(a.shape)} with each of {tuple(b.shape)}; give prediction and target "
            "the same shape",
        )

    def _reshape(self, before: Tensor, after: Tensor) -> None:
        if before.ndim >= 3 and after.ndim == 2 and before.is_contiguous():
            count = before.shape[1]
            if after.shape[1] == count > 1 and before.shape[-1] != count and len(after) > len(before):
                self.flattened[id(after)] = after, tuple(before.shape)
        old, new = ([size for size in t.shape if size > 1] for t in (before, after))
        is_permuted = before.ndim == after.ndim and old != new and sorted(old) == sorted(new)
        # (N, T, H * D) to (N, H, T, D): heads are split at the end, and then transposed.
        is_split = before.ndim == 3 and after.ndim == 4 and len(after) == len(before)
        is_split = is_split and after.shape[2] == before.shape[1] != after.shape[1] > 1 < after.shape[2]
        is_permuted = is_permuted and (before.is_contiguous() or before.ndim == 2)
        if (is_permuted or is_split) and before.is_floating_point():
            self._remark(
                "reshape-not-transpose",
                f"{tuple(before.shape)} is reshaped to {tuple(after.shape)}, which keeps the order of values, so rows "
                "are mixed; did you mean transpose or permute?",
            )

    def _remark(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))


def column_and_line(a: Any, b: Any) -> tuple[Tensor, Tensor] | None:
    """Two tensors of shapes (N, 1) and (N,), in this order; None if they have others."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or {a.ndim, b.ndim} != {1, 2}:
        return None
    column, line = (a, b) if a.ndim == 2 else (b, a)
    return (column, line) if column.shape == (len(line), 1) and len(line) >= 4 else None


def operation_behind_result(tensor: Tensor) -> Any:
    """The operation that computed a tensor, behind those that only move values."""
    node = tensor.grad_fn
    return operation_behind(node) if node is not None and node.name() in MOVES else node
