"""Checks of copies of a network, such as moving averages: for the trial of ``check --batch`` and ``audit``."""

from __future__ import annotations

import torch
from torch import nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, sampled
from boltcutter.diagnosis.source import depends_on_time


@check("average-unchanged", "likely", at="trial")
def average_unchanged(seen: Evidence) -> Lines:
    """A frozen copy of a trained part is used in validation only, and has not changed when the trained part has."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    used, held = (probe.base(kind).inputs.keys() for kind in ("training_step", "validation_step"))
    parts = {n: m for n, m in seen.module.named_modules() if n and any(True for _ in m.parameters())}
    for name, part in parts.items():
        is_only_held = any(n == name or n.startswith(f"{name}.") for n in held) and not any(
            n == name or n.startswith(f"{name}.") for n in used
        )
        if is_only_held and _unchanged(seen, name, part):
            twins = (n for n, m in parts.items() if n != name and _is_twin(seen, name, part, n, m))
            if twin := next(twins, None):
                yield Line(
                    f"{name}, a copy of {twin}, is what validation uses, but nothing updates it while {twin} is "
                    "trained; update it after each step, or validate the trained part",
                    "note" if depends_on_time(seen.module) else None,
                )
                return


def _unchanged(seen: Evidence, name: str, part: nn.Module) -> bool:
    named = {f"{name}.{n}": p for n, p in part.named_parameters()}
    return all(n in seen.start and torch.equal(seen.start[n], sampled(p)) for n, p in named.items())


def _is_twin(seen: Evidence, name: str, part: nn.Module, other: str, twin: nn.Module) -> bool:
    """Whether two parts began with the same weights, of which those of the second are trained and have changed."""
    one, two = dict(part.named_parameters()), dict(twin.named_parameters())
    if one.keys() != two.keys() or not all(f"{other}.{n}" in seen.start for n in two):
        return False
    equal = all(torch.equal(seen.start[f"{name}.{n}"], seen.start[f"{other}.{n}"]) for n in one)
    return equal and any(
        not torch.equal(seen.start[f"{other}.{n}"], sampled(p)) for n, p in two.items() if id(p) in seen.owned
    )
