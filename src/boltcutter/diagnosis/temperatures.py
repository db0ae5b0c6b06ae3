"""Logits that are divided by a temperature, in a pass of the user's own step: for probes only."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

DIVISIONS = frozenset(("div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__"))
PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__"))
DIFFERENCES = frozenset(("sub", "__sub__", "subtract"))
SOFTMAXES = frozenset(("softmax", "log_softmax"))
# What leaves logits and distributions what they are; a logarithm of probabilities is one of log_softmax.
SAME = frozenset(
    ("detach", "clone", "float", "double", "half", "to", "type", "type_as", "contiguous", "log", "clamp", "clamp_min")
)
COMPARE = frozenset(("kl_div", "mse_loss", *PRODUCTS, *DIFFERENCES))
MOST = 16  # comparisons of a step


class Softened(NamedTuple):
    """What a distribution is the softmax of.

    Args:
        logits: As they were before a division.
        temperature: By which they are divided; NaN if it is no number.
    """

    logits: Tensor
    temperature: float


class Temperatures:
    """Follow logits through a division to their softmax, and to what compares two of these.

    Attributes:
        compared: Distributions of a student, which have a gradient, and of a teacher, which have none.
    """

    def __init__(self) -> None:
        self.scaled = WeakTensorKeyDictionary()
        self.distributions = WeakTensorKeyDictionary()
        self.compared: list[tuple[Softened, Softened]] = []

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a function has made of its arguments."""
        given = [*args, *kwargs.values()]
        if name in COMPARE or name == "cross_entropy":
            self._compare(name, given)
        if not isinstance(result, Tensor) or not given or not isinstance(given[0], Tensor) or result.ndim < 2:
            return
        first = given[0]
        if name in DIVISIONS | PRODUCTS and len(given) > 1:
            number = _number(given[1])
            known = self.softened(first)
            factor = number if name in DIVISIONS else 1 / number if number else math.nan
            self.scaled[result] = Softened(known.logits, known.temperature * factor)
        elif name in SOFTMAXES:
            self.distributions[result] = self.softened(first)
        elif name in SAME:
            for kept in (self.scaled, self.distributions):
                if first in kept:
                    kept[result] = kept[first]

    def softened(self, logits: Tensor) -> Softened:
        """What logits were before they were divided."""
        found: Softened = self.scaled[logits] if logits in self.scaled else Softened(logits, 1.0)
        return found

    def temperature(self, distribution: Tensor) -> float:
        """By which the logits of a distribution are divided; 1 if that is not known."""
        known = distribution in self.distributions
        found: float = self.distributions[distribution].temperature if known else 1.0
        return found if math.isfinite(found) else 1.0

    def _compare(self, name: str, given: list[Any]) -> None:
        one, other = (given[0], given[1]) if len(given) > 1 else (None, None)
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
            return
        is_of_logits = name == "cross_entropy"
        if other not in self.distributions or not (is_of_logits or one in self.distributions):
            return
        if one.requires_grad == other.requires_grad or len(self.compared) >= MOST or not torch.is_grad_enabled():
            return
        first: Softened = self.softened(one) if is_of_logits else self.distributions[one]
        sides = [Softened(s.logits.detach(), s.temperature) for s in (first, self.distributions[other])]
        student, teacher = sides if one.requires_grad else sides[::-1]
        self.compared.append((student, teacher))


def _number(value: Any) -> float:
    """A number, also one of a tensor without a gradient; NaN if it is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.requires_grad else math.nan
    return float(value) if isinstance(value, int | float) else math.nan
