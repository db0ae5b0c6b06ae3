"""Probes of terms of a loss that depend on weights, and have no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from boltcutter.diagnosis.addends import Addends
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.probe import Probe, take
from boltcutter.diagnosis.source import depends_on_time

STEP = 0.05  # relative change of weights
PASSES = 4
SAME = 1e-5  # relative
COMPARES = frozenset(("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__", "argmax", "round", "sign"))
DETACHES = frozenset(("detach", "detach_"))


@check("constant-term", "likely", at="probe")
def constant_of_weights(seen: Evidence) -> Lines:
    """A term of the loss changes with the weights, but has no gradient, as of no_grad, item(), float() or detach()."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or any(r.check == "constant-term" for r in seen.remarks):
        return
    if not probe.module.automatic_optimization and len(seen.optimizers) > 1:
        return  # a loss may have a part that another optimizer trains
    base = probe.base(kind).addends
    if not base.constants:
        return
    weights = [seen.parameters[name] for name in seen.trained]
    passes = [base]
    for number in range(1, PASSES):
        with _moved(weights, number):
            passes.append(probe.run(kind, probe.batches[kind], training=True).addends)
    for key, constant in base.constants.items():
        values = [each.constants[key].value for each in passes if key in each.constants]
        is_same = len(values) == PASSES and max(values) - min(values) <= SAME * abs(constant.value)
        # Of a comparison, as of probabilities with 0.5, all may be the same at first.
        is_compared = bool(base.names[key] & COMPARES) and _depends_on_batch(probe, base, key)
        if len(values) < PASSES or (is_same and not is_compared):
            continue
        terms = zip(*(each.terms for each in passes), strict=False)
        if any(_is_line([*term], values) for term in terms):
            continue
        is_detached = bool(base.names[key]) and base.names[key] <= DETACHES
        is_meant = is_detached and (depends_on_time(seen.module) or _depends_on_batch(probe, base, key))
        yield Line(
            f"a term of {constant.value:.3g} is added to the loss, and changes with the weights, but has no gradient, "
            "as of no_grad(), item(), float() or detach(), so no weight learns of it; compute it of tensors that have "
            "a gradient",
            "note" if is_meant else None,
        )
        return


@contextmanager
def _moved(weights: list[nn.Parameter], number: int) -> Iterator[None]:
    """Multiply each weight by another factor, and restore them; single values may be factors of a loss."""
    chosen = [p for p in weights if p.numel() > 1]
    before = [p.detach().clone() for p in chosen]
    try:
        for i, p in enumerate(chosen):
            p.data.mul_(1 + STEP * math.sin(number * (i + 1)))
        yield
    finally:
        for p, value in zip(chosen, before, strict=True):
            p.data.copy_(value)


def _is_line(x: list[float], y: list[float]) -> bool:
    """Whether one value is a linear function of another one."""
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (x, y))
    a, b = a - a.mean(), b - b.mean()
    product = abs(float(a @ b))
    return product > 0 and math.isclose(product, float(a.norm() * b.norm()), rel_tol=SAME)


def _depends_on_batch(probe: Probe, base: Addends, key: int) -> bool:
    """Whether a term is another one for other samples."""
    kind = "training_step"
    count = probe.size(kind)
    if count < 2:
        return True
    rows = torch.arange(count) // 2
    other = probe.run(kind, take(probe.batches[kind], rows), training=True).addends
    value = base.constants[key].value
    return key not in other.constants or not math.isclose(other.constants[key].value, value, rel_tol=SAME)
