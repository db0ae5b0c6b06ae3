"""Checks of layers: their mode, their statistics, and units that do nothing or all the same."""

from __future__ import annotations

import ast
import math
import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, Repeat, is_metric, overrides, sampled
from boltcutter.diagnosis.graph import depends_on, leaves_behind
from boltcutter.diagnosis.source import own_classes, says, tree_of
from boltcutter.internals import BatchNorm, NormWithStatistics

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LARGE_EPS = 0.1
LARGE = 128  # values, whose spread is known to a few percent
MANY_UNITS, ONE_SIDE = 16, 0.2  # scales of a norm, and the share of them that are negative
SHARING = re.compile(
    r"shar(e|ed|ing)|(^|[^a-z])ti(e|ed|ing)([^a-z]|$)|siames|recurr|univers|albert|unroll|reus|"
    r"(one|same|single)[ _](set[ _]of[ _]weights|layer|block|weights|parameters)|cross[ _-]layer",
    re.IGNORECASE,
)
COPY = re.compile(r"(^|_)(target|teacher|ema|average|averaged|momentum|reference|old|slow)(_|$)", re.IGNORECASE)
LINEAR_ON_PURPOSE = re.compile("linear[ _]?(net|model|auto)|deep[ _]?linear", re.IGNORECASE)
INPUTS = re.compile(r"(reference|ref)_(encoder|embed|net|branch|backbone|tower)", re.IGNORECASE)
SAMPLED = re.compile(r"monte|(^|_)mc_?(d|$)|MC_?D|bayes|uncertain|epistemic|prenet", re.IGNORECASE)
SIDES = re.compile(r"(source|src|input|context|query|anchor|left|first)(_|$)", re.IGNORECASE)
# Operations of the graph of a linear network and its loss.
LINEAR = frozenset(
    (
        *("Addmm", "Mm", "T", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select"),
        *("Slice", "Clone", "Permute", "Add", "Mul", "Div", "Neg", "Mean", "Sum", "NativeDropout", "LogSoftmax"),
        *("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits", "Expand"),
        *("torch::autograd::AccumulateGrad", "Sub", "Pow", "Flatten"),
    )
)
KEPT = re.compile(r"(^|_)(keep|kept|retain)_?(p|prob|probability|rate|ratio|share)$|(^|_)(p|prob|rate)_(keep|kept)$")
TURNED = re.compile(r"1(\.0)? - (self\.|hparams\.)*\w*(keep|kept|retain)", re.IGNORECASE)
LIKE = re.compile(r"requires?_?grad(ient)?s?_?")  # requires_grad
LARGEST = 10_000_000  # elements of a matrix whose rows are compared


@check("eval-in-training", "likely", at="graph")
def eval_in_training(seen: Evidence) -> Lines:
    """A trained part with dropout above 0, or with BatchNorm that never saw a batch, is in evaluation mode."""
    asleep = []
    for name, part in seen.parts:
        if part.training or is_metric(part):
            continue
        sensitive = any(isinstance(m, DROPOUTS) and m.p > 0 for m in part.modules()) or (
            any(
                isinstance(m, BatchNorm) and (part is seen.module or (m is not part and is_unseen(m)))
                for m in part.modules()
            )
        )
        if sensitive and any(p.requires_grad and id(p) in seen.owned for p in part.parameters()):
            asleep.append(name or type(part).__name__)
    outer = [n for n in asleep if not any(n.startswith(f"{other}.") for other in asleep)]
    if outer:
        yield (
            f"{some(outer)} is trained in evaluation mode, without dropout and batch statistics; call train() "
            "(Lightning keeps the mode of pretrained modules, and that of eval() calls)"
        )


def is_unseen(norm: nn.Module) -> bool:
    """Whether running statistics of BatchNorm, whose weights are trained, are those of its initialization."""
    mean, count, weight = norm.running_mean, norm.num_batches_tracked, norm.weight
    is_trained = isinstance(weight, Tensor) and weight.requires_grad
    is_first = isinstance(count, Tensor) and isinstance(mean, Tensor) and not bool(count) and not bool(mean.any())
    return is_trained and is_first


def remember_call(repeat: Repeat, inputs: Any, output: Any) -> None:
    """Find out whether a layer that is in a list several times gets its own output."""
    given = inputs[0] if inputs else None
    if not isinstance(given, Tensor) or not isinstance(output, Tensor):
        return
    same_shape = given.shape == output.shape == repeat.shape
    repeat.is_chained |= same_shape and repeat.node is not None and depends_on(given.grad_fn, repeat.node)
    repeat.shape, repeat.node = tuple(output.shape), output.grad_fn
    repeat.given, repeat.times = given, repeat.times + 1 if repeat.given is given else 1


@check("same-layer", "likely", at="graph")
def same_layer(seen: Evidence) -> Lines:
    """A list of layers has one of them several times, which gets its own output, or the same input each time."""
    for name, repeat in seen.repeated.items():
        layers = seen.module.get_submodule(name).modules()
        is_parallel = repeat.times == repeat.count and not any(isinstance(p, DROPOUTS) for p in layers)
        if repeat.is_chained or is_parallel:
            yield Line(
                f"{repeat.name} has the same layer {repeat.count} times ({name}), as [layer] * {repeat.count} does, so "
                "all have one set of weights; create each layer anew, as in [make_layer() for _ in range("
                f"{repeat.count})]",
                "note" if repeat.is_named or says(seen.module, SHARING) else None,
                subject=name,
            )
        repeat.node, repeat.given, repeat.times = None, None, 0  # they keep the graph


@check("dropout", "likely", at="start")
def dropout(seen: Evidence) -> Lines:
    """A dropout layer drops 95% or more of its inputs, though not all; or 70%, where names speak of what is kept."""
    found = [(n, m) for n, m in seen.parts if isinstance(m, DROPOUTS) and 0.7 <= m.p < 1]
    for name, part in found:
        outer = seen.module.get_submodule(name.rpartition(".")[0])
        owners = {seen.module, outer}
        classes = [cls for each in owners for cls in own_classes(type(each)) if "__init__" in vars(cls)]
        trees = [tree_of(vars(cls)["__init__"]) for cls in classes]
        if part.p < 0.95 and any(TURNED.search(ast.unparse(tree)) for tree in trees if tree is not None):
            continue  # 1 - keep
        if part.p >= 0.95 or any(says(each, KEPT, inner=False) for each in owners):
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
    for name, m in seen.parts:
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
    """The momentum of BatchNorm is 0.9 or more, or the eps of a norm 0.1 or more."""
    for name, m in seen.parts:
        if isinstance(m, NORMS) and m.training and m.eps is not None and m.eps >= LARGE_EPS:
            yield (
                f"eps={m.eps:g} of {name} is added to the variance, so outputs are smaller than of deviation 1; the "
                "argument behind the number of features is eps: pass others by name, as momentum=0.1"
            )
        if isinstance(m, BatchNorm) and m.momentum is not None and m.momentum >= 0.9 and m.training:
            yield (
                f"momentum={m.momentum} of {name} is the weight of the newest batch in PyTorch, so evaluation uses "
                f"little more than the last one; did you mean {1 - m.momentum:.2g}?"
            )


def count_hooks(seen: Evidence) -> int:
    """Hooks that layers call."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for _, m in seen.parts)


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
    if not module.training or not overrides(module, "validation_step"):
        return
    named = [(n, m) for n, m in seen.parts if m.training]
    norms = [n for n, m in named if isinstance(m, BatchNorm) and m.track_running_stats]
    drops = [n for n, m in named if isinstance(m, DROPOUTS) and m.p > 0]
    if norms or drops:
        yield (
            f"validation runs in training mode: {some(norms + drops)} "
            f"{'learns from' if norms else 'drops values of'} validation data; remove the call of train()"
        )


@check("train-in-validation", "likely", at="validation")
def part_trains_in_validation(seen: Evidence) -> Lines:
    """BatchNorm of a part is in training mode after a validation step, and the module is not."""
    module = seen.module
    if module.training or not overrides(module, "validation_step"):
        return
    norms = [n for n, m in seen.parts if isinstance(m, BatchNorm) and m.training and m.track_running_stats]
    if norms:
        yield (
            f"{some(norms)} is in training mode in validation, and learns from its data; remove the call of train(), "
            "or call eval()"
        )


TEACHER = re.compile(r"(^|\.)_?(teacher|reference|ref|frozen|pretrained)(_\w+)?$")


def is_frozen(seen: Evidence, name: str, p: nn.Parameter) -> bool:
    """Whether a parameter requires no gradient, or is one of a teacher that never got any."""
    owners = (name[: dot.start()] for dot in re.finditer(r"\.", name))
    return not p.requires_grad or (name not in seen.got_gradient and any(map(TEACHER.search, owners)))


def is_unchanged(seen: Evidence, part: nn.Module, name: str) -> bool:
    """Whether a part has weights, all of which are frozen, and as at the start."""
    found = [(f"{name}.{n}" if name else n, p) for n, p in part.named_parameters()]
    return bool(found) and all(
        n in seen.start and torch.equal(seen.start[n], sampled(p)) and (not p.requires_grad or is_frozen(seen, n, p))
        for n, p in found
    )


MODES = ": Lightning keeps the mode of each part, and calls no train()"


@check("frozen-statistics", "likely", at="summary")
def frozen_statistics(seen: Evidence) -> Lines:
    """BatchNorm of a frozen part, whose weights nothing else changes, updates its statistics in training."""
    if seen.step < 3 or seen.sharded:
        return
    moving = [
        (n, m) for n, m in seen.parts
        if isinstance(m, BatchNorm) and m.training and m.track_running_stats and m.momentum != 0
        and int(m.num_batches_tracked or 0) > 0
    ]  # fmt: skip
    names = [n for n, m in moving if is_unchanged(seen, m, n) and is_unchanged(seen, *owner_of(seen, n))]
    if names:
        yield (
            f"{some(names)} is part of a network that nothing trains, but its running statistics follow the new data; "
            f"call eval() on the network in __init__{MODES}"
        )


def owner_of(seen: Evidence, name: str) -> tuple[nn.Module, str]:
    """The largest part of which all weights are frozen and that has a layer."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        part = seen.module.get_submodule(path)
        found = [*part.named_parameters()]
        if found and all(is_frozen(seen, f"{path}.{n}", p) for n, p in found):
            return part, path
    return seen.module.get_submodule(name), name


@check("teacher-in-training", "likely", at="summary")
def teacher_in_training(seen: Evidence) -> Lines:
    """A frozen part that is named teacher or alike, and whose weights nothing changes, has active dropout."""
    if seen.step < 3 or seen.sharded:
        return
    for name, part in seen.parts:
        if not TEACHER.search(name):
            continue
        drops = [n for n, m in part.named_modules() if isinstance(m, DROPOUTS) and m.p > 0 and m.training]
        if drops and is_unchanged(seen, part, name):
            yield (
                f"{name} is frozen, but in training mode, so {some(drops)} drops values of what it teaches; call its "
                f"eval() in __init__{MODES}"
            )
            return


@check("hidden-unused", "likely", at="summary")
def hidden_unused(seen: Evidence) -> Lines:
    """The weights of a recurrent layer, or those for its state only, got no gradient, while others of it did."""
    if seen.step < 3 or any(steps.emptied for steps in seen.steps.values()):
        return
    live = seen.got_nonzero
    found = [n for n in seen.trained if ".weight_hh" in n and n in seen.got_gradient and n not in live]
    found = [n for n in found if n.replace("weight_hh", "weight_ih") in live]
    dead = [n for n in seen.trained if ".weight_ih_l" in n and n not in live]
    dead = [n for n in dead if any(o in live for o in seen.trained if o.startswith(n.rpartition("_l")[0]))]
    if dead:
        of_reverse = all(n.endswith("_reverse") for n in dead)  # of an encoder that has read all before the last time
        yield Line(
            f"{some(dead)} never gets a gradient, while other layers of the recurrent network do: the state of another "
            "layer or direction is read; use the last layer's, h[-1], or of two directions both",
            "note" if of_reverse else None,
            subject="layer",
        )
    if found:
        has_classes = seen.has_classes or seen.num_classes  # no forecast, which may need the last value only
        yield Line(
            f"{some(found)} gets no gradient: the state before is always 0, so the layer remembers nothing; pass its "
            "state on from time to time, and of two directions use the last state of each, not the last output",
            "note" if all(n.endswith("_reverse") for n in found) and not has_classes else None,
        )


@check("same-network", "likely", at="start")
def same_network(seen: Evidence) -> Lines:
    """A part that is named target, teacher, average or alike is another part of the module, not a copy of it."""
    for owner, part in seen.parts:
        names: dict[int, list[str]] = {}
        for name, child in part._modules.items():
            if child is not None and any(True for _ in child.parameters()):
                names.setdefault(id(child), []).append(name)
        for group in names.values():
            copies = [n for n in group if COPY.search(n)]
            if copies and len(copies) < len(group):
                other = next(n for n in group if n not in copies)
                if SIDES.match(other) or INPUTS.match(copies[0]):  # as of a translation, or of two pictures
                    continue
                yield Line(
                    f"{copies[0]} is {other} itself, not a copy, so it changes with each step; use copy.deepcopy()",
                    subject=f"{owner}.{copies[0]}",
                )


@check("no-activation", "likely", at="graph")
def no_activation(seen: Evidence) -> Lines:
    """The whole network is linear, though it has two or more layers that are as wide as their inputs or outputs."""
    graph = seen.graph
    if graph is None or seen.step or any(kind_of(name) not in LINEAR for name in graph.counts):
        return
    reached = {id(leaf) for leaf in graph.leaves}
    found = [(n, m) for n, m in seen.parts if isinstance(m, nn.Linear) and id(m.weight) in reached]
    for (a, first), (b, second) in pairwise(found):
        wide = first.out_features == second.in_features >= min(first.in_features, second.out_features)
        behind = leaves_behind(seen.loss, {id(second.weight)}) if wide else {}
        if id(first.weight) in behind.get(id(second.weight), ()) and not says(seen.module, LINEAR_ON_PURPOSE):
            yield Line(
                f"there is no activation between {a} and {b}, nor anywhere else, so the network is a linear model; put "
                "nn.ReLU() or alike between the layers",
                None if len(found) > 2 else "note",
            )
            return


def kind_of(name: str) -> str:
    """The name of an operation of the graph, without its number."""
    return name.partition("Backward")[0]


@check("norm-scale", "likely", at="probe")
def norm_scale(seen: Evidence) -> Lines:
    """The scales of a norm, at least 16, begin on both sides of 0, so that its outputs are small and of any sign."""
    if seen.trainer.global_step:
        return
    found = []
    for name, layer in seen.parts:
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, NORMS) or not isinstance(weight, nn.Parameter):  # others may add 1 to theirs
            continue
        if (
            weight.ndim == 1
            and len(weight) >= MANY_UNITS
            and ONE_SIDE < float((weight < 0).float().mean()) < 1 - ONE_SIDE
        ):
            found.append(name)
    if found:
        yield (
            f"the scales of {some(found)} begin on both sides of 0, so that outputs are small, and of the wrong sign; "
            "begin with 1, or draw them around 1, as by nn.init.normal_(weight, 1.0, 0.02)"
        )


@check("dropout-in-validation", "likely", at="validation")
def dropout_in_validation(seen: Evidence) -> Lines:
    """A functional dropout, or one that forward creates, is active in validation, once in each step."""
    if seen.active_dropout and not says(seen.module, SAMPLED):
        yield (
            f"dropout is active in validation ({some(seen.active_dropout)}); pass training=self.training to F.dropout, "
            "dropout_p=0.0 to attention unless self.training"
        )


@check("metric-not-reset", "likely", at="validated")
def metric_not_reset(seen: Evidence) -> Lines:
    """A metric that was computed still has its updates when the next validation begins, or epoch of training."""
    for name, count in seen.stale_metrics:
        yield Line(
            f"{name} still has the {count} updates of earlier epochs, so its value mixes them; log the metric "
            "itself, or call reset() at the end of the epoch",
            subject=name,
        )


@check("freezes-nothing", "certain", at="start")
def freezes_nothing(seen: Evidence) -> Lines:
    """A layer has an attribute requires_grad, or a parameter one of a like name, and nothing is as it says."""
    for name, part in seen.parts:
        said = vars(part).get("requires_grad")
        parameters = [*part.parameters()]
        if not isinstance(said, bool) or not parameters or says(part, re.compile("^requires_grad$"), inner=False):
            continue  # or a layer sets it itself
        if all(p.requires_grad != said and (said or id(p) in seen.owned) for p in parameters):
            yield Line(
                f"{name or 'the module'}.requires_grad = {said} only sets an attribute, and changes none of "
                f"its parameters; call requires_grad_({said})",
                subject=name,
            )
    for name, parameter in seen.module.named_parameters():
        for attribute, said in vars(parameter).items():
            is_like = isinstance(said, bool) and LIKE.fullmatch(attribute)
            if is_like and said != parameter.requires_grad and (said or id(parameter) in seen.owned):
                state = "not frozen" if parameter.requires_grad else "frozen"
                yield Line(
                    f"{attribute} = {said} only sets an attribute of {name}, which is {state}; call "
                    f"requires_grad_({said})",
                    subject="parameter",
                )


def fan_of(layer: nn.Module, weight: Tensor) -> int:
    """The number whose root bounds the initial values of a layer's weight."""
    return int(layer.hidden_size) if isinstance(layer, nn.RNNBase) else weight[0].numel()


def is_initial(weight: Tensor, fan: int) -> bool:
    """Whether values are as evenly spread as torch's initial ones, but for a few steps of training."""
    bound, w = 1 / math.sqrt(fan), weight.detach().float()
    is_even = weight.numel() < LARGE or abs(float(w.std()) * math.sqrt(3) / bound - 1) < 0.1
    return is_even and float(w.abs().max()) < 1.1 * bound
