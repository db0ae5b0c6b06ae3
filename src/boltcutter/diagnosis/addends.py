"""What is added to a loss in a pass of the user's own step, and has no gradient: for probes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.graph import MAX_NODES, MOVES, name_of, nodes_behind

ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__", "rsub", "sub_"))
JOINS = frozenset(("stack", "cat", "concat"))
NUMBERS = frozenset(("item", "tolist", "__float__", "__array__", "numpy", "__format__"))
COPIES = frozenset(("detach", "__get__"))  # the latter of .data
# An index only chooses what they return.
CHOOSES = frozenset(
    (
        *("__getitem__", "index_select", "gather", "take", "take_along_dim", "masked_select", "embedding"),
        *("index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_put_", "index_copy"),
    )
)
# Results that are not computed of values.
EMPTY = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "requires_grad_"))
# Operations of the graph by which a sum is a sum of its parts.
SUMS = frozenset(("Add", "Sub", "Rsub", "Neg", "Mean", "Sum", "Stack", "Cat", "Unbind"))
PRODUCTS = frozenset(("Mul", "Div"))
ROUND = 2  # decimals of a constant that is written out
MOST = 1000  # additions, and numbers


class Cut(NamedTuple):
    """A value that lost its gradient.

    Args:
        name: Of the function that returned it.
        nodes: That computed what the function got.
    """

    name: str
    nodes: list[Any]


@dataclass
class Constant:
    """A value without a gradient that is added to one with a gradient.

    Args:
        value: Of it.
        cuts: Numbers of the cuts that it was computed of; empty if it is a number.
    """

    value: float
    cuts: frozenset[int] = frozenset()


class Addition(NamedTuple):
    """A sum of scalars with a gradient.

    Args:
        node: Of the graph.
        terms: Values of those with a gradient.
        constants: Those without.
    """

    node: Any
    terms: list[float]
    constants: list[Constant]


@dataclass
class Addends:
    """What is added to the loss of one pass.

    Args:
        constants: By their number in the order of all additions of the pass.
        terms: What has a gradient, and numbers that were read of such terms, or of what a term has as a factor.
        names: Of the functions that cut each constant.
    """

    constants: dict[int, Constant] = field(default_factory=dict)
    terms: list[float] = field(default_factory=list)
    names: dict[int, set[str]] = field(default_factory=dict)


class AddendFinder:
    """Follow values without a gradient to the sums that they are added to."""

    def __init__(self) -> None:
        self.origins = WeakTensorKeyDictionary()  # values without a gradient: numbers of their cuts
        self.copied = WeakTensorKeyDictionary()  # values with a gradient, and the cut that is their copy
        self.cuts: list[Cut] = []
        self.used = set[int]()  # cuts that a value with a gradient has otherwise than as a term
        self.additions: list[Addition] = []
        self.numbers: list[Constant] = []  # that were read of values that depend on weights
        self.roots: list[Tensor] = []  # losses of backward passes within the step

    def follow(self, function: Any, name: str, args: Any, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Note what a function has made of its arguments."""
        of_weights = [t for t in given if t.requires_grad and not (isinstance(t, nn.Parameter) and t.numel() == 1)]
        sources = [t for t in given if t in self.origins and (name not in CHOOSES or t.is_floating_point())]
        own = frozenset[int]().union(*(self.origins[t] for t in sources))
        if name == "backward" and of_weights:
            self.roots.append(of_weights[0])
        elif name in NUMBERS and (of_weights or own):
            self._read(name, given[0], of_weights, own)
        is_scalar = bool(found) and found[0].requires_grad and found[0].numel() == 1
        if (name in ADDITIONS and is_scalar) or (name in JOINS and all(t.numel() == 1 for t in given)):
            self._add(args if name in ADDITIONS else given, found)
        elif own and any(t.requires_grad for t in found):
            self.used |= own
        is_value = name not in EMPTY and getattr(function, "__self__", None) is not Tensor.grad
        if is_value and (of_weights or own) and any(not t.requires_grad for t in found):
            if of_weights:
                own |= {self._cut(name, of_weights)}
            self.origins.update({t: own for t in found if not t.requires_grad})

    def _cut(self, name: str, of_weights: Sequence[Tensor]) -> int:
        """The number of a cut; a value that is detached twice is the same one."""
        if name in COPIES and of_weights[0] in self.copied:
            number: int = self.copied[of_weights[0]]
            return number
        if name in COPIES:
            self.copied[of_weights[0]] = len(self.cuts)
        self.cuts.append(Cut(name, [t.grad_fn for t in of_weights if t.grad_fn is not None]))
        return len(self.cuts) - 1

    def _read(self, name: str, t: Tensor, of_weights: Sequence[Tensor], own: frozenset[int]) -> None:
        if of_weights:
            own |= {self._cut(name, of_weights)}
        if len(self.numbers) < MOST:
            self.numbers.append(Constant(float(t.detach()) if t.numel() == 1 else 0.0, own))

    def _add(self, values: Sequence[Any], found: Sequence[Tensor]) -> None:
        """Note the terms of a sum; numbers only if some were read of values that depend on weights."""
        if len(self.additions) >= MOST or not found or not found[0].requires_grad:
            return
        terms, constants = list[float](), list[Constant]()
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                terms.append(float(value.detach()))
            elif isinstance(value, Tensor) and value in self.origins:
                constants.append(Constant(float(value), self.origins[value]))
            elif self.numbers and _is_number(value) and float(value) != round(float(value), ROUND):
                constants.append(Constant(float(value)))
        self.additions.append(Addition(found[0].grad_fn, terms, constants))

    def of_loss(self, losses: Sequence[Any]) -> Addends:
        """What is added to the losses at which backward passes begin."""
        result = Addends()
        if not any(addition.constants for addition in self.additions):
            return result
        parts = {*_parts([loss.grad_fn for loss in losses])}
        number = 0
        for addition in self.additions:
            for constant in addition.constants:
                number += 1
                if addition.node in parts and constant.value and not self._is_of(constant.cuts, parts):
                    result.constants[number] = constant
                    result.names[number] = {self.cuts[cut].name for cut in constant.cuts}
            result.terms += addition.terms if addition.node in parts else []
        result.terms += [read.value for read in self.numbers if self._is_of(read.cuts, parts)]
        return result

    def _is_of(self, cuts: frozenset[int], parts: set[Any]) -> bool:
        """Whether a value was computed of what the loss has with its gradient, or is a factor of it."""
        return bool(cuts & self.used) or any(
            not parts.isdisjoint(nodes_behind(node)) for cut in cuts for node in self.cuts[cut].nodes
        )


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, float | np.floating)


def _parts(roots: Sequence[Any]) -> Iterator[Any]:
    """Operations of which a loss is the sum, but for constant factors."""
    seen, stack = set[Any](), [*roots]
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        yield node
        parents = [parent for parent, _ in node.next_functions]
        is_scaled = name_of(node) in PRODUCTS and sum(parent is not None for parent in parents) == 1
        if name_of(node) in SUMS or node.name() in MOVES or is_scaled:
            stack += parents if name_of(node) != "Div" else parents[:1]
