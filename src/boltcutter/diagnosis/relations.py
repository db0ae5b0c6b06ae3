"""Probes of what must fit: predictions and metrics, inputs and targets, samples and labels, two networks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from boltcutter.diagnosis.calls import CLASSES, has_values
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS, leaves_of, name_of, nodes_behind, saved
from boltcutter.diagnosis.probe import Probe, Trace, rows_that_differ, seeded, take
from boltcutter.diagnosis.samples import is_comparable
from boltcutter.diagnosis.source import codes_of_users, functions_of, says
from boltcutter.diagnosis.statements import called_name
from boltcutter.diagnosis.targets import replaced
from boltcutter.internals import BatchNorm
from boltcutter.structure import flatten

FEWEST = 8  # samples
MANY = 256  # values, whose correlation by chance is small
UNRELATED = 0.1  # correlation
SEEDS = 3
PARTNERS = (0.05, 0.9)  # share of samples whose prediction depends on another one
WEIGHT = 0.5  # of the other sample, relative to its own
FLAT = 1e-3  # slope of a gradient, relative to it
REVERSES = re.compile(r"rev(erse|ersal)?_?(grad|layer)|grad(ient)?s?_?(rever|flip|inver)|^grl|GRL", re.IGNORECASE)
PROJECTS = re.compile(r"project|sketch|random_feature|hash|perturb", re.IGNORECASE)
FEW = 0.05  # share of values
AGREE = 0.9  # share of the values that are seen
OPPOSITE = 0.9  # share of samples
CLEAR = 0.2  # from one half
SAME = 0.5  # difference of scores at which two gradients are 0
AUGMENTS = re.compile(r"augment|jitter|dequant|eras(e|ing)", re.IGNORECASE)
KEEPS_LABELS = re.compile(r"background|noise|mix_?style|style|interfer|distract|augment_?mix|augmix", re.IGNORECASE)


@check("noisy-target", "likely", at="probe")
def noisy_target(seen: Evidence) -> Lines:
    """A layer gets a part of the batch with noise or gaps, and the target of the loss is the same values."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or says(seen.module, AUGMENTS):
        return
    base, parts = probe.base("training_step"), tensors_of(probe.batches["training_step"])
    inputs = [(name, t) for name, t in base.tensors if name.startswith("the input of ")]
    for call in (c for c in base.calls if c.kind in REGRESSIONS or c.kind.startswith("binary_cross_entropy")):
        t = call.target.flatten().float()
        clean = [p.flatten().float() for p in parts if p.numel() == t.numel() >= MANY and p.is_floating_point()]
        if not clean or any(torch.equal(p, t) for p in clean):
            continue
        layer = next((name for name, u in inputs if has_values(u, call.target)), None)
        for p in clean if layer else ():
            rest = t - p
            changed = rest != 0
            is_hidden = 0.05 < float(changed.float().mean()) < 0.95 and not bool(t[changed].any())
            is_noise = float(rest.std()) > 0.05 * float(p.std()) and _correlation(rest, p) < UNRELATED
            is_noise &= _correlation(rest[1:], rest[:-1]) < UNRELATED and float(changed.float().mean()) > 0.9
            if is_hidden or is_noise:
                yield (
                    f"the target of {call.kind} is {layer}, with its {'gaps' if is_hidden else 'noise'}, so that the "
                    "network learns to return what it gets; compare its output with the values before"
                )
                return


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    return abs(float((a * b).mean() / (a.std() * b.std() + 1e-12)))


@check("mixed-labels", "likely", at="probe")
def mixed_labels(seen: Evidence) -> Lines:
    """In training only, predictions depend on another sample as well, and no loss function gets its label for them."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST:
        return
    base = probe.base(kind)
    labels = [c.target for c in base.calls if c.kind in CLASSES and c.target.shape == (count,)]
    if not labels or labels[0].is_floating_point() or not is_comparable(probe, kind) or says(seen.module, KEEPS_LABELS):
        return
    rows = torch.arange(count)
    for i in range(0, count, 4):
        others = (labels[0] != labels[0][i]).nonzero().flatten().cpu()
        rows[i] = others[(others >= i).long().argmax()] if len(others) else i
    altered, own = take(probe.batches[kind], rows), rows != torch.arange(count)
    with _without_statistics(probe):
        share = max(_share_of_others(probe, altered, own, seed) for seed in range(SEEDS if _draws(base) else 1))
    if share > WEIGHT:
        yield (
            "in training, inputs are mixed with those of other samples, but the loss has only the labels of one of "
            "them; weigh the loss of both labels, as lam * loss(y) + (1 - lam) * loss(y[order])"
        )


@contextmanager
def _without_statistics(probe: Probe) -> Iterator[None]:
    """BatchNorm does not mix samples."""
    modes = {**probe.modes}
    probe.modes.update(dict.fromkeys((m for m in probe.module.modules() if isinstance(m, BatchNorm)), False))
    try:
        yield
    finally:
        probe.modes.update(modes)


def _draws(base: Trace) -> bool:
    """Whether a pass with seed 0 has drawn random numbers."""
    with seeded(0):
        return base.random is None or not torch.equal(base.random, torch.get_rng_state())


def _share_of_others(probe: Probe, altered: Any, own: Tensor, seed: int) -> float:
    """How much predictions depend on another sample whose label they do not get, relative to their own; else 0."""
    kind, has_norms = "training_step", any(isinstance(m, BatchNorm) for m in probe.module.modules())
    if seed or has_norms:
        one = probe.run(kind, probe.batches[kind], training=True, seed=seed, record=False)
    else:
        one = probe.base(kind)
    other = probe.run(kind, altered, training=True, seed=seed, record=False)
    found = 0.0
    for a, b in zip(one.calls, other.calls, strict=False):
        if a.target.shape == b.target.shape and a.target.shape[:1] == own.shape:
            moved = (a.target != b.target).reshape(len(own), -1).any(1).cpu()
            if bool(moved[~own].any()):
                return 0.0  # it gets the labels of the others, too
    for a, b in zip(one.calls, other.calls, strict=False):
        p, q = a.prediction, b.prediction
        if a.kind not in CLASSES or p.shape != q.shape or p.ndim != 2 or len(p) != len(own):
            continue
        changed = rows_that_differ(p, q).cpu()
        share = float(changed[~own].float().mean())
        if PARTNERS[0] <= share <= PARTNERS[1]:
            sizes = (p - q).norm(dim=1).cpu()
            found = max(found, float(sizes[changed & ~own].mean() / (sizes[own].mean() + 1e-12)))
    return found


@dataclass(eq=False)
class Output:
    """What a network returned in one pass of a step.

    Args:
        name: Of the network.
        value: Its output; kept, so that its memory is not used again.
        given: Memory of its inputs.
        has_gradient: Whether an input was computed of what has a gradient.
        is_enabled: Whether gradients were.
        gradients: Of the loss, by the output.
    """

    name: str
    value: Tensor
    given: list[int]
    has_gradient: bool
    is_enabled: bool = True
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def sign(self) -> int:
        """Of the gradients of all samples of the first backward pass; 0 if they differ."""
        signs = self.gradients[0].sign() if self.gradients else torch.zeros(1)
        return int(signs.flatten()[0]) if bool((signs == signs.flatten()[0]).all()) else 0


def _outputs_of_networks(seen: Evidence) -> list[Output]:
    """Outputs of the networks of a module with two optimizers or more, in one pass of its training step."""
    probe = seen.probe
    outputs: list[Output] = []
    if probe is None or "training_step" not in probe.batches or probe.module.automatic_optimization:
        return outputs
    if len(seen.optimizers) < 2:
        return outputs

    def look(name: str) -> Any:
        def hook(part: nn.Module, args: Any, value: Any) -> None:
            if isinstance(value, Tensor) and len(outputs) < MANY:
                inputs = tensors_of(args)
                memory = [t.untyped_storage().data_ptr() for t in inputs]
                has_gradient = any(t.grad_fn is not None for t in inputs)
                output = Output(name, value, memory, has_gradient, torch.is_grad_enabled())
                if value.requires_grad:
                    value.register_hook(lambda g: output.gradients.append(g.detach()))  # type: ignore[no-untyped-call]
                outputs.append(output)

        return hook

    networks = [(n, m) for n, m in probe.module.named_children() if any(True for _ in m.parameters())]
    handles = [m.register_forward_hook(look(n)) for n, m in networks]
    try:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@check("adversaries-agree", "likely", at="probe")
def adversaries_agree(seen: Evidence) -> Lines:
    """A network is trained to move the scores of its samples as the network that gives them is, and not the reverse."""
    outputs = _outputs_of_networks(seen)
    for name in dict.fromkeys(o.name for o in outputs):
        made = {o.name: {p.value.untyped_storage().data_ptr() for p in outputs if p.name == o.name} for o in outputs}
        for other in made.keys() - {name}:
            calls = [o for o in outputs if o.name == name]
            of_other = [o for o in calls if made[other] & {*o.given}]
            real = {o.sign for o in calls if o not in of_other and not o.has_gradient}
            fake = {o.sign for o in of_other if not o.has_gradient}
            raised = {o.sign for o in of_other if o.has_gradient and not (made[name] & {*o.given})}
            if len(real | fake) > 1 and _is_only_detached(of_other):
                yield Line(
                    f"{name} gets what {other} returns only without its gradient, also in the loss that should train "
                    f"{other} against it, so {other} does not learn of it; give {name} there what is not detached",
                    subject="detached",
                )
                return
            is_same = len(fake) == len(raised) == 1 and fake == raised and fake != {0} and real == {-next(iter(fake))}
            zeros = (
                [_zero([o for o in of_other if o.has_gradient == each]) for each in (False, True)] if is_same else []
            )
            if is_same and (
                zeros[0] == zeros[1] or abs(zeros[0] - zeros[1]) < SAME
            ):  # of least squares, targets differ
                yield Line(
                    f"{other} is trained to move the output of {name} as {name} itself is for generated samples, and "
                    "not as for real ones, so they do not compete; give the generator's loss the labels of real "
                    "samples, or the opposite sign"
                )
                return


@check("adversaries-agree", "likely", at="probe")
def passed_on_as_it_is(seen: Evidence) -> Lines:
    """An operation of the loss that is named after a reversal of gradients multiplies them by a positive number."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    progress = probe.trainer.fit_loop.epoch_progress.current
    epoch = progress.completed
    factors: dict[str, float] = {}
    try:
        for later in (0, max(1, (probe.trainer.max_epochs or 2) // 2)):  # the factor often begins at 0
            progress.completed = epoch + later
            probe.run(kind, probe.batches[kind], training=True, record=False, then=partial(_add_factors, factors))
            if not factors or any(factors.values()):
                break
    finally:
        progress.completed = epoch
    for name, factor in factors.items():
        if factor > 0:
            yield (
                f"{name} passes gradients on with a positive factor, {factor:.3g}, and does not reverse them, so that "
                "both networks are trained for the same; return -factor * gradient"
            )
            return


def _add_factors(factors: dict[str, float], loss: Any) -> None:
    """Add what operations that reverse gradients, by their names, multiply them by; 0 if it is no single number."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return
    for node in nodes_behind(loss.grad_fn):
        name = node.name().removesuffix("Backward")
        shapes = [each.shape for each in getattr(node, "_input_metadata", [])]
        if not REVERSES.search(name) or len(shapes) != 1:
            continue
        given = torch.randn(shapes[0], device=loss.device).abs() + 1
        try:
            found = node.apply(given)
        except Exception:  # of the user's code
            return
        result = next((g for g in (found if isinstance(found, tuple) else (found,)) if isinstance(g, Tensor)), None)
        if result is None or result.shape != given.shape:
            return
        ratio = result.detach() / given
        is_one = float((ratio - ratio.mean()).abs().max()) <= 1e-4 * float(ratio.abs().max())
        factors[name] = float(ratio.mean()) if is_one else 0.0


def _is_only_detached(found: list[Output]) -> bool:
    """Whether scores of another network's outputs are used twice, in opposed losses, but never with its gradient."""
    used = [o for o in found if o.is_enabled and (o.gradients or not o.value.requires_grad)]
    is_opposed = {-1, 1} <= {o.sign for o in used} or len({o.value.requires_grad for o in used}) == 2
    return is_opposed and not any(o.has_gradient for o in found)


def _zero(found: list[Output]) -> float:
    """The score at which the gradient is 0, if it is a line as of least squares; infinity for a constant one."""
    x, g = (t.detach().flatten().cpu().double() for t in (found[0].value, found[0].gradients[0]))
    slope = float(((x - x.mean()) * (g - g.mean())).sum() / ((x - x.mean()).square().sum() + 1e-12))
    return math.inf if abs(slope) < FLAT * float(g.abs().mean()) else float(x.mean() - g.mean() / slope)


def _line_of(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Slope and offset of the line on which values lie exactly; None if they lie on none, or are too few."""
    x, y = x.flatten().double(), y.flatten().double()
    if len(x) != len(y) or len(x) < FEWEST or not float(x.std()) > 0:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    offset = float(y.mean()) - slope * float(x.mean())
    scale = float(y.abs().max()) + 1e-12
    return (slope, offset) if float((slope * x + offset - y).abs().max()) < 1e-4 * scale and slope else None


@check("visible-targets", "likely", at="probe")
def visible_targets(seen: Evidence) -> Lines:
    """Inputs are masked in part, and the loss has a gradient only where a layer still gets its targets."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    base = probe.base(kind)
    if not _draws(base):
        return  # what is hidden may be held out
    for call in (c for c in base.calls if c.kind == "cross_entropy" and c.target.ndim == 1):
        known = call.target != call.options["ignore_index"]
        for t in (t for n, t in base.tensors if n.startswith("the input of ") and t.numel() == len(known) >= MANY):
            same = t.flatten() == call.target
            if bool(same.all()):
                continue  # the targets themselves, as a layer of the loss gets them
            is_masked = not t.is_floating_point() and bool(same[known].all()) and FEW < float(known.float().mean()) < 1
            clean = [
                p.flatten() for p in tensors_of(probe.batches[kind]) if p.numel() == len(known) and p.dtype == t.dtype
            ]
            hidden = next((p != t.flatten() for p in clean if torch.equal(p[known], call.target[known])), None)
            if is_masked and hidden is not None and bool(hidden.any()) and bool((hidden == ~known).all()):
                yield VISIBLE
                return
    for name, t in base.tensors:
        x = next((p for p in tensors_of(probe.batches[kind]) if p.numel() == t.numel() >= MANY), None)
        if not name.startswith("the input of ") or x is None or not t.is_floating_point() or not x.is_floating_point():
            continue
        given, own = t.flatten(), x.flatten()
        hidden, shown = (own != 0) & (given == 0), (own != 0) & (given == own)
        if not FEW < float(hidden.sum() / (own != 0).sum()) < 1 - FEW or bool((given != own)[~hidden].any()):
            continue
        other = dict(probe.run(kind, probe.batches[kind], training=True, seed=1).tensors).get(name)
        if other is not None and other.shape == t.shape and torch.equal(other == 0, t == 0):
            continue  # a mask of padding, which nobody draws
        gradients: list[Tensor] = []
        probe.run(kind, probe.batches[kind], training=True, record=False, then=partial(_by_output, probe, x, gradients))
        for gradient in gradients:
            chosen = gradient.flatten() != 0
            if not bool(chosen[hidden].any()) and float(chosen[shown].float().mean()) > 0.9:
                yield VISIBLE
        return


@check("visible-targets", "likely", at="probe")
def most_are_visible(seen: Evidence) -> Lines:
    """A few tokens are replaced by one at random, and cross-entropy also has all the others, which the input shows."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    base = probe.base(kind)
    if not _draws(base) or not says(seen.module, MASKING):
        return
    for call in (c for c in base.calls if c.kind == "cross_entropy" and c.target.numel() >= MANY):
        target = call.target.flatten()
        if bool((target == call.options["ignore_index"]).any()):
            continue
        given = [t.flatten() for n, t in base.tensors if n.startswith("the input of ") and t.numel() == len(target)]
        if any(float((t[1:] == target[:-1]).float().mean()) > AGREE - FEW for t in given):
            continue  # a decoder writes them all, each after the last one
        for t in (t for n, t in base.tensors if n.startswith("the input of ") and t.numel() == len(target)):
            hidden = t.flatten() != target
            filled = t.flatten()[hidden]
            if t.is_floating_point() or not FEW < float(hidden.float().mean()) < MASKED:
                continue
            if bool((filled == filled[0]).all()) and not bool((target == filled[0]).any()):
                yield (
                    f"{1 - float(hidden.float().mean()):.0%} of the targets of cross-entropy are tokens that the input "
                    "shows at the same place, so loss and metrics are of copies; set targets that are not masked to "
                    "-100, which it ignores"
                )
                return


@check("visible-targets", "likely", at="probe")
def loss_of_seen(seen: Evidence) -> Lines:
    """Predictions depend on a part of each sample only, drawn at random, and the loss compares only these values."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    parts = flatten(probe.batches[kind])
    for j, part in enumerate(parts if _draws(probe.base(kind)) else ()):
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.ndim < 2 or part.numel() < MANY:
            continue
        leaf = part.detach().clone().requires_grad_()
        found: list[tuple[Tensor, Tensor]] = []
        with torch.enable_grad():
            batch = replaced(probe, kind, {j: leaf * 1})
        for seed in (0, 1):
            then = partial(_reach, probe, leaf, found)
            probe.run(kind, batch, training=True, copies=False, record=False, seed=seed, then=then)
        if len(found) == 2 and torch.equal(found[0][0], found[1][0]):
            continue  # a mask of padding, which nobody draws
        for shown, compared in found:
            is_part = FEW < float(shown.float().mean()) < 1 - FEW and bool(compared.any())
            if is_part and bool(shown[compared].all()) and float(compared[shown].float().mean()) > AGREE:
                yield VISIBLE
                return


def _reach(probe: Probe, leaf: Tensor, found: list[tuple[Tensor, Tensor]], loss: Any) -> None:
    """Of differences of predictions from a part of the batch: values of it on which these depend, and are compared."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
        return
    trained = {id(p) for p in probe.module.parameters() if p.requires_grad}
    for node in nodes_behind(loss.grad_fn):
        sides = [GradientEdge(*side) for side in node.next_functions if side[0] is not None]
        if name_of(node) not in ("Sub", "Rsub", "MseLoss", "L1Loss", "SmoothL1Loss") or len(sides) != 2:
            continue
        of_weights = [bool(leaves_of(side.node) & trained) for side in sides]
        if of_weights.count(True) != 1:
            continue
        prediction, target = sides if of_weights[0] else sides[::-1]
        grad = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
        (gradient,) = grad(loss, [prediction])
        if gradient is None:
            continue
        try:
            (given,) = grad([prediction], [leaf], [torch.randn_like(gradient)])
            (own,) = grad([target], [leaf], [(gradient != 0).to(gradient)])
        except RuntimeError:  # of sides of other shapes, which are broadcast
            continue
        if given is not None and own is not None:
            is_cropped = gradient.numel() < leaf.numel() and all(map(_is_box, given != 0))
            found.extend([] if is_cropped else [(given != 0, own != 0)])
        return


def _is_box(chosen: Tensor) -> bool:
    """Whether values are chosen of a range of each dimension, and all of these."""
    places = chosen.nonzero()
    return bool(len(places)) and int((places.amax(0) - places.amin(0) + 1).prod()) == len(places)


OF_TRAINING = ("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end")
OF_VALIDATION = (
    *("validation_step", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_epoch_end", "on_validation_end"),
)
OF_EPOCHS = re.compile(r"epoch|step|time|rand")
MASKING = re.compile(r"mask_(id|idx|index|token|prob|ratio|rate)|mlm|masked_|(^|_)MASK($|_)", re.IGNORECASE)
MASKED = 0.4  # of the tokens, at most
RESTORES = frozenset(("set_rng_state", "fork_rng", "isolate_rng"))
SEEDING = ("manual_seed", "seed_everything", "manual_seed_all")
CHANGES = re.compile(r"epoch|step|batch|idx|index|time|rand|[(]")
VISIBLE = (
    "the loss is that of the values that the network sees, and has none of those that are masked, which it is to "
    "predict; invert the mask of the loss"
)


def _by_output(probe: Probe, x: Tensor, found: list[Tensor], loss: Any) -> None:
    """The gradient of the loss by the difference of a prediction from the values of a part of the batch."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
        return
    for node in nodes_behind(loss.grad_fn):
        if name_of(node) in (
            "Sub",
            "Rsub",
            "MseLoss",
            "L1Loss",
        ):  # the gradient by the difference is that by the prediction
            node.register_prehook(
                lambda given: found.extend(g.detach() for g in given if g is not None and g.numel() == x.numel())
            )
    parameters = [p for p in probe.module.parameters() if p.requires_grad]
    torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)


@check("mixed-labels", "likely", at="probe")
def mixed_weights(seen: Evidence) -> Lines:
    """Inputs are mixed, and the label of the sample with the larger share of them counts less in the loss."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST:
        return
    if not probe.module.automatic_optimization:
        return
    base = probe.base(kind)
    labels = [c.target for c in base.calls if c.kind == "cross_entropy" and c.target.shape == (count,)]
    if len(labels) != 2 or torch.equal(*labels) or not torch.equal(labels[0].sort().values, labels[1].sort().values):
        return
    batch = tensors_of(probe.batches[kind])
    shares = list[tuple[float, float]]()
    for seed in range(2 * SEEDS):
        found: list[tuple[Any, Tensor]] = []

        def differentiate(loss: Any, found: list[tuple[Any, Tensor]] = found) -> None:
            for node in nodes_behind(loss.grad_fn) if isinstance(loss, Tensor) and loss.numel() == 1 else ():
                if name_of(node) == "NllLoss":
                    node.register_prehook(lambda g, node=node: found.append((saved(node, "target"), g[0].detach())))
            torch.autograd.grad(loss, [p for p in probe.module.parameters() if p.requires_grad], allow_unused=True)

        trace = probe.run(kind, probe.batches[kind], training=True, seed=seed, then=differentiate)
        given = next((t for n, t in trace.tensors if n.startswith("the input of ") and t.is_floating_point()), None)
        x = next((t for t in batch if given is not None and t.numel() == given.numel() and t.is_floating_point()), None)
        own = [w for t, w in found if t is not None and any(has_values(t, b) for b in batch)]
        if x is None or given is None or len(found) != 2 or len(own) != 1:
            return
        z, y = ((t - t.mean(0)).flatten().double() for t in (given.reshape(count, -1), x.reshape(count, -1)))
        total = found[0][1] + found[1][1]
        if total.numel() == count:  # each sample has a share of its own
            z, y = z.reshape(count, -1), y.reshape(count, -1)
            shares += zip(((z * y).sum(1) / y.square().sum(1)).tolist(), (own[0] / total).tolist(), strict=True)
        else:
            shares.append((float((z * y).sum() / y.square().sum()), float(own[0].sum() / total.sum())))
    clear = [(a, b) for a, b in shares if CLEAR < abs(a - 0.5) <= 0.5 and abs(b - 0.5) > CLEAR / 2]
    if len(clear) >= 2 and sum((a > 0.5) != (b > 0.5) for a, b in clear) > OPPOSITE * len(clear):
        a, b = clear[0]
        yield (
            f"inputs are mixed, {a:.0%} of each being its own sample, but the loss counts its own label {b:.0%}; "
            "exchange the weights: lam * loss(y) + (1 - lam) * loss(y[order])"
        )


@check("mixed-labels", "likely", at="probe")
def mixed_with_others(seen: Evidence) -> Lines:
    """Inputs are mixed with those of one permutation of the samples, and labels with those of another one."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < 2 * FEWEST:
        return
    if not probe.module.automatic_optimization or not _draws(probe.base(kind)):
        return
    leaves = flatten(probe.batches[kind])
    labels = [
        j for j, t in enumerate(leaves) if isinstance(t, Tensor) and t.ndim and len(t) == count and _are_labels(t)
    ]
    inputs = [j for j, t in enumerate(leaves) if isinstance(t, Tensor) and t.ndim > 1 and len(t) == count]
    inputs = [j for j in inputs if j not in labels]
    if len(labels) != 1 or not inputs or not is_comparable(probe, kind):
        return
    y = leaves[labels[0]] if leaves[labels[0]].ndim == 1 else leaves[labels[0]].argmax(1)
    rows = torch.arange(count)
    for i in range(0, count, 4):
        others = (y != y[i]).nonzero().flatten().cpu()
        rows[i] = others[(others >= i).long().argmax()] if len(others) else i
    own = rows != torch.arange(count)
    of_inputs, of_labels = (replaced(probe, kind, {j: leaves[j][rows] for j in part}) for part in (inputs, labels))
    for seed in range(SEEDS):
        with _without_statistics(probe):
            base = _soft_targets(probe, probe.batches[kind], seed)
            found = [_soft_targets(probe, each, seed) for each in (of_inputs, of_labels)] if base else []
        if base is None or any(each is None or each[0].shape != base[0].shape for each in found):
            return
        changed = rows_that_differ(base[0], found[0][0]).cpu() & ~own  # type: ignore[index]
        moved = ((base[1] - found[1][1]).abs().amax(1) > FEW).cpu() & ~own  # type: ignore[index]
        if int(changed.sum()) < 2 or int(moved.sum()) < 2:
            continue  # of a share near 0 or 1
        if float((moved & ~changed).sum()) > SAME * float(moved.sum()):
            yield (
                "inputs are mixed with those of other samples, but labels with those of another permutation of them; "
                "draw it once, and use it for both"
            )
        return


def _are_labels(t: Tensor) -> bool:
    """Whether a part of the batch has a class, or shares of classes, of each sample."""
    if t.ndim == 1:
        return not t.is_floating_point() and t.dtype != torch.bool and int(t.min()) >= 0 and len(torch.unique(t)) > 1
    is_share = t.ndim == 2 and t.shape[1] > 1 and bool((t >= 0).all() & ((t.float().sum(1) - 1).abs() < 1e-4).all())
    return is_share and len(torch.unique(t.argmax(1))) > 1


def _soft_targets(probe: Probe, batch: Any, seed: int) -> tuple[Tensor, Tensor] | None:
    """Logits of the last softmax, and the shares of classes that a loss draws them to, (N, C); None without these.

    The gradient of a cross-entropy by its logits is the softmax less the shares, times one number.
    """
    found: list[Tensor] = []
    results: list[tuple[Tensor, bool]] = []

    def differentiate(loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
            return
        nodes = [n for n in nodes_behind(loss.grad_fn) if name_of(n) in ("LogSoftmax", "Softmax")]
        nodes = [n for n in nodes if n.next_functions[0][0] is not None and _is_of_classes(n, probe.size(kind))]
        if not nodes:
            return
        parent, number = nodes[0].next_functions[0]
        results.append((saved(nodes[0], "result"), name_of(nodes[0]) == "LogSoftmax"))
        parent.register_prehook(lambda given: found.append(given[number].detach()))
        torch.autograd.grad(loss, [p for p in probe.module.parameters() if p.requires_grad], allow_unused=True)

    kind = "training_step"
    probe.run(kind, batch, training=True, seed=seed, record=False, then=differentiate)
    if not found or not results or found[0].shape != results[0][0].shape:
        return None
    result, is_log = results[0]
    p = (result.exp() if is_log else result).double()
    ratio = found[0].double() / p.clamp_min(1e-12)
    scale = ratio.amax(1, keepdim=True)  # of a class that has no share
    shares = p * (1 - ratio / scale.clamp_min(1e-12))
    return result, shares


def _is_of_classes(node: Any, count: int) -> bool:
    result = saved(node, "result")
    return result is not None and result.ndim == 2 and len(result) == count and result.shape[1] > 2


def _keep_weight(node: Any, found: list[tuple[Any, Tensor]], gradients: Any) -> None:
    found.append((saved(node, "target"), gradients[0].detach().sum()))


@check("global-seed", "likely", at="probe")
def seeded_in_each_step(seen: Evidence) -> Lines:
    """A training step seeds a generator of the module with the same number, whatever state it has had before."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not (holders := [*_generators(probe.module)]):
        return
    ends: list[list[Tensor]] = []

    def read(loss: Any) -> None:
        ends.append([generator.get_state() for _, generator in holders])

    begin = [generator.get_state() for _, generator in holders]
    try:
        for seed in (1, 2):
            for _, generator in holders:
                generator.manual_seed(seed)
            probe.run(kind, probe.batches[kind], training=True, seed=seed, record=False, then=read)
    finally:
        for (_, generator), state in zip(holders, begin, strict=True):
            generator.set_state(state)
    for (name, _), one, other in zip(holders, *ends, strict=True):
        if torch.equal(one, other) and not _seeds_by_step(probe.module) and not says(probe.module, PROJECTS):
            yield Line(
                f"training_step seeds {name} with the same number each time, so that all steps draw the same values; "
                "seed it once, in __init__",
                subject=name,
            )
            return


@check("global-seed", "likely", at="probe")
def seeded_in_each_epoch(seen: Evidence) -> Lines:
    """A hook of each epoch, step or validation seeds torch with a number that does not depend on the epoch."""
    restores = any(RESTORES & {*code.co_names} for code in codes_of_users(seen.module, seen.trainer))
    for place in functions_of(seen.module, seen.trainer.callbacks):  # type: ignore[attr-defined]
        of_validation = place.tree.name in OF_VALIDATION and not restores
        if place.tree.name not in OF_TRAINING and not of_validation:
            continue
        for call in (n for n in ast.walk(place.tree) if isinstance(n, ast.Call) and called_name(n) in SEEDING):
            is_global = isinstance(call.func, ast.Name) or ast.unparse(call.func).startswith(
                ("torch.", "L.", "pl.", "lightning.")
            )
            changes = OF_EPOCHS if of_validation else CHANGES
            is_global = is_global and "Generator" not in ast.unparse(call.func)
            if is_global and call.args and not changes.search(ast.unparse(call.args[0])):
                yield Line(
                    f"{place.name} calls {ast.unparse(call)[:60]}, so each epoch of training draws the same dropout, "
                    "noise and order of samples; "
                    + ("use a torch.Generator" if of_validation else "seed once, before training"),
                    # In evaluation, by the number of a batch, it is often on purpose.
                    "note" if CHANGES.search(ast.unparse(call.args[0])) else None,
                    subject=place.name,
                )
                return


def _generators(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Generator):
                yield f"{name}.{key}".lstrip("."), value


def _seeds_by_step(module: nn.Module) -> bool:
    """Whether code seeds by a number that changes, such as that of the step."""
    for place in functions_of(module):
        for call in (n for n in ast.walk(place.tree) if isinstance(n, ast.Call) and called_name(n) == "manual_seed"):
            if re.search(r"step|epoch|batch|ind(ex|ices)|idx|count|rank|time", ast.unparse(call)):
                return True
    return False
