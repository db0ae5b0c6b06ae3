"""Calls of loss functions and suspicious reshapes in one pass of the user's own step: for probes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.checks import Lines
from boltcutter.diagnosis.graph import MOVES, REGRESSIONS, Loss, name_of, operation_behind, saved
from boltcutter.diagnosis.source import unpacked_names

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
# Those that checks read, and their defaults.
OPTIONS = {
    "ignore_index": -100,
    "log_target": False,
    "log_input": True,
    "label_smoothing": 0.0,
    "weight": None,
    "pos_weight": None,
    "reduction": "mean",
}
RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"))
DIFFERENCES = frozenset(("sub", "__sub__", "rsub", "__rsub__", "subtract"))
EQUALITIES = frozenset(("eq", "__eq__", "ne", "__ne__"))
CASTS = frozenset(("float", "double", "to", "type", "int", "long"))
MEANS = frozenset(("mean", "sum"))
PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "div", "__truediv__"))
SOFTMAXES = frozenset(("softmax", "log_softmax"))
WRITTEN = frozenset(
    (*DIFFERENCES, *PRODUCTS, "log_softmax", "gather", "__getitem__", "pow", "__pow__", "square", "abs")
)
CUMULATIVE = frozenset(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))
COMPARISONS = frozenset(("gt", "__gt__", "ge", "__ge__", "lt", "__lt__", "le", "__le__"))
ARITHMETIC = frozenset(("Add", "Sub", "Mul", "Div", "Rsub", "Neg"))
CHOICES = frozenset(("Max", "Amax", "Gather"))
UNMOVED = frozenset(
    ("View", "UnsafeView", "Addmm", "Add", "Mm")
)  # a linear layer, whose classes are the last dimension
SHAPES = frozenset(("__get__", "size", "dim", "numel", "__len__"))
FILLED = 1e3  # from which a logit is a mask
MOST_STEPS = 16  # of the arithmetic behind a target, and differences that are kept
MOST_VALUES = 100_000  # of these
FEWEST_RISES = 7
MULTIPLE = 0.2  # share of samples with several labels
MOST_NESTED = 2  # containers in a batch


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


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and values."""
    return a.shape == b.shape and torch.equal(a, b)


def has_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values in the same order, whatever their shapes."""
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten().to(a))


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

    is_paused = False  # while others look at values of the step, which read them, too

    def __init__(self, batch: Sequence[Tensor] = (), parameters: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.calls: list[Loss] = []
        self.remarks: list[Remark] = []
        self.batch, self.parameters = batch, parameters
        self.versions = [p._version for p in parameters]
        self.flattened: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.has_generator = self.has_stepped = False
        self.summed: dict[tuple[int, ...], set[bool]] = {}  # shapes of logsumexp: whether it is over samples
        self.columns: dict[int, Tensor] = {}  # vectors that were made columns
        self.pairs_itself = False  # whether an output is compared with all of itself, as in an energy distance
        self.cumulative = ""  # name of a cumulative operation over the samples
        # Of each loss function, whether both of its sides have a gradient, and its mean.
        self.pairs: list[tuple[bool, float]] = []
        self.read = set[int]()  # identities of tensors that an operation got; those of the batch live as long
        self.differences: list[tuple[Tensor, Tensor]] = []  # what was subtracted from what
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}  # results of argmax, and what they are of
        self.logs: dict[int, tuple[Tensor, Tensor]] = {}  # log-probabilities, and their logits
        self.errors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # results of a subtraction, and both sides
        self.halved: list[Tensor] = []  # what was compared with 0.5, or rounded
        self.over_samples: dict[int, Tensor] = {}  # softmax of logits over their rows
        self.compared: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # results of (N, 1) == (N,), and what they compare

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        if LossCalls.is_paused:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        self.has_generator |= kwargs.get("generator") is not None
        if name not in SHAPES:
            self.read.update(id(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
            self.read.update(
                id(t) for part in args if isinstance(part, list | tuple) for t in part if isinstance(t, Tensor)
            )
        if name in LOSSES:
            self._loss(name, args, kwargs)
        elif (name in COMPARISONS and isinstance(args[-1], float) and args[-1] == 0.5) or name == "round":
            self.halved.append(args[0].detach())
        elif name in DIFFERENCES and len(args) > 1:
            self._difference(*args[:2])
        elif name in PRODUCTS and len(args) > 1:
            self._arithmetic("a product", *args[:2])
        elif name in MEANS and len(args) == 1 and not kwargs and id(args[0]) in self.compared:
            _, column, line = self.compared[id(args[0])]
            self._compared_with_all("an equality", column, line)
        if name in CUMULATIVE and args and (kwargs.get("dim", (*args, None)[1])) == 0:
            first = next((t for t in self.batch if t.ndim), None)
            self.cumulative = name if first is not None and args[0].shape[:1] == first.shape[:1] else self.cumulative
        result = function(*args, **kwargs)
        is_index = name == "__getitem__" and isinstance(args[-1], tuple) and None in [*map(_none, args[-1])]
        if (is_index or name == "unsqueeze") and isinstance(result, Tensor) and result.ndim == 2 and args[0].ndim == 1:
            self.columns[id(result)] = result
        if name in WRITTEN and args and isinstance(result, Tensor):
            self._written_out(name, args, kwargs, result)
        if name in SOFTMAXES and args and isinstance(result, Tensor) and result.ndim == 2:
            self._softmax(args, kwargs, result)
        if name == "logsumexp" and isinstance(result, Tensor) and args[0].ndim == 2 and args[0].requires_grad:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            first = next((t for t in self.batch if t.ndim), None)
            is_of_batch = first is not None and len(args[0]) == len(first) != args[0].shape[1] > 1
            is_log = name_of(args[0].grad_fn) == "LogSoftmax"  # of shares
            if is_of_batch and not is_log:
                self.summed.setdefault(tuple(args[0].shape), set()).add(dim in (0, -2, (0,), [0]))
        if name in ("argmax", "max", "topk") and args and id(args[0]) in self.over_samples:
            self._remark(
                "softmax-of-batch",
                f"softmax over dimension 0 of logits {tuple(args[0].shape)} compares samples, not classes; use "
                "softmax(1)",
            )
        if name == "argmax" and isinstance(result, Tensor):
            self.largest[id(result)] = result, args[0]
        elif (name in EQUALITIES or name == "cross_entropy") and len(args) > 1:
            self._largest(*args[:2])
        if (name in LOSSES or name == "cosine_similarity") and torch.is_grad_enabled() and len(args) > 1:
            both = all(isinstance(t, Tensor) and t.requires_grad and not has_data(t.grad_fn) for t in args[:2])
            self.pairs.append((both, float(result.detach().mean())))
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
        if torch.is_grad_enabled():
            self._gradients(name, prediction, target)
        if name == "cross_entropy" and prediction.ndim == 2:
            options |= factors_of(prediction)
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

    def _written_out(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """Record a loss that is no call of a function: sums of targets times log-probabilities, squares of errors."""
        first, second = args[0], next(iter(args[1:]), kwargs.get("index", kwargs.get("exponent")))
        both = (first, second)
        if name == "log_softmax" and len(self.logs) < MOST_STEPS:
            self.logs[id(result)] = result, first
        elif name in DIFFERENCES and all(isinstance(t, Tensor) and t.is_floating_point() for t in both):
            if len(self.errors) < MOST_STEPS and result.ndim:
                self.errors[id(result)] = result, first, second
        elif name in PRODUCTS:
            log, p = next(((a, b) for a, b in (both, both[::-1]) if id(a) in self.logs), (None, None))
            if isinstance(p, Tensor) and p.shape == result.shape and not p.requires_grad and _are_probabilities(p):
                self._loss("cross_entropy", (self.logs[id(log)][1], p), {"reduction": "none"})
        elif name == "gather" and id(first) in self.logs and len(args) > 2:
            self._chosen(first, args[2])
        elif name == "__getitem__" and id(first) in self.logs and isinstance(second, tuple) and len(second) == 2:
            self._chosen(first, second[1])
        elif id(first) in self.errors and (name != "pow" or second == 2):
            _, a, b = self.errors[id(first)]
            prediction, target = (a, b) if a.requires_grad else (b, a)
            if prediction.requires_grad and not target.requires_grad and a.shape == b.shape and self._is_part(target):
                self._loss("l1_loss" if name == "abs" else "mse_loss", (prediction, target), {"reduction": "none"})

    def _chosen(self, log: Tensor, index: Any) -> None:
        """The log-probabilities of classes that are a part of the batch."""
        if isinstance(index, Tensor) and not index.is_floating_point() and log.ndim == 2 and index.numel() == len(log):
            labels = index.reshape(-1)
            if any(t.ndim == 1 and is_equal(t, labels) for t in self.batch):
                self._loss("nll_loss", (log, labels), {"reduction": "none"})

    def _is_part(self, target: Tensor) -> bool:
        """Whether a target is a part of the batch, or a rising or falling function of one."""
        flat = target.detach().flatten()
        parts = [t.flatten() for t in self.batch if t.numel() == flat.numel() <= MOST_VALUES]
        return any(is_function(part, flat) for part in parts)

    def _gradients(self, name: str, prediction: Tensor, target: Tensor) -> None:
        """What the graphs of both sides of a loss function say."""
        if name.startswith("binary_cross_entropy") and target.requires_grad and not prediction.requires_grad:
            self._remark(
                "swapped-arguments",
                f"the first argument of {name} has no gradient, and the target has one; write {name}(prediction, "
                "target)",
            )
        is_choice = name in REGRESSIONS and prediction.requires_grad and target.requires_grad
        if is_choice and has_choice(target.grad_fn):
            self._remark(
                "target-gradient",
                f"the target of {name} is a value that the network itself chooses, with its gradient, so the target is "
                "changed to fit the prediction; compute it within torch.no_grad(), by a copy of the network",
            )
        is_square = name == "cross_entropy" and prediction.ndim == 3 and prediction.shape[1] == prediction.shape[2]
        if is_square and target.ndim == 2 and name_of(prediction.grad_fn) in UNMOVED:
            self._remark(
                "class-dimension",
                f"cross_entropy takes dimension 1 of logits {tuple(prediction.shape)} for the classes, but these are "
                "the last dimension, as a linear layer returns them; pass logits.transpose(1, 2)",
            )

    def _softmax(self, args: Any, kwargs: Any, result: Tensor) -> None:
        """Note a softmax over the samples of what a loss function gets, too."""
        dim, rows = kwargs.get("dim", args[1] if len(args) > 1 else None), next((t for t in self.batch if t.ndim), None)
        is_over_samples = dim in (0, -2) and rows is not None and len(result) == len(rows)
        is_over_samples = is_over_samples and not torch.is_grad_enabled() and len(result) != result.shape[1] > 1
        if is_over_samples and any(is_equal(c.prediction, args[0]) for c in self.calls if c.kind in CLASSES):
            self.over_samples[id(result)] = result

    def conclude(self) -> None:
        """Compare logits with what was compared with 0.5, and forget pairs that are meant."""
        for shape, over_samples in self.summed.items():
            if over_samples == {True}:  # else over both, in turn
                self._remark(
                    "softmax-of-batch",
                    f"logsumexp over dimension 0 of {shape} adds up samples, and not components or classes of each; "
                    "pass dim=1",
                )
        if self.pairs_itself:
            self.remarks = [remark for remark in self.remarks if remark.check != "broadcasting"]
        for call in self.calls:
            p = call.prediction.flatten()
            for t in self.halved if call.kind == "binary_cross_entropy_with_logits" else ():
                is_within = bool(((p >= 0) & (p <= 1)).all())  # which torchmetrics takes for probabilities
                if t.numel() == len(p) and torch.equal(t.flatten(), p) and not is_within:
                    self._remark(
                        "threshold-of-logits",
                        "logits are compared with 0.5, as if they were probabilities; compare them with 0, or apply "
                        "sigmoid() first",
                    )

    def _largest(self, one: Any, other: Any) -> None:
        """Argmax of labels of which a sample may have several, that is compared with predictions of the same shape."""
        of = [self.largest[id(t)][1] if id(t) in self.largest else t for t in (one, other)]
        labels = next((t for t in of if any(t is each for each in self.batch)), None)
        if labels is None or not all(isinstance(t, Tensor) and t.shape == labels.shape for t in of):
            return
        if not any(id(t) in self.largest and self.largest[id(t)][1] is labels for t in (one, other)):
            return
        is_binary = labels.ndim == 2 and labels.shape[1] > 2 and bool(((labels == 0) | (labels == 1)).all())
        several = labels.sum(1) > 1
        ends = nn.functional.pad(labels.float(), (1, 1)).diff(dim=1) > 0
        if not is_binary or not bool((ends.sum(1) > 1).any()):
            return  # places in a row, of which it is the first
        if float(several.float().mean()) > MULTIPLE:
            self._remark(
                "argmax-of-labels",
                f"argmax takes one of several labels of a sample, of {tuple(labels.shape)}, for the only one; compare "
                "all of them: (logits > 0) == labels",
            )

    def _difference(self, a: Any, b: Any) -> None:
        is_pair = isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() == b.numel() <= MOST_VALUES
        if is_pair and a.is_floating_point() and b.is_floating_point() and len(self.differences) < MOST_STEPS:
            self.differences.append((a.detach(), b.detach()))
        self._arithmetic("a difference", a, b)

    def _arithmetic(self, name: str, a: Any, b: Any) -> None:
        """A column with a gradient, and a line that is a part of the batch, or a function of one."""
        pair = column_and_line(a, b)
        if pair and id(pair[0]) in self.columns:
            return  # which are made columns to be paired
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad:
            is_other_shape = a.shape != b.shape and a.numel() == b.numel()
            self.pairs_itself |= is_other_shape and torch.equal(a.detach().flatten(), b.detach().flatten())
        if pair and a.requires_grad != b.requires_grad:
            fixed = (b if a.requires_grad else a).flatten()
            of_batch = any(t.numel() == len(fixed) and is_function(t.flatten(), fixed) for t in self.batch)
            if of_batch or (name != "a product" and self._is_of_layer(pair[0], fixed)):
                self._compared_with_all(name, *pair)

    def _is_of_layer(self, column: Tensor, line: Tensor) -> bool:
        """Whether a column is what a linear layer returns for each sample, and a line is computed, as rewards are."""
        first = next((t for t in self.batch if t.ndim), None)
        is_output = column.grad_fn is not None and column.grad_fn.name().startswith(("Addmm", "Mm", "Linear"))
        is_computed = line.is_floating_point() and not torch.equal(line, column.detach().flatten())
        return is_output and is_computed and first is not None and len(first) == len(line)

    def _compared_with_all(self, name: str, a: Tensor, b: Tensor) -> None:
        self._remark(
            "broadcasting",
            f"{name} pairs each value of {tuple(a.shape)} with each of {tuple(b.shape)}, also of other samples; give "
            "both the same shape",
        )

    def _reshape(self, before: Tensor, after: Tensor) -> None:
        if before.ndim >= 3 and after.ndim == 2 and before.is_contiguous():
            count = before.shape[1]
            if after.shape[1] == count > 1 and before.shape[-1] != count and len(after) > len(before):
                self.flattened[id(after)] = after, tuple(before.shape)
        # (N, C, H, W) to (N, H * W, C), or to (N * H * W, C): channels are not moved behind the places.
        places = before.numel() // max(1, len(before) * before.shape[1]) if before.ndim > 2 else 0
        is_rowed = before.ndim > 3 and after.shape == (len(before), places, before.shape[1])
        is_rowed |= before.ndim > 2 and after.shape == (len(before) * places, before.shape[1])
        is_rowed = is_rowed and before.is_contiguous() and before.requires_grad and places > 1 < before.shape[1]
        ends = [before.shape[-n:].numel() for n in range(1, before.ndim)]
        is_rowed = is_rowed and before.shape[1] not in ends
        old, new = ([size for size in t.shape if size > 1] for t in (before, after))
        is_permuted = before.ndim == after.ndim and old != new and sorted(old) == sorted(new)
        # (N, T, H * D) to (N, H, T, D): heads are split at the end, and then transposed.
        is_split = before.ndim == 3 and after.ndim == 4 and len(after) == len(before)
        is_split = is_split and after.shape[2] == before.shape[1] != after.shape[1] > 1 < after.shape[2]
        is_permuted = is_permuted and (before.is_contiguous() or before.ndim == 2)
        # (N, H, T, D) to (N, T, H * D): heads are transposed first, and then joined.
        is_joined = before.ndim == 4 and after.ndim == 3 and len(after) == len(before) and before.is_contiguous()
        is_joined = is_joined and after.shape[1] == before.shape[2] != before.shape[1] > 1 < before.shape[2]
        is_data = before.is_floating_point() or before.dtype == torch.uint8 or (before.ndim > 2 and is_permuted)
        is_varied = before.numel() > 0 and bool((before != before.flatten()[0]).any())
        if (is_permuted or is_split or is_joined or is_rowed) and is_data and is_varied and before.dtype != torch.bool:
            self._remark(
                "reshape-not-transpose",
                f"{tuple(before.shape)} is reshaped to {tuple(after.shape)}, which keeps the order of values, so rows "
                "are mixed; did you mean transpose or permute?",
            )

    def _remark(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))


def _none(index: Any) -> Any:
    """An index, or what stands for one that cannot be compared."""
    return index if index is None else 0


def _are_probabilities(p: Tensor) -> bool:
    """Whether each row, of classes in the second or the last dimension, sums to 1."""
    is_matrix = p.is_floating_point() and p.ndim > 1 and p.numel() > 0 and bool((p >= 0).all())
    return is_matrix and any(float((p.sum(dim) - 1).abs().max()) < 1e-3 for dim in (1, -1))


def is_function(values: Tensor, other: Tensor) -> bool:
    """Whether one is the other, or a rising or falling function of it, as after its mean was subtracted."""
    if torch.equal(values.to(other), other):
        return True
    x, y = (t.detach().double() for t in (values, other))
    order = x.argsort()
    rises, steps = x[order].diff() > 0, y[order].diff()
    moved, same = steps[rises], steps[~rises]
    is_constant = not len(same) or float(same.abs().max()) <= 1e-6 * float(y.abs().max())
    return is_constant and len(moved) >= FEWEST_RISES and bool((moved > 0).all() or (moved < 0).all())


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


def has_choice(node: Any) -> bool:
    """Whether a value is, but for arithmetic, a maximum or a chosen entry."""
    stack, count = [node], 0
    while stack and count < MOST_STEPS:
        node, count = stack.pop(), count + 1
        if name_of(node) in CHOICES:
            return True
        if node is not None and (name_of(node) in ARITHMETIC or node.name() in MOVES):
            stack += [parent for parent, _ in node.next_functions]
    return False


def factors_of(logits: Tensor) -> dict[str, Any]:
    """Of logits that are a scaled matrix product, whether both factors have samples; and, of cosines, the scale.

    Returns:
        ``product``: whether it is one. ``cosine``: the scale, only if all rows and columns have length 1.
    """
    node = operation_behind_result(logits)
    while name_of(node) in ("Mul", "Div", "MaskedFill"):  # the last of what is similar to itself
        node = operation_behind(node)
    if name_of(node) != "Mm":
        return {}
    one, two = saved(node, "self"), saved(node, "mat2")
    if one is None or two is None or any(parent is None for parent, _ in node.next_functions):
        return {}
    found: dict[str, Any] = {"product": True}
    if all(bool(((norm - 1).abs() < 1e-3).all()) for norm in (one.norm(dim=1), two.norm(dim=0))):
        cosines = one @ two
        if cosines.shape == logits.shape:
            given = logits.detach()
            kept = given.abs() < FILLED
            found["cosine"] = float(given[kept].abs().sum() / (cosines[kept].abs().sum() + 1e-12))
    return found


def unread_parts(batch: Any, read: set[int], step: Any = None) -> list[str]:
    """Names of the tensors of a batch that no operation got, those of containers in it as ``graph.train_mask``.

    A step may name those of a tuple when it unpacks them.
    """
    if isinstance(batch, list | tuple) and not hasattr(batch, "_asdict"):
        names = unpacked_names(step)
        batch = dict(zip(names, batch, strict=True)) if len(names) == len(batch) else batch
    return [name for name, t in named_parts(batch) if id(t) not in read]


def named_parts(value: Any, before: str = "", depth: int = 0) -> list[tuple[str, Tensor]]:
    """Tensors with the names that mappings, dataclasses, named tuples, or objects of other classes, give them."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif not isinstance(value, Mapping | list | tuple | Tensor | nn.Module | type) and hasattr(value, "__dict__"):
        value = vars(value)
    if depth > MOST_NESTED or not isinstance(value, Mapping | list | tuple):
        return []
    found: list[tuple[str, Tensor]] = []
    for name, part in value.items() if isinstance(value, Mapping) else (("", part) for part in value):
        if isinstance(part, Tensor):
            found += [(f"{before}{name}", part)] if name != "" else []
        else:
            found += named_parts(part, f"{before}{name}." if isinstance(name, str) and name else before, depth + 1)
    return found


def has_data(node: Any) -> bool:
    """Whether a value that needs no gradient was added last, as a reward."""
    return name_of(node) in ("Add", "Sub", "Rsub") and any(parent is None for parent, _ in node.next_functions)
