"""Checks of rates: groups and schedules that are exchanged, and a clipping that leaves nothing. For probes only."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

import torch
from torch.optim import SGD

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.statements import is_initial
from boltcutter.internals import foreach_norm

BODY = re.compile(r"(^|[._])(backbone|pretrained|trunk|base_model|encoder|feature_extractor)([._]|$)")
HEAD = re.compile(r"(^|[._])(head|heads|classifier|fc|output_layer|linear_probe)([._]|$)")
RATIO = 5.0
TINY = 0.05  # a norm to which gradients are clipped
LITTLE = 0.05  # of the norm of a matrix
FEWEST_BATCHES = 10
COUNTED = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "lr_lambdas")


@check("group-rates", "likely", at="probe")
def group_rates(seen: Evidence) -> Lines:
    """The rate of what is named as a backbone, or pretrained, is five or more times that of what is named as a head."""
    for optimizer in seen.optimizers:
        rates: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for group in optimizer.param_groups:
            names = [seen.names[id(p)] for p in group["params"] if id(p) in seen.names]
            for is_body, pattern in ((True, BODY), (False, HEAD)):
                if names and all(pattern.search(name) for name in names):
                    rates[is_body].append((float(group.get("initial_lr", group.get("lr", 0.0))), names[0]))
        if all(rates.values()):
            (body, one), (head, other) = min(rates[True]), max(rates[False])
            weights = [seen.parameters[n] for n in (one, other)]
            begins_anew = [p.ndim > 1 and is_initial(p, p[0].numel()) for p in weights]
            if head > 0 and body >= RATIO * head and begins_anew == [False, True]:
                yield (
                    f"{one} has a learning rate of {body:g}, and {other}, which begins anew, one of {head:g}: are the "
                    "rates of the groups exchanged?"
                )


@check("barely-trained", "likely", at="probe")
def clipped_to_little(seen: Evidence) -> Lines:
    """By a tiny clipping of SGD, all steps of the training together cannot change a matrix by 5%."""
    clip, steps = seen.trainer.gradient_clip_val, seen.total_steps
    if not clip or clip > TINY or (seen.trainer.gradient_clip_algorithm or "norm") != "norm" or steps == math.inf:
        return
    for optimizer in seen.optimizers:
        if type(optimizer) is not SGD or not seen.start:
            continue
        rate = max(float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups)
        momentum = max(float(g.get("momentum") or 0.0) for g in optimizer.param_groups)
        weights = [p for g in optimizer.param_groups for p in g["params"] if p.ndim > 1]
        size = float(torch.stack(foreach_norm([p.detach() for p in weights])).min()) if weights else 0.0
        most = rate * clip * steps / max(1 - momentum, 1e-3)
        if most < LITTLE * size:
            yield (
                f"gradient_clip_val={clip:g} with lr={rate:g}: all {steps:.0f} steps together change the weights by "
                f"{most:.2g} at most, where the smallest matrix has a norm of {size:.3g}; clip at 1, or raise the rate"
            )


@check("schedule-repeated", "likely", at="probe")
def schedule_repeated(seen: Evidence) -> Lines:
    """There are as many schedules as optimizers, but two are alike and of the same one, and another one has none."""
    configs = seen.trainer.lr_scheduler_configs
    owners = [getattr(c.scheduler.optimizer, "optimizer", c.scheduler.optimizer) for c in configs]
    if len(seen.optimizers) < 2 or len(owners) != len(seen.optimizers) or len({*map(id, owners)}) == len(owners):
        return
    without = [n for n, o in enumerate(seen.optimizers) if not any(o is owner for owner in owners)]
    for n, owner in enumerate(owners):
        again = [m for m in range(n) if owners[m] is owner and _are_alike(configs[m].scheduler, configs[n].scheduler)]
        if again and without and any(owner is o for o in seen.optimizers):
            number = next(k for k, o in enumerate(seen.optimizers) if o is owner)
            yield (
                f"schedules {again[0]} and {n} both change the rate of optimizer {number}, and "
                f"optimizer {without[0]} has none; give one of them the other optimizer"
            )
            return


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two schedules have the same class and settings; others are chained."""
    settings = [
        {k: v for k, v in vars(each).items() if isinstance(v, int | float | str | list | tuple) and k not in COUNTED}
        for each in (one, other)
    ]
    return type(one) is type(other) and settings[0] == settings[1]


@check("one-batch", "likely", at="probe")
def one_batch(seen: Evidence) -> Lines:
    """limit_train_batches is the whole number 1, one batch of ten or more, and validation has all of its batches."""
    trainer, loader = seen.trainer, seen.splits.train if seen.splits else None
    limit, held = trainer.limit_train_batches, trainer.limit_val_batches
    count = 0
    with suppress(TypeError):  # of a stream
        count = len(loader) if loader is not None else 0
    if type(limit) is int and limit == 1 and count >= FEWEST_BATCHES and held == 1.0 and type(held) is float:
        yield (f"limit_train_batches=1 is one batch of {count} in each epoch; all of them are 1.0, a fraction")
