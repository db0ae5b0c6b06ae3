"""Checks of layers: their mode, their statistics, and units that do nothing or all the same."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, Repeat, is_metric, sampled
from boltcutter.diagnosis.graph import depends_on
from boltcutter.diagnosis.source import says
from boltcutter.internals import BatchNorm

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
SHARING = re.compile(
    r"shar(e|ed|ing)|(^|[^a-z])ti(e|ed|ing)([^a-z]|$)|siames|recurr|univers|albert|unroll|reus|"
    r"(one|same|single)[ _](set[ _]of[ _]weights|layer|block|weights|parameters)|cross[ _-]layer",
    re.IGNORECASE,
)
LARGEST = 10_000_000  # elements of a matrix whose rows are compared


@check("eval-in-training", "likely", at="graph")
def eval_in_training(seen: Evidence) -> Lines:
    """A trained part with dropout above 0, or the whole module with BatchNorm, is in evaluation mode."""
    asleep = []
    for name, part in seen.module.named_modules():
        if part.training or is_metric(part):
            continue
        sensitive = any(isinstance(m, DROPOUTS) and m.p > 0 for m in part.modules()) or (
            part is seen.module and any(isinstance(m, BatchNorm) for m in part.modules())
        )
        if sensitive and any(p.requires_grad and id(p) in seen.owned for p in part.parameters()):
            asleep.append(name or type(part).__name__)
    outer = [n for n in asleep if not any(n.startswith(f"{other}.") for other in asleep)]
    if outer:
        yield (
            f"{some(outer)} is trained in evaluation mode, without its dropout; call train() (Lightning keeps the mode "
            "of pretrained modules, and that of eval() calls)"
        )


def remember_call(repeat: Repeat, inputs: Any, output: Any) -> None:
    """Find out whether a layer that is in a list several times gets its own output."""
    given = inputs[0] if inputs else None
    if not isinstance(given, Tensor) or not isinstance(output, Tensor):
        return
    same_shape = given.shape == output.shape == repeat.shape
    repeat.is_chained |= same_shape and repeat.node is not None and depends_on(given.grad_fn, repeat.node)
    repeat.shape, repeat.node = tuple(output.shape), output.grad_fn


@check("same-layer", "likely", at="graph")
def same_layer(seen: Evidence) -> Lines:
    """A list of layers has one of them several times, which gets its own output, and no code speaks of sharing."""
    for name, repeat in seen.repeated.items():
        if repeat.is_chained:
            yield Line(
                f"{repeat.name} has the same layer {repeat.count} times ({name}), as [layer] * {repeat.count} does, so "
                "all have one set of weights; create each layer anew, as in [make_layer() for _ in range("
                f"{repeat.count})]",
                "note" if repeat.is_named or says(seen.module, SHARING) else None,
                subject=name,
            )
        repeat.node = None  # it keeps the graph


@check("dropout", "likely", at="start")
def dropout(seen: Evidence) -> Lines:
    """A dropout layer drops 95% or more of its inputs, though not all."""
    for name, part in seen.module.named_modules():
        if isinstance(part, DROPOUTS) and 0.95 <= part.p < 1:
            yield (
                f"{name} ({type(part).__name__}) drops {part.p:.0%} of its inputs: p is the share that is dropped, not "
                f"that which is kept; write p={1 - part.p:.2g}, or a smaller p"
            )


@check("dead-layer", "certain", at="summary")
@check("dead-layer", "certain", at="step")
def dead_layer(seen: Evidence) -> Lines:
    """At four looks, an nn.ReLU gave 0 for all of 8 or more samples, and some gradients are 0, but not all."""
    dead = [n for n, count in seen.dead.items() if count >= 4]
    if dead and seen.step >= 3:
        yield (
            f"the output of {some(dead)} is 0 for all samples, as at the {max(seen.dead.values())} steps looked at "
            "before, so what is before it does not learn; lower the learning rate, or correct its bias, initialization "
            "or input"
        )


@check("same-units", "certain", at="summary")
def same_units(seen: Evidence) -> Lines:
    """All rows of a matrix that has been trained are equal."""
    for name in seen.trained:
        p = seen.parameters[name]
        if p.ndim < 2 or len(p) < 2 or p.numel() > LARGEST or name not in seen.got_nonzero or name not in seen.start:
            continue
        first = p.detach().flatten(1)[:, :1]
        if not bool((first == first[0]).all()) or torch.equal(seen.start[name], sampled(p)):
            continue
        if bool((p.detach() == p.detach()[:1]).all()):
            yield (
                f"all {len(p)} units of {name} have the same weights, as at the start, so they are one unit; "
                "initialize them at random"
            )
            return


@check("bn-statistics", "certain", at="summary")
def bn_statistics(seen: Evidence) -> Lines:
    """Running statistics are still exactly 0 and 1 after three batches."""
    for name, m in seen.module.named_modules():
        if (
            isinstance(m, BatchNorm)
            and m.track_running_stats
            and m.running_mean is not None
            and m.running_var is not None
        ):
            count = int(m.num_batches_tracked or 0)
            if (
                count >= 3
                and not bool(m.running_mean.any())
                and torch.equal(m.running_var, torch.ones_like(m.running_var))
            ):
                yield (
                    f"the running statistics of {name} are those of initialization after {count} batches "
                    f"(momentum={m.momentum}), but evaluation uses them; set momentum=0.1"
                )


@check("bn-momentum", "likely", at="start")
def bn_momentum(seen: Evidence) -> Lines:
    """The momentum of BatchNorm is 0.9 or more."""
    for name, m in seen.module.named_modules():
        if isinstance(m, BatchNorm) and m.momentum is not None and m.momentum >= 0.9 and m.training:
            yield (
                f"momentum={m.momentum} of {name} is the weight of the newest batch in PyTorch, so evaluation uses "
                f"little more than the last one; did you mean {1 - m.momentum:.2g}?"
            )


def count_hooks(module: nn.Module) -> int:
    """Hooks that layers call."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules())


@check("hooks-grow", "likely", at="summary")
def hooks_grow(seen: Evidence) -> Lines:
    """At each look there were more hooks of layers than at the one before."""
    counts = seen.hooks
    if len(counts) >= 4 and all(b > a for a, b in pairwise(counts)):
        yield (
            f"hooks of layers are registered again and again, {counts[0]} at first and {counts[-1]} at last, and all "
            "are called; register them once, or call remove()"
        )


@check("train-in-validation", "likely", at="validation")
def train_in_validation(seen: Evidence) -> Lines:
    """The module itself is in training mode after a validation step, and has BatchNorm or dropout."""
    module = seen.module
    if not module.training or not is_overridden("validation_step", module):
        return
    named = [(n, m) for n, m in module.named_modules() if m.training]
    norms = [n for n, m in named if isinstance(m, BatchNorm) and m.track_running_stats]
    drops = [n for n, m in named if isinstance(m, DROPOUTS) and m.p > 0]
    if norms or drops:
        yield (
            f"validation runs in training mode: {some(norms + drops)} "
            f"{'learns from' if norms else 'drops values of'} validation data; remove the call of train()"
        )


@check("dropout-in-validation", "likely", at="validation")
def dropout_in_validation(seen: Evidence) -> Lines:
    """A functional dropout is active in validation, once in each step."""
    if seen.active_dropout:
        yield f"dropout is active in validation ({some(seen.active_dropout)}); pass training=self.training to F.dropout"


@check("metric-not-reset", "likely", at="validated")
def metric_not_reset(seen: Evidence) -> Lines:
    """A metric that was computed still has its updates when the next validation begins."""
    for name, count in seen.stale_metrics:
        yield Line(
            f"{name} still has the {count} updates of the last validation, so its value mixes epochs; log the metric "
            "itself, or call reset() at the end of the epoch",
            subject=name,
        )
