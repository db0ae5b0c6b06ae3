"""Probes of what must fit: predictions and metrics, inputs and targets, samples and labels, two networks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.calls import CLASSES
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS, Loss
from boltcutter.diagnosis.probe import Probe, Trace, is_close, rows_that_differ, seeded, take
from boltcutter.diagnosis.samples import is_comparable
from boltcutter.diagnosis.source import says
from boltcutter.internals import BatchNorm
from boltcutter.structure import flatten

FEWEST = 8  # samples
MANY = 256  # values, whose correlation by chance is small
UNRELATED = 0.1  # correlation
SEEDS = 3
PARTNERS = (0.05, 0.9)  # share of samples whose prediction depends on another one
WEIGHT = 0.5  # of the other sample, relative to its own
FLAT = 1e-3  # slope of a gradient, relative to it
SAME = 0.5  # difference of scores at which two gradients are 0
AUGMENTS = re.compile(r"augment|jitter|dequant|eras(e|ing)", re.IGNORECASE)
KEEPS_LABELS = re.compile(r"background|noise|mix_?style|style|interfer|distract|augment_?mix|augmix", re.IGNORECASE)


@check("other-units", "likely", at="probe")
def other_units(seen: Evidence) -> Lines:
    """Training predicts a function of targets, as their logarithm, and validation compares it with them as they are."""
    probe, kinds = seen.probe, ("training_step", "validation_step")
    if probe is None or not {*kinds} <= probe.batches.keys():
        return
    train, held = (flatten(probe.batches[kind]) for kind in kinds)
    learned = [(c, j) for c in probe.base(kinds[0]).calls for j in _sources(c, train)]
    if not learned or len(train) != len(held):
        return
    calls = probe.run(kinds[0], probe.batches[kinds[1]], training=False, record=False).calls
    base = probe.base(kinds[1])
    pairs = [*base.differences, *((c.prediction, c.target) for c in base.calls if c.kind in REGRESSIONS)]
    for call in (c for c in calls if c.kind in REGRESSIONS):
        for j in {j for _, j in learned if isinstance(held[j], Tensor)}:
            raw, own = held[j].flatten(), call.target.flatten()
            if raw.numel() != own.numel() or raw.numel() < FEWEST or is_close(own, raw.to(own)):
                continue
            for a, b in (pair[::order] for pair in pairs for order in (1, -1)):
                if _equal(b, raw) and a.numel() == raw.numel() and is_close(a.flatten(), call.prediction.flatten()):
                    yield (
                        f"training predicts a function of the targets (from {float(own.min()):.3g} to "
                        f"{float(own.max()):.3g}), but validation compares its predictions with targets as they are "
                        f"({float(raw.min()):.3g} to {float(raw.max()):.3g}); invert the function first"
                    )
                    return


def _sources(call: Loss, leaves: list[Any]) -> Iterator[int]:
    """Parts of the batch that the target of a regression is a rising function of, as of a standard scale."""
    t = call.target.flatten() if call.kind in REGRESSIONS and call.target is not None else torch.zeros(0)
    parts = [(j, p.flatten()) for j, p in enumerate(leaves) if isinstance(p, Tensor) and p.numel() == t.numel()]
    if t.numel() < FEWEST or any(_equal(t, part) for _, part in parts):
        return
    for j, part in parts:
        order = part.argsort()
        steps, rises = t[order].diff(), part[order].diff() > 0
        is_rising = int(rises.sum()) >= FEWEST and bool((steps[rises] > 0).all())
        if part.is_floating_point() and is_rising and bool((steps[~rises].abs() <= 1e-6).all()):
            yield j


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten().to(a))


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
        layer = next((name for name, u in inputs if _equal(u, call.target)), None)
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
    norms = [m for m in probe.module.modules() if isinstance(m, BatchNorm)]
    modes = {**probe.modes}
    probe.modes.update(dict.fromkeys(norms, False))
    try:
        share = max(_share_of_others(probe, altered, own, seed) for seed in range(SEEDS if _draws(base) else 1))
    finally:
        probe.modes.update(modes)
    if share > WEIGHT:
        yield (
            "in training, inputs are mixed with those of other samples, but the loss has only the labels of one of "
            "them; weigh the loss of both labels, as lam * loss(y) + (1 - lam) * loss(y[order])"
        )


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
        gradients: Of the loss, by the output.
    """

    name: str
    value: Tensor
    given: list[int]
    has_gradient: bool
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def sign(self) -> int:
        """Of the gradients of all samples of the first backward pass; 0 if they differ."""
        signs = self.gradients[0].sign() if self.gradients else torch.zeros(1)
        return int(signs.flatten()[0]) if bool((signs == signs.flatten()[0]).all()) else 0


@check("adversaries-agree", "likely", at="probe")
def adversaries_agree(seen: Evidence) -> Lines:
    """A network is trained to move the scores of its samples as the network that gives them is, and not the reverse."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or probe.module.automatic_optimization:
        return
    if len(seen.optimizers) < 2:
        return
    outputs: list[Output] = []

    def look(name: str) -> Any:
        def hook(part: nn.Module, args: Any, value: Any) -> None:
            if isinstance(value, Tensor) and len(outputs) < MANY:
                inputs = tensors_of(args)
                memory = [t.untyped_storage().data_ptr() for t in inputs]
                output = Output(name, value, memory, any(t.grad_fn is not None for t in inputs))
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
    for name, _ in networks:
        made = {o.name: {p.value.untyped_storage().data_ptr() for p in outputs if p.name == o.name} for o in outputs}
        for other in made.keys() - {name}:
            calls = [o for o in outputs if o.name == name]
            of_other = [o for o in calls if made[other] & {*o.given}]
            real = {o.sign for o in calls if o not in of_other and not o.has_gradient}
            fake = {o.sign for o in of_other if not o.has_gradient}
            raised = {o.sign for o in of_other if o.has_gradient and not (made[name] & {*o.given})}
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


def _zero(found: list[Output]) -> float:
    """The score at which the gradient is 0, if it is a line as of least squares; infinity for a constant one."""
    x, g = (t.detach().flatten().cpu().double() for t in (found[0].value, found[0].gradients[0]))
    slope = float(((x - x.mean()) * (g - g.mean())).sum() / ((x - x.mean()).square().sum() + 1e-12))
    return math.inf if abs(slope) < FLAT * float(g.abs().mean()) else float(x.mean() - g.mean() / slope)
