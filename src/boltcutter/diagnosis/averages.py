"""Checks of copies of a network, such as moving averages: for the trial of ``check --batch`` and ``audit``."""

from __future__ import annotations

import re

import torch
from torch import nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, sampled
from boltcutter.diagnosis.source import depends_on_time

AVERAGE = re.compile(r"(^|\.|_)(ema|momentum|average|averaged|key_encoder|encoder_k|slow)(_|\.|$)", re.IGNORECASE)

ROUNDING = 1e-5  # of what the original has moved, which an average moves by its computation


@check("average-unchanged", "likely", at="trial")
def average_unchanged(seen: Evidence) -> Lines:
    """A frozen copy is used in validation only, or named as an average, and has not changed when its original has."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    used, held = (probe.base(kind).inputs.keys() for kind in ("training_step", "validation_step"))
    parts = {n: m for n, m in seen.module.named_modules() if n and any(True for _ in m.parameters())}
    for name, part in parts.items():
        is_only_held = any(n == name or n.startswith(f"{name}.") for n in held) and not any(
            n == name or n.startswith(f"{name}.") for n in used
        )
        if not (is_only_held or AVERAGE.search(name)):
            continue
        twin = next((n for n, m in parts.items() if n != name and _is_left_behind(seen, name, part, n, m)), None)
        if twin is not None:
            what = "is what validation uses, but" if is_only_held else "is named as an average, but"
            yield Line(
                f"{name}, a copy of {twin}, {what} nothing changes it while {twin} is trained; update it after each "
                "step, or use the trained part",
                "note" if depends_on_time(seen.module) else None,
            )
            return


def _is_left_behind(seen: Evidence, name: str, part: nn.Module, other: str, twin: nn.Module) -> bool:
    """Whether two parts began with the same weights, of which only those of the second, trained one have changed."""
    one, two = dict(part.named_parameters()), dict(twin.named_parameters())
    if one.keys() != two.keys() or any(f"{each}.{n}" not in seen.start for each in (name, other) for n in one):
        return False
    if any(not torch.equal(seen.start[f"{name}.{n}"], seen.start[f"{other}.{n}"]) for n in one):
        return False
    moved, followed = (
        sum(float((seen.start[f"{each}.{n}"] - sampled(p)).double().norm()) for n, p in parameters.items())
        for each, parameters in ((other, two), (name, one))
    )
    return moved > 0 and any(id(p) in seen.owned for p in two.values()) and followed <= ROUNDING * moved
