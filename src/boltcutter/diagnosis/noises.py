"""Random numbers of the wrong distribution in a pass of the user's own step: for probes only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import COMPARISONS, DIFFERENCES, remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.graph import REGRESSIONS
from boltcutter.diagnosis.source import says
from boltcutter.diagnosis.temperatures import PRODUCTS

INTERVALS = re.compile(r"interval|(^|_)(low|upper|box|boxes)(_|$)", re.IGNORECASE)
SAMPLE = (
    "a number between 0 and 1, drawn by torch.rand, times a learned deviation, is added to a learned mean, so samples "
    "are never below the mean; draw it by torch.randn"
)
SUMS = frozenset(("add", "__add__", "__radd__"))
COMPARE = frozenset((*REGRESSIONS, *DIFFERENCES))
FEWEST = 16  # numbers that are drawn
CHANCES = (0.01, 0.99)  # with which something is to happen


class Noises:
    """Follow random numbers to what they are used as.

    Attributes:
        found: What is to be said.
    """

    def __init__(self) -> None:
        self.uniform, self.normal = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()  # whether they are used
        self.scaled = WeakTensorKeyDictionary()  # uniform ones, times something that is learned
        self.found: list[str] = []

    def follow(self, name: str, args: Any, given: Sequence[Tensor], result: Any) -> None:
        """Note what a function has made of its arguments."""
        if not isinstance(result, Tensor):
            return
        first, other = (*args, None, None)[:2]
        if name in ("rand", "rand_like") and result.numel() >= FEWEST:
            self.uniform[result] = False
        elif name in ("randn", "randn_like") and result.numel() >= FEWEST:
            self.normal[result] = True
        elif name in COMPARISONS and isinstance(first, Tensor) and first in self.normal:
            if isinstance(other, float) and CHANCES[0] <= other <= CHANCES[1]:
                share = float(result.float().mean())
                self.found.append(
                    f"numbers of a normal distribution are compared with {other:g}, as if they were between 0 and 1, "
                    f"which is so for {share:.0%} of them; draw them by torch.rand"
                )
        elif name in COMPARE:
            self._target(given)
        elif name in PRODUCTS and _pair(given, self.uniform) is not None:
            self.scaled[result] = True
        elif (name in SUMS and _pair(given, self.scaled) is not None) or (
            name == "addcmul" and given[0].requires_grad and _pair(given[1:], self.uniform) is not None
        ):
            self._say_sample()
        for t in given:
            if t in self.uniform and name in PRODUCTS | SUMS:
                self.uniform[t] = True

    def _target(self, given: Sequence[Tensor]) -> None:
        """Say it if a layer is to predict uniform numbers, which something was mixed with."""
        noise = next((t for t in given if t in self.uniform and self.uniform[t]), None)  # noqa: RUF019
        if noise is not None and _pair(given, self.uniform) is not None:
            self.found.append(
                f"the noise that is to be predicted, of {tuple(noise.shape)}, is drawn by torch.rand, between 0 and 1, "
                "so its mean is not 0, nor its variance 1; draw it by torch.randn"
            )

    def _say_sample(self) -> None:
        self.found.append(SAMPLE)


def _pair(given: Sequence[Tensor], kept: WeakTensorKeyDictionary) -> Tensor | None:
    """The other one of two tensors of the same shape, of which one is kept, and the other has a gradient."""
    if len(given) != 2 or given[0].shape != given[1].shape:
        return None
    return next((b for a, b in (given, given[::-1]) if a in kept and b.requires_grad and torch.is_grad_enabled()), None)


@check("noise-distribution", "likely", at="probe")
def noise_distribution(seen: Evidence) -> Lines:
    """Noise to predict, or for a learned deviation, is between 0 and 1; or normal numbers stand for a chance."""
    lines = remarks(seen, "noise-distribution")
    yield from (line for line in lines if line != SAMPLE or not says(seen.module, INTERVALS))
