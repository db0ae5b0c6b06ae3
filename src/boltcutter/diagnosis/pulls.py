"""Probes of each term that is added to the loss: what it makes of the outputs of a layer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.calls import CLASSES
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import MOVES, name_of, nodes_behind
from boltcutter.diagnosis.probe import Probe
from boltcutter.diagnosis.sequences import paddings
from boltcutter.diagnosis.signs import part_names, sign_of
from boltcutter.structure import flatten

SUMS = frozenset(("Add", "Sub", "Rsub", "Neg", "Mean", "Sum"))
SCALES = frozenset(("Mul", "Div"))
SUM = 2  # a reduction, as nodes of losses save it
MOST = 64  # addends
FEWEST = 32  # elements with a gradient
AGREE = 0.99  # share of these
FEW = 0.05  # share of these, of each side
EQUAL = 0.9999  # cosine
RANKED = 0.8  # correlation
SPREAD = 0.2  # of a ratio that is the same for all weights
WITHIN = 2.5  # times
MANY_BATCHES = 8
OCCURRED = re.compile(r"(^|_)(events?|e|delta|status|dead|died|deaths?|observed|failed|is_event)($|_)", re.IGNORECASE)
TIMES = re.compile(r"(^|_)(times?|durations?|survival|tte|follow_?up|t)($|_)", re.IGNORECASE)


class Pull(NamedTuple):
    """What one addend of the loss contributes to the gradient of an output.

    Args:
        output: Of a layer, shape (N, …).
        gradient: Of the addend, as it enters the loss, by the output.
        kind: Name of the operation that computed the addend.
        place: Of the output among those of all layers.
    """

    output: Tensor
    gradient: Tensor
    kind: str
    place: int


class Nearest(TorchFunctionMode):
    """Counts the outputs of layers that there are before the nearest of several values is chosen.

    Args:
        outputs: Of layers, so far.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self.outputs, self.count = outputs, 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count at an argmin."""
        if getattr(function, "__name__", "") == "argmin" and args and not self.count:
            self.count = len(self.outputs) if isinstance(args[0], Tensor) and args[0].ndim > 1 else 0
        return function(*args, **(kwargs or {}))


def pulls_of(seen: Evidence) -> list[list[Pull]]:
    """Of each addend of the loss, those by the outputs of layers; empty if the module differentiates itself."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return []
    if probe.pulls is not None:
        return probe.pulls
    outputs: list[Tensor] = []

    def keep(part: nn.Module, given: Any, output: Any) -> None:
        outputs.extend(t for t in tensors_of(output) if t.requires_grad and t.ndim and len(outputs) < 4 * MOST)

    probe.pulls = found = list[list[Pull]]()
    hooks = [m.register_forward_hook(keep) for m in probe.module.modules() if m is not probe.module]
    try:
        then = partial(_differentiate, probe, outputs, found)
        with Nearest(outputs) as nearest:
            probe.run(kind, probe.batches[kind], training=True, record=False, then=then)
        probe.before_nearest = nearest.count
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _differentiate(probe: Probe, outputs: list[Tensor], found: list[list[Pull]], loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
        return
    outputs = [*outputs]  # without those that checkpoints compute again
    detached = {id(t): t.detach() for t in outputs}
    edges = [*terms_behind(GradientEdge(loss.grad_fn, loss.output_nr))]
    for edge in edges if len(edges) <= MOST else ():
        try:
            whole = torch.autograd.grad(loss, [edge], retain_graph=True, allow_unused=True)
            each = torch.autograd.grad([edge], outputs, whole, retain_graph=True, allow_unused=True)
        except RuntimeError:  # of reentrant checkpoints
            found.clear()
            return
        pairs = enumerate(zip(outputs, each, strict=True))
        kind = name_of(edge.node)
        found.append([Pull(detached[id(t)], g.detach(), kind, i) for i, (t, g) in pairs if g is not None])
        if found[-1]:
            rows = outputs[0].shape[0] if getattr(edge.node, "_saved_reduction", None) == SUM else 1
            probe.weight_of_samples = max(probe.weight_of_samples, abs(float(whole[0].sum())) * rows)
        else:
            _add_gradients(probe, edge, whole)


def _add_gradients(probe: Probe, edge: Any, whole: Any) -> None:
    """Add those of a term that no output of a layer is in, by the weights."""
    weights = {name: p for name, p in probe.module.named_parameters() if p.requires_grad}
    each = torch.autograd.grad([edge], [*weights.values()], whole, retain_graph=True, allow_unused=True)
    for name, g in zip(weights, each, strict=True):
        if g is not None:
            probe.of_weights[name] = probe.of_weights[name] + g.detach() if name in probe.of_weights else g.detach()


def terms_behind(edge: Any) -> Iterator[Any]:
    """The terms that sums, means and factors without gradient make a loss of, each used only once."""
    uses = Counter((parent, number) for node in nodes_behind(edge.node) for parent, number in node.next_functions)
    queue = [edge]
    while queue:
        edge = queue.pop()
        parents = [GradientEdge(node, number) for node, number in edge.node.next_functions if node is not None]
        is_scaled = name_of(edge.node) in SCALES and len(parents) == 1
        is_passed = name_of(edge.node) in SUMS or is_scaled or edge.node.name() in MOVES
        if is_passed and parents and all(uses[p.node, p.output_nr] == 1 for p in parents):
            queue.extend(parents)
        else:
            yield edge


@check("loss-maximized", "likely", at="probe")
def learns_the_reverse(seen: Evidence) -> Lines:
    """A term of the loss moves each output away from its target in the batch, where that is wrong and where not."""
    if any(not p.requires_grad for p in seen.module.parameters()) or seen.probe is None:
        return  # an attack on a frozen network
    pulls, parts = pulls_of(seen), tensors_of(seen.probe.batches.get("training_step"))
    for i, found in enumerate(pulls):
        for output, gradient, *_ in found:
            for target in parts:
                goal = _goal(output, target)
                if goal is None or not _is_reverse(sign_of(seen) * gradient, goal, output):
                    continue
                others = [p for j, each in enumerate(pulls) if j != i for p in each if p.output is output]
                gradient = sign_of(seen) * gradient
                goals = [_goal(output, part) for part in parts if part is not target]
                if any(g is not None and _is_reverse(-gradient, g, output) for g in goals):
                    continue  # the opposite of another part, as censored and observed
                is_mask = len(pulls) == 1 and output.ndim > 2 and output.shape == target.shape
                if is_mask or any(_is_reverse(-sign_of(seen) * p.gradient, goal, output) for p in others):
                    yield (
                        f"a term of the loss trains an output of {tuple(output.shape)} for the reverse of its targets, "
                        f"{tuple(target.shape)}: it falls as predictions get worse; correct its sign, as of 1 - score "
                        "for a score that is higher for better ones"
                    )
                    return


def _goal(output: Tensor, target: Tensor) -> Tensor | None:
    """1 where an output should grow by a target of classes or labels, and -1 elsewhere; None if they do not fit."""
    if target.is_complex() or target.numel() < 4:
        return None
    if output.numel() == target.numel() and len(output) == len(target):
        is_binary = bool(((target == 0) | (target == 1)).all())
        return (2.0 * target.reshape(output.shape) - 1).to(output) if is_binary else None
    if target.is_floating_point() or output.ndim < 2 or output.shape[:1] + output.shape[2:] != target.shape:
        return None
    count = output.shape[1]
    if target.dtype == torch.bool or int(target.min()) < 0 or int(target.max()) >= count or count < 2:
        return None
    return 2.0 * nn.functional.one_hot(target.long(), count).movedim(-1, 1).to(output) - 1


def _is_reverse(gradient: Tensor, goal: Tensor, output: Tensor) -> bool:
    """Whether descent moves outputs, which are no distances, away from what they should be, also wrong ones."""
    if gradient.shape != goal.shape:
        return False
    moved = gradient != 0
    g, to, p = gradient[moved], goal[moved], output[moved]
    if (
        float(output.min()) >= 0
        or len(g) < FEWEST
        or float((to > 0).float().mean()) < FEW / 5
        or float((to < 0).float().mean()) < FEW
    ):
        return False
    away = (g * to > 0).float()
    centered = p - p.mean()
    wrong = centered * to < 0
    if not FEW < float(wrong.float().mean()) < 1 - FEW:
        return False
    sides = [away[chosen].mean() for chosen in (wrong, ~wrong, to > 0, to < 0)]
    return bool(min(sides) > AGREE)


@check("penalty-sign", "likely", at="probe")
def entropy_by_hand(seen: Evidence) -> Lines:
    """A term of a policy's loss falls as the entropy of its actions falls, which is computed of logits."""
    pulls = pulls_of(seen)
    for i, found in enumerate(pulls):
        actions = [p.output for each in pulls[:i] + pulls[i + 1 :] for p in each if _weighs_actions(p)]
        if any(_lowers_entropy(seen, p) and any(torch.equal(p.output, a) for a in actions) for p in found):
            yield Line(
                "the loss of the policy falls as its entropy falls, so that it soon takes one action only; a bonus "
                "that keeps it exploring is subtracted: loss - coefficient * entropy"
            )
            return


def _weighs_actions(pull: Pull) -> bool:
    """Whether a gradient by logits is that of one action of each row, times weights that differ."""
    if pull.output.ndim < 2:
        return False
    logits, g = (t.flatten(0, -2).double() for t in pull[:2])
    if not 2 < logits.shape[1] <= 1000 or len(logits) < FEWEST // 2:
        return False
    p = logits.softmax(1)
    ratios = g / p
    weights = ratios.median(1).values
    others = (ratios - weights[:, None]).abs() <= 1e-3 * weights.abs()[:, None] + 1e-12
    is_one = bool(((~others).sum(1) <= 1).all()) and bool((g.sum(1).abs() <= 1e-4 * g.abs().sum(1) + 1e-12).all())
    return is_one and len({*weights.tolist()}) > 2 and bool((weights > 0).any()) and bool((weights < 0).any())


def _lowers_entropy(seen: Evidence, pull: Pull) -> bool:
    if pull.output.ndim < 2 or pull.output.shape[-1] < 2 or pull.kind != "Mul":  # no distance from a target entropy
        return False
    with torch.enable_grad():
        logits = pull.output.detach().double().requires_grad_()
        log_p = logits.log_softmax(-1)
        (slope,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), logits)
    g = sign_of(seen) * pull.gradient.double()
    return float((g * slope).sum()) > EQUAL * float(g.norm() * slope.norm()) > 0


@check("risk-sets", "likely", at="probe")
def reversed_risk(seen: Evidence) -> Lines:
    """By the loss of a survival model, samples without an event are pushed down the more, the earlier they are lost."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    names = part_names(probe.batches[kind], getattr(probe.module, kind))
    ends = [t.flatten() for n, t in names.items() if TIMES.search(n)]
    events = [t.flatten() for n, t in names.items() if OCCURRED.search(n)]
    if len(ends) != 1 or len(events) != 1 or not bool(((events[0] == 0) | (events[0] == 1)).all()):
        return
    time, lost = ends[0].double(), events[0] == 0
    for output, gradient, *_ in (pull for found in pulls_of(seen) for pull in found):
        g = sign_of(seen) * gradient.flatten().double()
        if output.numel() != len(time) or len(lost) != len(time) or int(lost.sum()) < FEWEST // 4:
            continue
        ranks = torch.stack([t[lost].argsort().argsort().double() for t in (time, g)])
        is_risk = float(g[lost].min()) >= -1e-9 < float(g[lost].max()) and float(g[~lost].sum()) < 0
        if is_risk and len(torch.unique(g[lost])) > FEWEST // 8 and float(torch.corrcoef(ranks)[0, 1]) < -RANKED:
            yield (
                "in the loss of the survival model, who is lost early counts among those at risk at later events, and "
                "who is seen for long does not; the risk set of an event has the times that are not less: "
                "time[None, :] >= time[:, None]"
            )
            return


@check("padding-in-loss", "likely", at="probe")
def trains_padding(seen: Evidence) -> Lines:
    """Cross-entropy trains outputs behind the end of samples, by a mask or lengths of the batch, for a single class."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not pulls_of(seen):
        return
    count = probe.size(kind)
    for valid in [each.valid for each in paddings(flatten(probe.batches[kind]), count)] if count else ():
        for call in probe.base(kind).calls:
            t = call.target
            if call.kind not in CLASSES or t.is_floating_point() or t.numel() != valid.numel():
                continue
            kinds = [torch.unique(t.reshape(valid.shape)[where]) for where in (~valid, valid)]
            if len(kinds[0]) > 1 or len(kinds[1]) < 2 or int(kinds[0][0]) == call.options.get("ignore_index"):
                continue
            share = float((~valid).float().mean())
            if share > FEW and any(_reaches(pull, call.prediction, ~valid) for each in pulls_of(seen) for pull in each):
                yield (
                    f"{share:.0%} of the outputs that cross-entropy trains are behind the end of their sample, where "
                    f"all targets are {int(kinds[0][0])}: padding counts as a class; pad targets with -100, which it "
                    "ignores, or average over what is no padding"
                )
                return


def _reaches(pull: Pull, prediction: Tensor, places: Tensor) -> bool:
    """Whether predictions at some places (N, T) get a gradient: those of an output (N, T, C) or (N, C, T)."""
    g = pull.gradient
    if g.numel() != prediction.numel() or g.ndim not in (2, 3) or g.numel() % places.numel():
        return False
    if g.ndim == 3 and g.shape[:2] != places.shape:
        g = g.transpose(1, 2)
    g = g.reshape(*places.shape, -1) if g.ndim == 2 else g
    return g.shape[:2] == places.shape and bool(g[places].any(-1).all())


@check("cut-gradient", "likely", at="probe")
def nearest_cuts(seen: Evidence) -> Lines:
    """What is computed of the nearest of several vectors gives no gradient to what was compared, another term does."""
    pulls = pulls_of(seen)
    count = seen.probe.before_nearest if seen.probe else 0
    if not count or len(pulls) < 2:
        return
    later = [{p.place for p in found if p.place >= count} for found in pulls]
    earlier = [{p.place for p in found if p.place < count} for found in pulls]
    last = max((place for places in later for place in places), default=-1)  # of a decoder
    is_cut = [last in a and not b for a, b in zip(later, earlier, strict=True)]
    parts = [t for t in tensors_of(seen.probe.batches["training_step"]) if t.is_floating_point()]  # type: ignore[union-attr]
    decoded = next((p.output for found in pulls for p in found if p.place == last), None)
    if decoded is None or not any(t.numel() == decoded.numel() for t in parts):
        return  # a probe of the codes
    if any(is_cut) and any(b and not a for a, b in zip(later, earlier, strict=True)):
        yield (
            "a term of the loss is computed of the nearest vectors of a codebook, and has no gradient for the layers "
            "before it, which only another term trains; pass the gradient on: z + (nearest - z).detach()"
        )


@check("divergence-weight", "likely", at="probe")
def divergence_of_weights(seen: Evidence) -> Lines:
    """Beside a mean over samples, a Bayesian network's divergence is divided by nothing, the batch, or the batches."""
    probe, kind = seen.probe, "training_step"
    batches = getattr(seen.trainer, "num_training_batches", 0)
    if probe is None or kind not in probe.batches or not MANY_BATCHES <= batches < math.inf:
        return
    pulls_of(seen)
    rows, factors = probe.size(kind), _factors_of_divergence(probe)
    if rows < MANY_BATCHES or not factors or not probe.weight_of_samples:
        return
    share = sorted(factors)[len(factors) // 2] / probe.weight_of_samples
    wrong = {1.0: "not divided", 1 / rows: f"divided by the {rows} samples of a batch"}
    wrong[1 / batches] = f"divided by the {batches} batches of an epoch"
    nearest = min(wrong, key=lambda factor: abs(math.log(share / factor)))
    if nearest / WITHIN < share < nearest * WITHIN:
        yield (
            f"the divergence of the weights from their prior is {wrong[nearest]}, beside the mean loss of samples, so "
            f"it counts about {nearest * rows * batches:.0f} times too much; divide it by the number of training "
            f"samples, about {rows * batches}"
        )


def _factors_of_divergence(probe: Probe) -> list[float]:
    """Of each tensor of deviations of weights, the factor of its divergence in the loss, by its gradient.

    The gradient of -log(deviation) by it is -1 / deviation, beside which that of the prior is small.
    """
    found, weights = list[float](), dict(probe.module.named_parameters())
    for name, g in probe.of_weights.items():
        p, owner = weights[name].detach().double(), name.rpartition(".")[0]
        others = [n for n in probe.of_weights if n != name and n.rpartition(".")[0] == owner]
        if not any(_is_pulled_to_zero(weights[n], probe.of_weights[n], p.shape) for n in others):
            continue
        # Of the deviation as softplus(p) and as exp(p), or exp(p / 2).
        for ratios in (-g.double() * F.softplus(p) / p.sigmoid(), -g.double()):
            factor = float(ratios.mean())
            if factor > 0 and float(ratios.std(unbiased=False)) < SPREAD * factor:
                found.append(factor)
                break
    return found


def _is_pulled_to_zero(p: Tensor, gradient: Tensor, shape: torch.Size) -> bool:
    pair = torch.stack([p.detach().flatten(), gradient.flatten()])
    return p.shape == shape and p.numel() > 2 and float(torch.corrcoef(pair)[0, 1]) > RANKED
