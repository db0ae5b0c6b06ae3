"""Calls of loss functions and suspicious reshapes in one pass of the user's own step: for probes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.graph import REGRESSIONS

CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")  # whose targets are indices
LOSSES = frozenset(
    (
        *(*CLASSES, *REGRESSIONS, "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
        *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss"),
    )
)
RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten"))
DIFFERENCES = frozenset(("sub", "__sub__", "rsub", "__rsub__"))


class Call(NamedTuple):
    """A call of a loss function: its name in ``torch.nn.functional``, and its first two arguments."""

    name: str
    prediction: Tensor
    target: Tensor

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Predictions (R, …) and targets (R, …), a row for each target; None if they do not belong together."""
        p, t = self.prediction, self.target
        if self.name in CLASSES and not t.is_floating_point():
            p = p.movedim(1, -1) if p.ndim == t.ndim + 1 > 1 else p
            return (p.reshape(t.numel(), -1), t.reshape(-1, 1)) if t.numel() else None
        if p.shape != t.shape or p.ndim == 0:
            return None
        return p.reshape(len(p), -1), t.reshape(len(t), -1)


class Remark(NamedTuple):
    """What was seen: the name of a check, and the text of its line."""

    check: str
    text: str


class LossCalls(TorchFunctionMode):
    """Record the calls of loss functions, until the weights change, and reshapes that are rarely meant.

    Args:
        batch: Tensors of the batch.
        parameters: Trained parameters: once they have changed, predictions depend on the batch by them.
    """

    def __init__(self, batch: Sequence[Tensor] = (), parameters: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.remarks: list[Remark] = []
        self.batch, self.parameters = batch, parameters
        self.versions = [p._version for p in parameters]
        self.flattened: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in LOSSES:
            self._loss(name, [*args, *(kwargs[key] for key in ("input", "target") if key in kwargs)], kwargs)
        elif name in DIFFERENCES and len(args) > 1:
            self._difference(*args[:2])
        result = function(*args, **kwargs)
        if name in RESHAPES and isinstance(result, Tensor) and isinstance(args[0], Tensor):
            self._reshape(args[0], result)
        return result

    def _loss(self, name: str, values: list[Any], kwargs: Any) -> None:
        if len(values) < 2 or not all(isinstance(value, Tensor) for value in values[:2]):
            return
        prediction, target = values[:2]
        if [p._version for p in self.parameters] == self.versions:
            self.calls.append(Call(name, prediction.detach(), target.detach()))
        if name == "kl_div" and prediction.numel() and float(prediction.max()) > 1e-4:
            self._remark(
                "not-log",
                f"kl_div gets values up to {float(prediction.max()):.3g}, but log-probabilities are never above 0; use "
                "log_softmax before it",
            )
        if name in REGRESSIONS and prediction.shape != target.shape:
            pairs = torch.broadcast_shapes(prediction.shape, target.shape).numel()  # type: ignore[no-untyped-call]
            if pairs > max(prediction.numel(), target.numel()):
                self._compared_with_all(name, prediction, target)
        if name == "cross_entropy" and id(prediction) in self.flattened:
            shape = self.flattened[id(prediction)][1]
            self._remark(
                "channels-flattened",
                f"logits of shape {shape} are flattened to {tuple(prediction.shape)} before their classes, dimension "
                "1, are moved to the end, so each row mixes pixels; use movedim(1, -1) first, or cross_entropy "
                "without flattening",
            )

    def _difference(self, a: Any, b: Any) -> None:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or {a.ndim, b.ndim} != {1, 2}:
            return
        column, line = (a, b) if a.ndim == 2 else (b, a)
        if column.shape == (len(line), 1) and len(line) >= 4 and column.requires_grad != line.requires_grad:
            fixed = (line if column.requires_grad else column).flatten()
            if any(t.numel() == len(fixed) and torch.equal(t.flatten().to(fixed), fixed) for t in self.batch):
                self._compared_with_all("a difference", a, b)

    def _compared_with_all(self, name: str, a: Tensor, b: Tensor) -> None:
        self._remark(
            "broadcasting",
            f"{name} compares each value of {tuple(a.shape)} with each of {tuple(b.shape)}, so the model learns the "
            "mean; give prediction and target the same shape",
        )

    def _reshape(self, before: Tensor, after: Tensor) -> None:
        if before.ndim >= 3 and after.ndim == 2 and before.is_contiguous():
            count = before.shape[1]
            if after.shape[1] == count > 1 and before.shape[-1] != count and len(after) > len(before):
                self.flattened[id(after)] = after, tuple(before.shape)
        old, new = ([size for size in t.shape if size > 1] for t in (before, after))
        is_permuted = before.ndim == after.ndim and old != new and sorted(old) == sorted(new)
        if is_permuted and before.is_floating_point() and (before.is_contiguous() or before.ndim == 2):
            self._remark(
                "reshape-not-transpose",
                f"{tuple(before.shape)} is reshaped to {tuple(after.shape)}, which keeps the order of values, so rows "
                "are mixed; did you mean transpose or permute?",
            )

    def _remark(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))
