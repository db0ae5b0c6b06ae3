"""Probes of the terms of the loss: whether each is minimized that should be, and how noise is scaled."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import LOSSES, MOVES, REGRESSIONS, name_of, nodes_behind, operation_behind, saved
from boltcutter.diagnosis.source import namespaces_of, own_classes, says, unpacked_names
from boltcutter.internals import replaced
from boltcutter.structure import flatten, with_tensors

MEAN = 1  # a reduction
CUT = 0.2  # share of predictions
PROPORTIONAL = 0.9  # correlation
NEXT = re.compile(r"^(next_?(obs|states?|observations?|s)|(s|obs|states?|observations?)(2|_next|_prime|_tp1))$")
GAINS = re.compile(r"(^|_)(advantages?|adv|advs|returns?|rewards?|rews?|gains?)($|_)", re.IGNORECASE)
ENDED = re.compile(r"(dones?|terminals?|terminated|is_last)$", re.IGNORECASE)
FEWEST_VALUES = 16  # of a sample
FEWEST_WEIGHTS = 16  # of samples
NORMS = ("Pow", "Norm", "LinalgVectorNorm")
QUANTILES = re.compile(r"(^|_)(taus?|qs?|quantiles?|levels?|percentiles?)$")
UNLEARNS = re.compile("unlearn|forget(?!_?gate|_?bias)|ascent|attack", re.IGNORECASE)
OF_INTERVAL = re.compile("confidence|coverage|risk|signific", re.IGNORECASE)  # 0.95 has 0.05 on one side
EXCEEDS = re.compile(r"exceed|reserve|survival|1(\.0?)? - (self\.)?(levels?|q|qs|taus?|quantiles?)\b", re.IGNORECASE)
SUMS = ("Add", "Sub", "Rsub")
OUTPUTS = ("Addmm", "Mm", "Convolution", "torch::autograd::AccumulateGrad")


class Term(NamedTuple):
    """An operation of the graph behind the loss.

    Args:
        node: Of the graph.
        gradient: Of the loss, by its result.
    """

    node: Any
    gradient: Tensor


class Terms(NamedTuple):
    """What a backward pass of the user's own loss shows.

    Args:
        nodes: All operations.
        losses: Loss functions.
        logs: Those of log_softmax.
        norms: Squares and norms.
        exps: Exponentials.
    """

    nodes: list[Any]
    losses: list[Term]
    logs: list[Term]
    norms: list[Term]
    exps: list[Term]


def terms_of(seen: Evidence) -> Terms | None:
    """Differentiate the loss of the batch; None if the module does so itself, or there is none."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return None
    if probe.terms is None:
        probe.terms = terms = Terms([], [], [], [], [])
        batch = probe.batches["training_step"]
        probe.run("training_step", batch, training=True, record=False, then=partial(_differentiate, seen, terms))
    return probe.terms  # type: ignore[no-any-return]


def _differentiate(seen: Evidence, terms: Terms, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
        return
    terms.nodes.extend(nodes_behind(loss.grad_fn))
    for node in terms.nodes:
        kind = name_of(node)
        kept = terms.losses if node.name() in LOSSES else terms.logs if kind == "LogSoftmax" else None
        kept = terms.norms if kind in NORMS else terms.exps if kind == "Exp" else kept
        if kept is not None:
            node.register_prehook(partial(_keep, kept, node))
    parameters = [p for p in seen.module.parameters() if p.requires_grad]
    try:
        torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    except RuntimeError:  # of reentrant checkpoints
        terms.nodes.clear()


def _keep(kept: list[Term], node: Any, gradients: Any) -> None:
    if gradients and isinstance(gradients[0], Tensor):
        kept.append(Term(node, gradients[0].detach()))


def sign_of(seen: Evidence) -> float:
    """-1 if optimizers climb, otherwise 1."""
    return -1.0 if any(g.get("maximize") for o in seen.optimizers for g in o.param_groups) else 1.0


@check("sum-and-mean", "likely", at="probe")
def divergence_of_a_mean(seen: Evidence) -> Lines:
    """A divergence that is summed over dimensions is added to an error that is a mean over 16 values and more."""
    terms = terms_of(seen)
    for node, weight in terms.losses if terms else ():
        values = saved(node, "self")
        if values is None or values.ndim < 2 or weight.numel() > 1 or saved(node, "reduction") != MEAN:
            continue
        count, each = len(values), values.numel() // max(len(values), 1)
        squares, variances = (
            [g for n, g in found if name_of(n) in ("Pow", "Exp") and g.ndim == 2 and len(g) == count]
            for found in (terms.norms, terms.exps)  # type: ignore[union-attr]
        )
        for a in squares:
            is_pair = any(a.shape == b.shape and torch.allclose(a, b) and _is_uniform(a) for b in variances)
            if is_pair and each >= FEWEST_VALUES and torch.isclose(2 * count * a[0, 0], weight.flatten()[0], rtol=1e-3):
                yield (
                    f"a divergence of {tuple(a.shape)} is summed over its dimensions, but the error beside it is a "
                    f"mean over {each} values of each sample, so that the divergence counts {each} times as much, and "
                    "the code tells nothing; sum the error over the values of a sample, too"
                )
                return


@check("loss-maximized", "likely", at="probe")
def loss_maximized(seen: Evidence) -> Lines:
    """The only loss functions, or the log-probabilities of labels, are climbed alike, and no parameter is frozen."""
    terms = terms_of(seen)
    if terms is None or any(not p.requires_grad for p in seen.module.parameters()) or says(seen.module, UNLEARNS):
        return  # an attack on a frozen network maximizes its loss
    sign = sign_of(seen)
    if terms.losses and all(_is_uniform(t.gradient) and sign * float(t.gradient.sum()) < 0 for t in terms.losses):
        kind = LOSSES[terms.losses[0].node.name()].replace("nll_loss", "cross-entropy")
        reason = "the optimizer has maximize=True" if sign < 0 else "it enters with a minus"
        yield f"{kind} is maximized, as {reason}, so the model unlearns; correct the sign"
    elif any(_rewards_errors(term, sign) and _has_labels(seen, term) for term in terms.losses):
        yield (
            "the loss of a sample falls as its cross-entropy grows, from some value on, so that hard samples are "
            "unlearned; a focal loss weighs with (1 - p) ** gamma, where p is the probability of the label"
        )
    elif not terms.losses and len(terms.logs) == 1:
        gradient = sign * terms.logs[0].gradient
        chosen = gradient != 0
        is_one_each = bool((chosen.sum(-1) == 1).all())
        if is_one_each and bool((gradient[chosen] > 0).all()) and _is_uniform(gradient[chosen]):
            yield (
                "log-probabilities of one class of each sample are minimized, so the model unlearns; return the "
                "negative of their mean"
            )


def _rewards_errors(term: Term, sign: float) -> bool:
    """Whether a weight, which is a function of the cross-entropy of a sample alone, is negative for large ones."""
    node, gradient = term.node, sign * term.gradient.flatten()
    p, t = saved(node, "self"), saved(node, "target")
    kind = LOSSES[node.name()]
    if p is None or t is None or len(gradient) < FEWEST_VALUES or len(gradient) != t.numel():
        return False
    if kind == "nll_loss" and p.ndim == 2 and bool(((t >= 0) & (t < p.shape[1])).all()):
        values = -p.gather(1, t[:, None]).flatten()
    elif kind == "binary_cross_entropy_with_logits":
        values = nn.functional.binary_cross_entropy_with_logits(p, t, reduction="none").flatten()
    else:
        return False
    weights = gradient[values.argsort()]
    spread = float(weights.max() - weights.min())
    is_function = float(weights.diff().abs().sum()) <= 3 * spread  # rises and falls once or twice
    is_function &= (
        len(weights) >= FEWEST_WEIGHTS and len({*weights.tolist()}) > len(weights) // 2
    )  # no rewards of actions
    late = weights[len(weights) // 2 :]
    return is_function and spread > 0 and float((late < 0).float().mean()) > 0.9


def _has_labels(seen: Evidence, term: Term) -> bool:
    """Whether the targets are a part of the batch, and not actions that were drawn."""
    t = saved(term.node, "target")
    parts = tensors_of(seen.probe.batches["training_step"]) if seen.probe else []
    return t is not None and any(p.numel() == t.numel() and torch.equal(p.flatten().to(t), t.flatten()) for p in parts)


def _is_uniform(gradient: Tensor) -> bool:
    """Whether all samples count alike, or not at all; returns of actions, which may be negative, differ."""
    found = gradient[gradient != 0]
    return bool(torch.isclose(found, found[:1], rtol=1e-4).all())


@check("penalty-sign", "likely", at="probe")
def penalty_sign(seen: Evidence) -> Lines:
    """The loss falls, at the same rate everywhere, as squares of weights, or of a layer's output, grow."""
    terms, sign = terms_of(seen), sign_of(seen)
    for node, gradient in terms.norms if terms else ():
        source = operation_behind(node)
        if name_of(source) not in OUTPUTS or not gradient.numel():
            continue
        gradient = sign * gradient
        if float(gradient.max()) < 0 and _is_uniform(gradient):
            is_weight = name_of(source).endswith("AccumulateGrad")
            what = _weight(seen, source) if is_weight else f"the output of a layer, of {tuple(gradient.shape)},"
            yield (
                f"a penalty on the squares of {what} has the wrong sign: the loss falls as they grow, without end; "
                "add it, as in a weight decay, or in the divergence of a normal distribution"
            )
            return


def _weight(seen: Evidence, node: Any) -> str:
    return seen.names.get(id(node.variable), "a parameter")


@check("deviation", "likely", at="probe")
def deviation(seen: Evidence) -> Lines:
    """The same exponential multiplies noise, as a deviation, and is a variance in a divergence from a normal one."""
    terms = terms_of(seen)
    if terms is None:
        return
    consumers: dict[int, list[Any]] = defaultdict(list)
    for node in terms.nodes:
        for parent in inputs_of(node):
            consumers[id(parent)].append(node)
    by_input: dict[Any, list[Any]] = defaultdict(list)
    for node in terms.nodes:
        if name_of(node) == "Exp":
            by_input[node.next_functions[0]].append(node)
    for (source, _), exponentials in by_input.items():
        others = consumers[id(source)]
        is_divergence = any(name_of(u) in SUMS for n in exponentials for u in consumers[id(n)])
        is_divergence &= any(name_of(u) in SUMS for u in others)
        if is_divergence and any(name_of(u) == "Mul" and _is_noise(u) for u in others):
            yield (
                "the divergence takes the deviation, by which noise is multiplied, for the logarithm of the variance; "
                "give it log_var"
                if name_of(source) == "Exp"
                else "noise is multiplied by what the divergence takes for the logarithm of a variance; multiply it by "
                "the deviation, exp(0.5 * log_var)"
            )
            return
        users = [user for node in exponentials for user in consumers[id(node)]]
        scales_noise = any(name_of(user) == "Mul" and _is_noise(user) for user in users)
        if (
            scales_noise
            and any(name_of(u) in SUMS for u in users)
            and any(name_of(u) in SUMS for u in consumers[id(source)])
        ):
            yield (
                "noise is multiplied by exp(log_var), which the divergence takes for the variance; multiply it by the "
                "deviation, exp(0.5 * log_var)"
            )
            return


@check("quantile-sign", "likely", at="probe")
def quantile_sign(seen: Evidence) -> Lines:
    """The gradients of outputs train them for 1 - q, of the quantiles q that an attribute of the module has."""
    probe = seen.probe
    asked = [*_quantiles(seen.module)]
    if probe is None or "training_step" not in probe.batches or not asked or says(seen.module, EXCEEDS):
        return
    outputs: list[Tensor] = []
    found: list[Tensor] = []
    layers = [p for p in probe.module.modules() if isinstance(p, nn.Linear | nn.Conv1d)]
    hooks = [layer.register_forward_hook(lambda part, given, output: outputs.append(output)) for layer in layers]
    try:
        batch = probe.batches["training_step"]
        then = partial(_keep_gradient, outputs, found)
        probe.run("training_step", batch, training=True, record=False, then=then)
    finally:
        for hook in hooks:
            hook.remove()
    for name, levels in asked if found else ():
        if (q := _reversed_quantile(sign_of(seen) * found[0], levels)) is not None:
            yield (
                f"the quantile loss trains an output for {1 - q:g} where {name} has {q:g}: its error has the wrong "
                "sign; use target - prediction"
            )
            return


def _reversed_quantile(gradient: Tensor, levels: list[float]) -> float | None:
    """A quantile of the outputs, instead of which they are trained for 1 - q, as are all; None if there is none."""
    count, width = len(levels), gradient.shape[-1]
    if width % count:
        return None
    several = gradient.reshape(-1, count, width // count).movedim(1, 0)
    for columns in (gradient.reshape(-1, count).T, several):  # (…, Q), also of several times, and (…, Q, times)
        trained = [_trained_level(column.flatten()) for column in columns]
        known = [(q, t) for q, t in zip(levels, trained, strict=True) if t is not None and abs(q - 0.5) > 0.01]
        is_reversed = bool(known) and all(abs(1 - q - t) < 0.001 for q, t in known)
        if is_reversed or (count > 1 and _is_reversed_on_one_side(columns, levels)):
            return levels[-1]
    return None


def _is_reversed_on_one_side(columns: Tensor, levels: list[float]) -> bool:
    """Whether all outputs are below their targets, or all above, and are moved as those of 1 - q would be."""
    g = torch.stack([column.flatten() for column in columns]).double()
    first, q = g[:, 0].abs(), torch.tensor(levels, dtype=torch.float64)
    if not bool((g < 0).all() or (g > 0).all()) or not torch.allclose(g.abs(), first[:, None], rtol=1e-4):
        return False
    right, wrong = (q, 1 - q) if bool((g < 0).all()) else (1 - q, q)
    shares = [weights / weights.norm() @ (first / first.norm()) for weights in (right, wrong)]
    return bool(shares[1] > 0.99999 > shares[0] + 0.01)


def _quantiles(module: nn.Module) -> Iterator[tuple[str, list[float]]]:
    parts = [part for part in module.modules() if own_classes(type(part))]  # a loss is often a layer
    given = [pair for part in parts for pair in {**vars(part), **part._buffers}.items()]
    beside = [pair for names in namespaces_of(module) for pair in names.items() if pair[0].isupper()]
    for name, value in (*given, *getattr(module, "hparams", {}).items(), *beside):
        values = value.flatten().tolist() if isinstance(value, Tensor) and 0 < value.numel() <= 99 else value
        values = [values] if isinstance(values, float) else values
        is_list = isinstance(values, list | tuple) and all(isinstance(v, float) and 0 < v < 1 for v in values)
        if QUANTILES.search(name.lower()) and not OF_INTERVAL.search(name) and is_list and values:
            yield name, [*values]


def _keep_gradient(outputs: list[Tensor], found: list[Tensor], loss: Any) -> None:
    """Keep the gradient of the last output that has one."""
    outputs = [output for output in outputs if output.requires_grad]  # not of a target, without gradients
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and outputs:
        gradients = torch.autograd.grad(loss, outputs, allow_unused=True, retain_graph=True)
        found.extend([g for g in gradients if g is not None][-1:])


def _trained_level(gradient: Tensor) -> float | None:
    """The quantile that two gradients, of a sample below and of one above, lead to; None if there are others."""
    up, down = -gradient[gradient < 0], gradient[gradient > 0]
    if not _is_uniform(up) or not _is_uniform(down) or len(up) + len(down) < len(gradient):
        return None
    if not len(up) or not len(down):  # all are on one side, of a mean
        return 1 - float(down[0]) * len(down) if len(down) else float(up[0]) * len(up)
    return float(up[0] / (up[0] + down[0]))


@check("advantage-gradient", "likely", at="probe")
def advantage_gradient(seen: Evidence) -> Lines:
    """A log-probability multiplies data less a value that has a gradient, and the value is also a regression's."""
    terms = terms_of(seen)
    values = {id(behind_moves(parent)) for term in terms.losses for parent in inputs_of(term.node)} if terms else set()
    squared = {id(behind_moves(p)) for term in terms.norms for p in inputs_of(term.node)} if terms else set()
    for node in terms.nodes if terms and (values or squared) else ():
        if name_of(node) != "Mul" or len(factors := [*inputs_of(node)]) != 2:
            continue
        for one, other in (factors, factors[::-1]):
            less = behind_moves(one)
            is_less = name_of(less) in ("Sub", "Rsub") and len(value := [*inputs_of(less)]) == 1
            is_trained = is_less and (id(behind_moves(value[0])) in values or id(less) in squared)
            if is_trained and _is_log_probability(other):
                yield (
                    "the advantage, by which log-probabilities are multiplied, has the gradient of the value, so the "
                    "policy's loss changes the value, too; use advantage.detach()"
                )
                return


def behind_moves(node: Any) -> Any:
    """The operation that computed a value, behind those that only move values."""
    return operation_behind(node) if node is not None and node.name() in MOVES else node


def _is_log_probability(node: Any) -> bool:
    """Whether a value depends on a log_softmax, as of a class, or on a logarithm and a square, as of a normal one."""
    kinds = {name_of(each) for each in nodes_behind(node)}
    return bool(kinds & {"LogSoftmax", "Logsumexp"} or {"Log", "Pow"} <= kinds)


def inputs_of(node: Any) -> Iterator[Any]:
    """The operations that computed the inputs of one."""
    for parent, _ in node.next_functions:
        if parent is not None:
            yield parent


def _is_noise(node: Any) -> bool:
    """Whether a product has a factor of both signs that needs no gradient."""
    if all(parent is not None for parent, _ in node.next_functions):
        return False
    factors = [saved(node, name) for name in ("self", "other")]
    return any(isinstance(t, Tensor) and t.ndim > 1 and bool((t > 0).any()) and bool((t < 0).any()) for t in factors)


@check("clamped-prediction", "likely", at="probe")
def clamped_prediction(seen: Evidence) -> Lines:
    """A clamp before a loss function cuts the gradient of over 20% of its predictions, whose targets are within."""
    terms = terms_of(seen)
    for node, _ in terms.losses if terms else ():
        clamp, t = behind_moves(next(inputs_of(node), None)), saved(node, "target")
        before = saved(clamp, "self") if name_of(clamp) in ("Clamp", "ClampMin", "ClampMax") else None
        if before is None or t is None or t.numel() != before.numel() or not before.is_floating_point():
            continue
        low, high = (saved(clamp, each) for each in ("min", "max"))
        source = clamp.next_functions[0]
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            continue
        if sum(source in each.next_functions for each in terms.nodes) > 1:  # type: ignore[union-attr]
            continue  # something else trains what it cuts
        low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
        before, t = before.flatten(), t.flatten().to(before)
        cut = ((before < low) | (before > high)) & (t > low) & (t < high)
        if len(before) >= FEWEST_VALUES and float(cut.float().mean()) > CUT:
            yield (
                f"clamp({low}, {high}) of predictions gives {float(cut.float().mean()):.0%} of them no gradient, "
                "though their targets are within it; clamp in evaluation only, or use sigmoid()"
            )
            return


@check("penalty-sign", "likely", at="probe")
def entropy_sign(seen: Evidence) -> Lines:
    """The loss of a policy, by log-probabilities of actions, falls as its entropy falls."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    results: dict[str, list[Tensor]] = {"entropy": [], "log_prob": []}
    owners: dict[str, set[int]] = {"entropy": set(), "log_prob": set()}
    found: list[bool] = []

    def differentiate(loss: Any) -> None:
        kept = {name: [t for t in each if t.requires_grad] for name, each in results.items()}
        is_one = owners["entropy"] <= owners["log_prob"]  # else that of other samples, which have no label
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and all(kept.values()) and is_one:
            gradients = {
                name: [
                    g for g in torch.autograd.grad(loss, each, allow_unused=True, retain_graph=True) if g is not None
                ]
                for name, each in kept.items()
            }
            if all(gradients.values()):
                entropies = torch.cat([sign_of(seen) * g.flatten() for g in gradients["entropy"]])
                rewards = torch.cat([g.flatten() for g in gradients["log_prob"]])
                is_constant = float(entropies.max() - entropies.min()) < 1e-6 and not _is_squared(loss)
                is_policy = is_constant and len({*rewards.tolist()}) > 2  # weighted by returns or advantages
                found.append(is_policy and bool((entropies > 0).all()))

    kinds = [each for each in vars(torch.distributions).values() if isinstance(each, type)]
    with ExitStack() as stack:
        for kind in kinds:
            for name in results.keys() & vars(kind).keys():
                stack.enter_context(replaced(kind, name, _kept(getattr(kind, name), results[name], owners[name])))
        probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=differentiate)
    if any(found):
        yield (
            "the loss of the policy falls as its entropy falls, so that it soon takes one action only; a bonus that "
            "keeps it exploring is subtracted: loss - coefficient * entropy"
        )


def _is_squared(loss: Tensor) -> bool:
    """Whether a sum of the loss has a square or a product of two values as a term, as of a target entropy."""
    queue, seen = [loss.grad_fn], set[Any]()
    while queue:
        node = queue.pop()
        if name_of(node) in ("Pow", "Square"):
            return True
        if node is None or node in seen or name_of(node) not in (*SUMS, "Mul", "Neg", "Div", "Mean"):
            continue
        seen.add(node)
        queue.extend(parent for parent, _ in node.next_functions)
    return False


def _kept(method: Any, results: list[Tensor], owners: set[int]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        owners.add(id(self))
        if isinstance(result, Tensor) and len(results) < FEWEST_VALUES:
            results.append(result)
        return result

    return call


@check("policy-sign", "likely", at="probe")
def policy_sign(seen: Evidence) -> Lines:
    """By the loss of a policy, actions become less likely in proportion to what is named as their return or reward."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    names = part_names(probe.batches[kind], getattr(probe.module, kind))
    gains = {n: t.flatten() for n, t in names.items() if GAINS.search(n) and t.is_floating_point()}
    if not gains:
        return
    results: list[Tensor] = []
    found: list[Tensor] = []

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            kept = [t for t in results if t.requires_grad]
            each = torch.autograd.grad(loss, kept, allow_unused=True, retain_graph=True) if kept else ()
            found.extend(g.flatten() for g in each if g is not None)

    kinds = [each for each in vars(torch.distributions).values() if isinstance(each, type)]
    with ExitStack() as stack:
        for each in kinds:
            if method := vars(each).get("log_prob"):
                stack.enter_context(replaced(each, "log_prob", _kept(method, results, set())))
        probe.run(kind, probe.batches[kind], training=True, record=False, then=differentiate)
    terms = terms_of(seen)
    for _, g in terms.logs if terms else ():  # one action of each row
        chosen = g != 0
        if g.ndim > 1 and bool((chosen.sum(-1) <= 1).all()):
            found.append(g.sum(-1).flatten())
    for name, gain in gains.items():
        for g in found:
            if len(g) == len(gain) >= FEWEST_VALUES and _correlation(sign_of(seen) * g, gain) > PROPORTIONAL:
                yield (
                    f"the loss makes actions less likely in proportion to their {name}, so what is best is unlearned; "
                    "the loss of a policy is -(log_prob * advantage), or that of exp(new - old)"
                )
                return


def part_names(batch: Any, step: Any) -> dict[str, Tensor]:
    """The tensors of a mapping, or of a tuple that a step unpacks, by their names."""
    named = batch._asdict() if hasattr(batch, "_asdict") else batch
    if isinstance(named, list | tuple):
        names = unpacked_names(step)
        named = dict(zip(names, named, strict=True)) if len(names) == len(named) else {}
    return {str(n): t for n, t in named.items() if isinstance(t, Tensor)} if isinstance(named, Mapping) else {}


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = (t.double() - t.double().mean() for t in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm() + 1e-30))


@check("unused-part", "likely", at="probe")
def ends_inverted(seen: Evidence) -> Lines:
    """The targets of a regression depend on the next state where an episode has ended, and not where it goes on."""
    ends = _part_of_ends(seen, ENDED.match)
    if ends is not None and any(bool(moved[ends].all()) and not bool(moved[~ends].any()) for moved in _by_next(seen)):
        yield (
            "targets have the value of the next state where an episode has ended, and not where it goes on; write "
            "reward + gamma * (1 - done) * value"
        )


@check("unused-part", "likely", at="probe")
def ends_unread(seen: Evidence) -> Lines:
    """A part of 0 and 1 that a step names _ is not read, and targets have the next state's value where it is 1."""
    ends = _part_of_ends(seen, re.compile("_$").match)
    if ends is not None and 2 * int(ends.sum()) < len(ends) and any(bool(moved.all()) for moved in _by_next(seen)):
        yield (
            f"training_step does not read a part of its batch that is 1 for {int(ends.sum())} of {len(ends)} samples, "
            "as of ends of episodes, and targets have the value of the next state there, too; if it tells ends, write "
            "reward + gamma * (1 - done) * value"
        )


def _part_of_ends(seen: Evidence, is_named: Callable[[str], object]) -> Tensor | None:
    """Where the one part of 0 and 1 with such a name is 1, of a batch with rewards and next states; None if not."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST_VALUES:
        return None
    names = part_names(probe.batches[kind], getattr(probe.module, kind))
    ends = [t.flatten() for n, t in names.items() if is_named(n) and t.numel() == count]
    if len(ends) != 1 or not any(NEXT.search(n) for n in names) or {*ends[0].tolist()} != {0, 1}:
        return None
    return ends[0] != 0


def _by_next(seen: Evidence) -> Iterator[Tensor]:
    """For each regression of a step: which of its targets (N,) change with the next state."""
    probe, kind = seen.probe, "training_step"
    assert probe is not None
    names, leaves = part_names(probe.batches[kind], getattr(probe.module, kind)), flatten(probe.batches[kind])
    following = next(t for n, t in names.items() if NEXT.search(n))
    new = following.clone().float().flip(0).to(following)
    batch = with_tensors(probe.batches[kind], [new if x is following else x for x in leaves if isinstance(x, Tensor)])
    other = probe.run(kind, batch, training=False, record=False)
    for a, b in zip(probe.base(kind, training=False).calls, other.calls, strict=False):
        if a.kind in REGRESSIONS and a.target.numel() == b.target.numel() == probe.size(kind):
            same = (following == new).flatten(1).all(1)
            yield ((a.target - b.target).flatten().abs() > 1e-6) | same
