"""Checks of rates: groups and schedules that are exchanged, and a clipping that leaves nothing. For probes only."""

from __future__ import annotations

import ast
import math
import re
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiplicativeLR

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.layers import fan_of, is_initial
from boltcutter.diagnosis.losses import joins_later
from boltcutter.diagnosis.optimizers import missing
from boltcutter.diagnosis.schedules import MAX_CALLS, rates_of, schedules
from boltcutter.diagnosis.source import depends_on_time, is_function, tree_of
from boltcutter.internals import foreach_norm

OF_RESUMING = re.compile(r"set_epoch|seed|generator|print|log|info", re.IGNORECASE)  # which each epoch sets again
BODY = re.compile(r"(^|[._])(backbone|pretrained|trunk|base_model|encoder|feature_extractor)([._]|$)")
HEAD = re.compile(r"(^|[._])(head|heads|classifier|fc|output_layer|linear_probe)([._]|$)")
RATIO = 5.0
TINY = 0.05  # a norm to which gradients are clipped
LITTLE = 0.05  # of the norm of a matrix
FEWEST_BATCHES = 10
FEWEST_FACTORS = 4  # rates
SAME = 1e-3  # relative
LEAST = 1e-9  # change of a factor
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
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


@check("in-no-optimizer", "likely", at="probe")
def left_out_between(seen: Evidence) -> Lines:
    """Layers that begin anew, and get a gradient, are in no optimizer, but those before and behind them are."""
    probe, lacking = seen.probe, {id(seen.parameters[n]): n for n in missing(seen)}
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    if not lacking or depends_on_time(seen.module) or joins_later(seen):
        return
    called: list[tuple[nn.Module, set[int]]] = []

    def keep(part: nn.Module, given: Any, output: Any) -> None:
        called.append((part, {id(p) for p in part.parameters()}))

    parts = [m for m in probe.module.modules() if isinstance(m, LINEAR)]
    hooks = [m.register_forward_hook(keep) for m in parts]
    gradients: dict[int, Tensor] = {}

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.grad_fn is not None and loss.numel() == 1:
            weights = [p for p in probe.module.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            gradients.update({id(p): g for p, g in zip(weights, found, strict=True) if g is not None})

    try:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=differentiate)
    finally:
        for hook in hooks:
            hook.remove()
    if len(called) < 3 or called[0][1] & lacking.keys() or called[-1][1] & lacking.keys():
        return
    between = [part for part, own in called if own and own <= lacking.keys()]
    matrices = [(part.weight, fan_of(part, part.weight)) for part in between if isinstance(part.weight, Tensor)]
    if matrices and all(
        is_initial(w, fan) and id(w) in gradients and bool(gradients[id(w)].any()) for w, fan in matrices
    ):
        names = sorted({lacking[key] for key in lacking.keys() & gradients.keys()})
        yield Line(
            f"{some(names)} begins with random values and gets gradients, but is in no optimizer, while the layers "
            "before and behind it are; add it to the parameters in configure_optimizers, or freeze it with "
            "requires_grad_(False)",
            subject="head",
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


def follow(seen: Evidence) -> None:
    """Note the largest rate of each optimizer, as it is now."""
    seen.rates[seen.trainer.global_step] = [
        max(float(g.get("lr", 0.0)) for g in o.param_groups) for o in seen.optimizers
    ]


@check("rate-compounded", "likely", at="trial")
def rate_compounded(seen: Evidence) -> Lines:
    """In eight steps, the present rate is multiplied by k / W, 1 - k / T or q ** k in step k."""
    for number in range(len(seen.optimizers)):
        rates = [each[number] for _, each in sorted(seen.rates.items()) if len(each) > number]
        if how := _how_compounded(rates):
            yield (
                f"{how} in each of the first {len(rates) - 1} steps, so it falls from {rates[0]:.3g} to "
                f"{rates[-1]:.3g}; such a factor is for the initial rate: group['lr'] = factor * initial_lr"
            )
            return


@check("rate-compounded", "likely", at="probe")
def schedule_compounded(seen: Evidence) -> Lines:
    """MultiplicativeLR multiplies the present rate by k / W, 1 - k / T or q ** k at call k."""
    for scheduler, _, calls in schedules(seen):
        if type(scheduler) is not MultiplicativeLR or calls > MAX_CALLS:
            continue
        rates = rates_of(seen, scheduler, calls)
        if how := _how_compounded(rates[: FEWEST_BATCHES + 1]):
            yield (
                f"by MultiplicativeLR, {how} at each call, so it falls from {rates[0]:.3g} to {rates[-1]:.3g}; such a "
                "factor is for the initial rate, which is what LambdaLR multiplies"
            )
            return


def _how_compounded(rates: list[float]) -> str:
    """How the present rate is multiplied in each step k by a factor that is made for the initial rate; else empty."""
    if len(rates) < FEWEST_FACTORS or min(rates, default=0.0) <= 0:
        return ""
    factors = [b / a for a, b in pairwise(rates)]
    rising = [*takewhile(lambda factor: factor < 1 - 1e-9, factors)]
    is_over = all(abs(factor - 1) < 1e-9 for factor in factors[len(rising) :])
    if len(rising) >= FEWEST_FACTORS - 1 and is_over and _counts(rising, (1, 2)):
        return f"the present rate is multiplied by a factor that rises from {rising[0]:.3g} to 1, as of a warm-up,"
    if len(factors) > FEWEST_FACTORS and max(factors) <= 1 and factors[-1] < 1:
        for each in ([1 - factor for factor in factors], [-math.log(factor) for factor in factors]):
            if _counts(each, (0, 1, 2)):
                return f"the present rate is multiplied by a factor that falls, now to {factors[-1]:.3g},"
    return ""


def _counts(values: list[float], begins: tuple[int, ...]) -> bool:
    """Whether values are one number times k, k + 1, k + 2, ... for a small k."""
    for k in begins:
        unit = values[-1] / (len(values) - 1 + k)
        if unit > LEAST and all(abs(v - unit * (i + k)) <= SAME * unit for i, v in enumerate(values)):
            return True
    return False


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
    """limit_train_batches or limit_val_batches is the whole number 1, one batch of ten or more, and the other 1.0."""
    trainer, splits = seen.trainer, seen.splits
    limits = {"train": trainer.limit_train_batches, "validation": trainer.limit_val_batches}
    if any(type(limit) is float and limit != 1.0 for limit in limits.values()):
        return
    for name, limit in limits.items():
        count = 0
        with suppress(TypeError):  # of a stream
            count = len(splits.loaders[name]) if splits and name in splits.loaders else 0
        is_one = type(limit) is int and limit == 1 and count >= FEWEST_BATCHES
        is_costly = name == "validation" and seen.probe is not None and _draws(seen)  # as samples of a diffusion model
        if is_one and any(type(other) is float for other in limits.values()) and not is_costly:
            key = "limit_val_batches" if name == "validation" else "limit_train_batches"
            yield f"{key}=1 is one batch of {count} in each epoch; all of them are 1.0, a fraction"


def _draws(seen: Evidence) -> bool:
    """Whether validation draws random numbers."""
    kind, probe = "validation_step", seen.probe
    if probe is None or kind not in probe.batches:
        return False
    end, start = probe.base(kind, training=False).random, torch.Generator().manual_seed(0).get_state()
    return end is not None and not torch.equal(end, start)


@check("loader-of-first-epoch", "likely", at="probe")
def loader_of_first_epoch(seen: Evidence) -> Lines:
    """train_dataloader reads the current epoch, but is called once, as reload_dataloaders_every_n_epochs is 0."""
    trainer = seen.trainer
    owners = [trainer.datamodule, seen.module]  # type: ignore[attr-defined]
    if trainer.reload_dataloaders_every_n_epochs or trainer.max_epochs in (0, 1):  # type: ignore[attr-defined]
        return
    for owner in (each for each in owners if each is not None):
        function = getattr(type(owner), "train_dataloader", None)
        tree = tree_of(function) if is_function(function) else None
        lines = ast.unparse(tree).splitlines() if tree is not None else []
        if any(re.search(r"\bcurrent_epoch\b", line) and not OF_RESUMING.search(line) for line in lines):
            yield (
                f"{type(owner).__name__}.train_dataloader reads the current epoch, but Lightning calls it once, so it "
                "is that of the first epoch; set reload_dataloaders_every_n_epochs=1"
            )
            return


@check("never-validated", "likely", at="probe")
def never_validated(seen: Evidence) -> Lines:
    """A callback stops or keeps by a number of validation, which takes place after more epochs than are trained."""
    trainer = seen.trainer
    every, epochs = trainer.check_val_every_n_epoch or 0, trainer.max_epochs or 0
    monitors = [str(getattr(c, "monitor", None) or "") for c in trainer.callbacks]  # type: ignore[attr-defined]
    logged = seen.probe.base("validation_step").logged if seen.probe and "validation_step" in seen.probe.batches else {}
    names = [name for name in monitors if name in logged]
    if names and every > epochs > 0 and trainer.max_steps == -1:
        yield (
            f"check_val_every_n_epoch={every}, but {epochs} epochs are trained, so {names[0]}, which a callback "
            "monitors, is never computed; lower it"
        )
