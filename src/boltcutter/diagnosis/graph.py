"""What the autograd graph of the real loss says: loss functions, what feeds them, and which leaves it reaches.

Reading it needs no wrapper of the user's code, and works for ``training_step`` of any module. A compiled model is one
opaque node: nothing is found there, so nothing is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MAX_NODES = 20_000
# Operations that only move values: what feeds a loss is looked for behind them.
MOVES = frozenset(
    f"{name}Backward{i}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Squeeze", "Unsqueeze", "Clone", "Select"),
        *("Slice", "Index", "Narrow", "Split", "Unbind", "ToCopy", "Alias", "Expand", "T", "Movedim", "Contiguous"),
    )
    for i in range(3)
)
LOSSES = {
    "NllLossBackward0": "nll_loss",
    "NllLoss2DBackward0": "nll_loss",
    "MseLossBackward0": "mse_loss",
    "L1LossBackward0": "l1_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "SoftMarginLossBackward0": "soft_margin_loss",
    "CtcLossBackward0": "ctc_loss",
}
REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
LOGARITHMS = ("LogSoftmaxBackward0", "LogsumexpBackward0")
COMPUTES = frozenset(
    ("AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0"),
)


class Loss(NamedTuple):
    """A call of a loss function: a node of the graph, or what the user's step has passed to it.

    Args:
        kind: Its name in ``torch.nn.functional``; cross-entropy of the graph is ``nll_loss``.
        prediction: Its first argument; for ``nll_loss`` the log-probabilities. None if it is not kept.
        target: Its second argument, or that of its name.
        source: Name of the operation that computed the prediction, without ``Backward0``.
        source_node: This operation.
        before: For cross-entropy, the operation that computed the logits.
        options: Such as ``ignore_index`` and ``log_target``.
        node: Of the graph.
    """

    kind: str
    prediction: Any  # a tensor or None, which a recorded call never is
    target: Any
    source: str = ""
    source_node: Any = None
    before: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    node: Any = None

    @property
    def num_classes(self) -> int | None:
        """Number of classes of ``nll_loss``."""
        if self.kind != "nll_loss" or self.prediction is None or not self.prediction.ndim:
            return None
        return int(self.prediction.shape[min(1, self.prediction.ndim - 1)])

    def mean_nll(self) -> float | None:
        """The mean of ``nll_loss`` over valid targets (N, …), of log-probabilities (N, C, …)."""
        log_p, target = self.prediction, self.target
        if self.kind != "nll_loss" or log_p is None or target is None or log_p.ndim != target.ndim + 1:
            return None
        if log_p.ndim < 2 or log_p.select(1, 0).shape != target.shape:
            return None
        valid = (target >= 0) & (target < log_p.shape[1])
        chosen = log_p.gather(1, (target * valid).unsqueeze(1)).squeeze(1)[valid]
        return -float(chosen.float().mean()) if chosen.numel() else None

    def mean(self) -> float | None:
        """The mean that the loss function returns without weights, computed again."""
        p, t = self.prediction, self.target
        if self.kind not in (*REGRESSIONS, "binary_cross_entropy_with_logits"):
            return self.mean_nll()
        return None if p is None or t is None or p.shape != t.shape else float(getattr(F, self.kind)(p, t.to(p)))

    def same_for_all(self) -> bool:
        """Whether the prediction is the same for all samples, of which there are at least four."""
        p = self.prediction
        if p is None or self.kind == "ctc_loss" or p.ndim == 0 or len(p) < 4 or not p.is_floating_point():
            return False
        first, second = p.reshape(len(p), -1)[:2, 0].tolist() if p.numel() else (0.0, 1.0)
        if not math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-6):  # of most networks
            return False
        return torch.allclose(p, p[:1].expand_as(p), rtol=1e-6, atol=1e-9)


class Graph(NamedTuple):
    """The graph behind a loss."""

    leaves: list[Tensor]
    losses: list[Loss]
    replaced: list[Any]  # nodes of nan_to_num
    softmaxes: list[Any]
    logarithms: list[Any]  # nodes of log_softmax and logsumexp
    counts: Counter[str]


class NoComputation(TorchFunctionMode):
    """Refuses to compute: a tensor that is recomputed or fetched when it is read is left alone."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise."""
        raise RuntimeError("not kept")


def read_graph(loss: Tensor) -> Graph:
    """Walk the graph behind a loss."""
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    leaves, losses, replaced, softmaxes, logarithms, counts = [], [], [], [], [], Counter[str]()
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        counts[name] += 1
        if name in LOSSES:
            losses.append(node)
        elif name == "NanToNumBackward0":
            replaced.append(node)
        elif name == "SoftmaxBackward0":
            softmaxes.append(node)
        elif name in LOGARITHMS:
            logarithms.append(node)
        elif name == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        stack.extend(parent for parent, _ in node.next_functions)
    return Graph(leaves, [_loss(node) for node in losses], replaced, softmaxes, logarithms, counts)


def saved(node: Any, name: str) -> Any:
    """A value that a node keeps for the backward pass; None if there is none, or reading it would compute it."""
    try:
        with NoComputation():
            value = getattr(node, f"_saved_{name}")
    except (AttributeError, RuntimeError):
        return None
    return value.detach() if isinstance(value, Tensor) else value


def depends_on(node: Any, other: Any) -> bool:
    """Whether a node of the graph was computed from another one."""
    seen, stack = set[Any](), [node]
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is other:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
    return False


def leaves_behind(loss: Any, chosen: set[int]) -> dict[int, set[int]]:
    """Of each chosen leaf, the leaves that the other inputs of the operation depend on, which gets its values."""
    found: dict[int, set[int]] = {}
    seen, stack = set[Any](), [loss.grad_fn]
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        made_of = {parent: _weights(parent) for parent in parents}
        own = [leaf for leaves in made_of.values() for leaf in leaves if leaf in chosen]
        if own and len(parents) > 1:
            others = {i for parent, leaves in made_of.items() if not {*leaves} & chosen for i in leaves_of(parent)}
            for leaf in own:
                found.setdefault(leaf, set()).update(others)
        stack.extend(parents)
    return found


def _weights(node: Any) -> list[int]:
    """The leaf that a node holds, or is computed of alone, as a normalized weight is."""
    found = leaves_of(node, most=1)
    return [*found] if len(found) == 1 else []


def leaves_of(node: Any, most: int = MAX_NODES) -> set[int]:
    """Those behind a node, until there are more than ``most``."""
    seen, stack, found = set[Any](), [node], set[int]()
    while stack and len(seen) < MAX_NODES and len(found) <= most:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name().endswith("AccumulateGrad"):
                found.add(id(node.variable))
            stack.extend(parent for parent, _ in node.next_functions)
    return found


def nodes_behind(root: Any) -> list[Any]:
    """The operations behind a loss."""
    seen, stack, found = set[Any](), [root], list[Any]()
    while stack and len(found) < MAX_NODES:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(node)
            stack.extend(parent for parent, _ in node.next_functions)
    return found


def operation_behind(node: Any) -> Any:
    """The operation that computed the first input of a node, behind those that only move values."""
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
        if node is None or node.name() not in MOVES:
            return node
    return None


def name_of(node: Any) -> str:
    """The name of an operation, without ``Backward0``."""
    return node.name().partition("Backward")[0] if node is not None else ""


def _loss(node: Any) -> Loss:
    kind, source = LOSSES[node.name()], operation_behind(node)
    before = operation_behind(source) if name_of(source) == "LogSoftmax" else None
    names = ("log_probs", "targets") if kind == "ctc_loss" else ("self", "target")
    options = {each: saved(node, each) for each in ("ignore_index", "reduction")}
    prediction, target = (saved(node, name) for name in names)
    return Loss(kind, prediction, target, name_of(source), source, name_of(before), options, node)


def extremes(tensor: Tensor | None) -> tuple[float, float]:
    """The lowest and the highest value; NaN if there is none."""
    if tensor is None or not tensor.numel():
        return math.nan, math.nan
    return float(tensor.min()), float(tensor.max())


def attributes(module: nn.Module) -> dict[int, str]:
    """Names of tensors that are plain attributes, by identity."""
    parts = module.named_modules()
    return {id(v): f"{n}.{k}".lstrip(".") for n, m in parts for k, v in vars(m).items() if isinstance(v, Tensor)}


def find_holder(module: nn.Module, leaf: Tensor) -> str | None:
    """The attribute, a list or dict, in which a parameter lies that is not registered, or that is the parameter."""
    if name := attributes(module).get(id(leaf)):
        return name
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in ("_modules", "_parameters", "_buffers", "_trainer"):
                continue
            inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
            if any(p is leaf for item in inner for p in _parameters(item)):
                return f"{name}.{attribute}".lstrip(".")
    return None


def _parameters(item: Any) -> Iterator[Tensor]:
    if isinstance(item, nn.Module):
        yield from item.parameters()
    elif isinstance(item, Tensor):
        yield item
