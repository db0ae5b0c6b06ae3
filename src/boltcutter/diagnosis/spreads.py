"""A probe of losses that learn a mean and how far targets spread around it: which spread they lead to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.graph import name_of, nodes_behind
from boltcutter.diagnosis.probe import Probe

SHIFTS = (0.0, 1.0, -1.0, 2.0)  # of the mean
FEWEST = 8  # samples
EXACT = 2e-3  # of a logarithm
ROUNDING = 1e-3
POWERS = (1, 2, -1, -2)  # of exp(output), which may be a variance, a deviation or the inverse of one


class Column(NamedTuple):
    """One number that a layer returns for each sample.

    Args:
        layer: The layer.
        place: Of the number, in its last dimension.
    """

    layer: nn.Linear
    place: int


class Pass:
    """Collects the two numbers of each sample, and the gradient of one of them, with the other one shifted.

    Args:
        mean: That is shifted.
        spread: The other one.
        shift: By how much.
    """

    def __init__(self, mean: Column, spread: Column, shift: float) -> None:
        self.mean, self.spread, self.shift = mean, spread, shift
        self.output: Tensor | None = None
        self.gradient: Tensor | None = None

    def hook(self, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        """Shift the mean."""
        if layer is self.spread.layer:
            self.output = output
        if layer is not self.mean.layer:
            return output
        shifts = torch.zeros_like(output)
        shifts[..., self.mean.place] = self.shift
        return output + shifts

    def differentiate(self, loss: Any) -> None:
        """Keep the gradient of the loss by the other number."""
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and self.output is not None:
            (found,) = torch.autograd.grad(loss, [self.output], allow_unused=True, retain_graph=True)
            self.gradient = None if found is None else found[..., self.spread.place].detach().flatten().double()


@check("deviation", "likely", at="probe")
def half_of_the_variance(seen: Evidence) -> Lines:
    """By the loss, a learned exponential is half or twice the squared error, so it is no variance, nor a deviation."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    for mean, spread in permutations(_columns(probe), 2):
        if (factor := _factor(probe, mean, spread)) is not None:
            name = next((n for n, m in seen.module.named_modules() if m is spread.layer), "a layer")
            yield (
                f"the loss is least where the exponential of what {name} returns is {factor:g} times the squared "
                "error, so one term takes it for a deviation, and another one for a variance; use "
                "0.5 * (log_var + error ** 2 / log_var.exp())"
            )
            return


def _columns(probe: Probe) -> list[Column]:
    """The two numbers for each sample that linear layers return, and a loss with an exponential is computed of."""
    rows: dict[nn.Linear, int] = {}
    has_exp: list[Any] = []

    def keep(layer: nn.Linear, given: Any, output: Tensor) -> None:
        rows[layer] = output.numel() // output.shape[-1] if layer not in rows else 0

    def look(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            has_exp.extend(n for n in nodes_behind(loss.grad_fn) if name_of(n) == "Exp")

    ends = [m for m in probe.module.modules() if isinstance(m, nn.Linear) and m.out_features <= 2]
    if not 1 <= len(ends) <= 2 or sum(m.out_features for m in ends) != 2:
        return []
    hooks = [layer.register_forward_hook(keep) for layer in ends]
    try:
        probe.run("training_step", probe.batches["training_step"], training=False, record=False, then=look)
    finally:
        for hook in hooks:
            hook.remove()
    if not has_exp or len({*rows.values()}) != 1 or min(rows.values()) < FEWEST:
        return []
    return [Column(layer, i) for layer in rows for i in range(layer.out_features)]


def _passes(probe: Probe, mean: Column, spread: Column) -> Iterator[Pass]:
    for shift in SHIFTS:
        each = Pass(mean, spread, shift)
        hooks = [layer.register_forward_hook(each.hook) for layer in {mean.layer, spread.layer}]
        try:
            batch = probe.batches["training_step"]
            probe.run("training_step", batch, training=False, record=False, then=partial(Pass.differentiate, each))
        finally:
            for hook in hooks:
                hook.remove()
        yield each


def _factor(probe: Probe, mean: Column, spread: Column) -> float | None:
    """By which the square of the error differs from a power of the exponential where the gradient is 0; else None."""
    found = [*_passes(probe, mean, spread)]
    if any(each.gradient is None for each in found) or found[0].output is None:
        return None
    zero, one, back, two = (each.gradient for each in found if each.gradient is not None)
    log = found[0].output[..., spread.place].detach().flatten().double()
    # The gradient is a + b * (error - shift) ** 2, of which the square has its zero at -a / b.
    b = (one + back) / 2 - zero
    error = (back - one) / (4 * b)
    a = zero - b * error**2
    expected = a + b * (2 - error) ** 2
    is_square = torch.isclose(two, expected, rtol=ROUNDING, atol=float(two.abs().max()) * ROUNDING)
    known = is_square & (b != 0) & (-a / b > 0)
    if int(known.sum()) < max(FEWEST, 0.5 * len(known)) or float(log[known].std()) < 4 * EXACT:
        return None
    square = (-a / b)[known].log()
    for power in POWERS:
        rest = square - power * log[known]
        if float((rest - rest.mean()).abs().max()) < EXACT and abs(abs(float(rest.mean())) - math.log(2)) < EXACT:
            return round(math.exp(-float(rest.mean())), 2)
    return None
