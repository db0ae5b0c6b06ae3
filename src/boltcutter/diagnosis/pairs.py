"""Probes of losses of pairs: contrastive ones, and those whose target has a gradient itself."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from boltcutter.diagnosis.calls import remarks
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import Loss
from boltcutter.diagnosis.probe import Trace, take, tolerance
from boltcutter.diagnosis.samples import is_comparable
from boltcutter.structure import flatten

FEWEST = 8  # pairs
SURE = 2.5  # standard errors
MOST_VIEWS = 8  # of a sample
MOST_CHANGED = 0.8  # of the similarities of an embedding, which change with its sample


def similarities(seen: Evidence) -> list[Loss]:
    """The calls of cross-entropy with a similarity for each pair of samples."""
    return [
        c for c in seen.calls
        if c.kind == "cross_entropy" and c.prediction.ndim == 2 and len(c.prediction) == c.prediction.shape[1] >= FEWEST
        and c.target.shape == c.prediction.shape[:1] and not c.target.is_floating_point()
    ]  # fmt: skip


@check("self-similarity", "likely", at="probe")
def self_similarity(seen: Evidence) -> Lines:
    """Each sample is most similar to itself, equally so, which is among the logits, but is no target."""
    for call in similarities(seen):
        p = call.prediction.float()
        own = p.diagonal()
        is_largest = bool((own >= p.max(1).values - 1e-4 * own.abs()).all())
        is_equal = float(own.max() - own.min()) <= 1e-3 * float(own.abs().max())
        if is_largest and is_equal and not bool((call.target == torch.arange(len(p), device=p.device)).any()):
            yield (
                f"the {len(p)} × {len(p)} similarities have those of each sample to itself, which are the largest, "
                "beside its pair, so the loss cannot fall; mask the diagonal with -inf"
            )
            return


@check("pair-target", "likely", at="probe")
def pair_target(seen: Evidence) -> Lines:
    """All targets of a product of two sets of embeddings, a similarity for each pair, are the same sample."""
    for call in similarities(seen):
        n = len(call.target)
        if call.options.get("product") and len(call.target.unique()) == 1:
            yield (
                f"all targets of the {n} × {n} similarities are {int(call.target[0])}, so all samples are drawn to the "
                "same one; the pairs are on the diagonal: torch.arange(len(logits))"
            )
            return


@check("pair-target", "likely", at="probe")
def pair_of_others(seen: Evidence) -> Lines:
    """If a sample is replaced, the similarities of its embeddings to their targets do not change both times."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not (found := similarities(seen)):
        return
    kind, count = "training_step", probe.size("training_step")
    if count < FEWEST or not is_comparable(probe, kind):
        return
    base = probe.base(kind, training=False)
    wrong = [0] * len(base.calls)
    for place in (count // 3, count - 2):
        rows = torch.arange(count)
        rows[place] = place + 1
        other = probe.run(kind, take(probe.batches[kind], rows), training=False, record=False)
        for i, (a, b) in enumerate(zip(base.calls, other.calls, strict=False)):
            if any(a.prediction.shape == c.prediction.shape and a.kind == c.kind for c in found):
                wrong[i] += _targets_others(a, b)
    if 2 in wrong:
        yield (
            "each sample is drawn to another one: the target of its embedding is none of the columns that change with "
            "the sample; views that torch.cat joins are half of the rows apart: (torch.arange(n) + n // 2) % n"
        )


def _targets_others(a: Loss, b: Loss) -> bool:
    """Whether no target of the rows that belong to a sample, which was replaced, is a column that belongs to it."""
    p, q = a.prediction.float(), b.prediction.float()
    if p.shape != q.shape or len(p) != p.shape[-1] or not torch.equal(a.target, b.target):
        return False
    known = p.isfinite() & q.isfinite()
    changed = ((p - q).abs() > tolerance(p[known])) & known
    own_rows, own_columns = (changed.sum(d) > MOST_CHANGED * known.sum(d) for d in (1, 0))
    rows, columns = own_rows.nonzero().flatten(), own_columns.nonzero().flatten()
    if not 0 < len(rows) <= MOST_VIEWS or not 0 < len(columns) <= MOST_VIEWS:
        return False
    has_pair = len(columns) > 1 or not torch.equal(rows, columns)  # beside itself
    is_one_set = bool(((p - p.T).abs()[known & known.T] <= tolerance(p[known])).all())
    return (has_pair or not is_one_set) and not bool(torch.isin(a.target[rows], columns).any())


@check("flat-logits", "likely", at="probe")
def flat_logits(seen: Evidence) -> Lines:
    """Logits are cosines, times 1 or less, so that all classes keep almost the same probability."""
    for call in seen.calls:
        scale = call.options.get("cosine")
        if (
            call.kind == "cross_entropy"
            and scale is not None
            and abs(scale) < 1.01
            and call.prediction.shape[1] >= FEWEST
        ):
            n = call.prediction.shape[1]
            least = math.log(1 + (n - 1) * math.exp(-2 * abs(scale)))
            yield (
                f"logits are cosines times {scale:.2g}, so cross-entropy of {n} classes cannot fall below {least:.2f} "
                f"(equal probabilities have {math.log(n):.2f}); divide by a temperature, such as 0.07"
            )
            return


@check("no-stop-gradient", "likely", at="probe")
def no_stop_gradient(seen: Evidence) -> Lines:
    """The loss is nothing but the distance of outputs that both have a gradient, which is least if all are the same."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    base = probe.base("training_step")
    value, means = _value(base), [mean for _, mean in base.pairs]
    if value is None or not means or not all(both for both, _ in base.pairs) or base.differentiates:
        return  # or both sides are derivatives, as of an equation
    if any(c.kind == "cosine_embedding_loss" and bool((c.target < 0).any()) for c in base.calls):
        return  # whose other pairs are kept apart
    if any(c.kind == "margin_ranking_loss" for c in base.calls):
        return  # by the margin
    total = sum(means)
    average = total / len(means)
    # Distances, or similarities with a minus, and no other term.
    if any(
        math.isclose(value, v, rel_tol=1e-4) for v in (total, average, -total, -average, 1 - average, 2 - 2 * average)
    ):
        yield (
            "both sides of the only loss have a gradient, and nothing keeps samples apart, so all outputs become the "
            "same; detach() the target, as SimSiam and BYOL do"
        )


def _value(trace: Trace) -> float | None:
    loss = trace.output.get("loss") if isinstance(trace.output, dict) else trace.output
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@check("target-gradient", "likely", at="probe")
def target_gradient(seen: Evidence) -> Lines:
    """The target of a regression is a maximum over the outputs of the network, as in Q-learning, with a gradient."""
    yield from remarks(seen, "target-gradient")


@check("swapped-arguments", "likely", at="probe")
def swapped_arguments(seen: Evidence) -> Lines:
    """The target of binary cross-entropy has a gradient, and its first argument has none."""
    yield from remarks(seen, "swapped-arguments")


@check("label-smoothing", "likely", at="probe")
def label_smoothing(seen: Evidence) -> Lines:
    """The label smoothing of cross-entropy is 0.5 or more."""
    for call in seen.calls:
        share: Any = call.options.get("label_smoothing", 0.0)
        if call.kind == "cross_entropy" and share >= 0.5:
            yield (
                f"label_smoothing={share:g} is the share that is taken from the label, not that which it keeps; write "
                f"label_smoothing={1 - share:.2g}"
            )
            return


@check("threshold-of-logits", "likely", at="probe")
def threshold_of_logits(seen: Evidence) -> Lines:
    """Logits that a loss function gets are compared with 0.5, or rounded."""
    yield from remarks(seen, "threshold-of-logits")


@check("argmax-of-labels", "likely", at="probe")
def argmax_of_labels(seen: Evidence) -> Lines:
    """Argmax is taken of labels in 0 and 1, of which over 20% of the samples have several."""
    yield from remarks(seen, "argmax-of-labels")


@check("class-dimension", "likely", at="probe")
def class_dimension(seen: Evidence) -> Lines:
    """Logits (N, T, C) of a linear layer go to cross-entropy as they are, which takes dimension 1 for the classes."""
    yield from remarks(seen, "class-dimension")


@check("same-views", "likely", at="probe")
def same_views(seen: Evidence) -> Lines:
    """Two parts of a batch are equal for all samples, and the same layer gets both."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or (count := probe.size("training_step")) < FEWEST:
        return
    parts = [t for t in flatten(probe.batches["training_step"]) if isinstance(t, Tensor) and t.is_floating_point()]
    parts += [view for t in parts if t.ndim > 2 and t.shape[1] == 2 for view in t.unbind(1)]
    wide = [t for t in parts if t.ndim > 1 and len(t) == count and bool((t != t.flatten()[0]).any())]
    given = [(name, t) for name, t in probe.base("training_step").tensors if name.startswith("the input of")]
    for i, one in enumerate(wide):
        if not any(torch.equal(one, other) for other in wide[i + 1 :] if other.shape == one.shape):
            continue
        names = Counter(name for name, t in given if t.shape == one.shape and torch.equal(t, one))
        both = torch.cat([one, one])
        joined = [name for name, t in given if t.shape == both.shape and torch.equal(t, both)]
        for name in [name for name, times in names.items() if times > 1][:1] or joined[:1]:
            yield (
                f"two parts of the batch, of shape {tuple(one.shape)}, are equal for all samples, and {name} "
                "gets both: two views of a sample must be drawn anew, not with the same seed"
            )
            return


@check("softmax-of-batch", "likely", at="probe")
def softmax_of_batch(seen: Evidence) -> Lines:
    """Softmax of logits in validation, or logsumexp of a matrix that is not square, is over the samples."""
    yield from remarks(seen, "softmax-of-batch")


@check("positive-is-negative", "likely", at="probe")
def positive_is_negative(seen: Evidence) -> Lines:
    """Of each row of logits, the one of the target is also that of another class, as of a queue with the positives."""
    for call in seen.calls:
        p, t = call.prediction, call.target
        if call.kind != "cross_entropy" or p.ndim != 2 or t.shape != p.shape[:1] or t.is_floating_point():
            continue
        if len(p) < FEWEST or not bool(((t >= 0) & (t < p.shape[1])).all()):
            continue
        own = p.gather(1, t[:, None])
        same = (p - own).abs() <= 1e-5 * own.abs() + 1e-7
        if not bool((same.sum(1) == 2).all()) or float(own.std()) <= 1e-4 * float(own.abs().mean()):
            continue
        twins = same.scatter(1, t[:, None], False).float().argmax(1)
        if len({*zip(t.tolist(), twins.tolist(), strict=True)}) == len(t):  # others are classes that begin alike
            yield (
                f"each of the {len(p)} rows of logits has the similarity of its positive twice, once as that of a "
                "negative, so that the loss cannot fall; add new keys to the queue after the loss"
            )
            return


@check("pair-target", "note", at="probe")
def pairs_inverted(seen: Evidence) -> Lines:
    """Two embeddings are drawn together where their inputs differ more, by the labels of pairs, and apart elsewhere."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    labels = [
        t.flatten() > 0 for t in tensors_of(probe.batches[kind])
        if t.numel() == probe.size(kind) >= 2 * FEWEST and {*torch.unique(t).tolist()} in ({0, 1}, {-1, 1})
    ]  # fmt: skip
    outputs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    gradients: dict[str, Any] = {}

    def keep(name: str, part: Any, given: Any, output: Any) -> None:
        is_pair = isinstance(output, Tensor) and output.ndim == 2 and output.requires_grad and tensors_of(given)
        if is_pair and len(output) == probe.size(kind):
            outputs.setdefault(name, []).append((tensors_of(given)[0].detach(), output))

    def differentiate(loss: Any) -> None:
        for name, calls in outputs.items():
            if len(calls) == 2 and isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                both = [output for _, output in calls]
                gradients[name] = torch.autograd.grad(loss, both, allow_unused=True, retain_graph=True)

    if len(labels) != 1:
        return
    networks = [(n, m) for n, m in seen.module.named_children() if any(True for _ in m.parameters())]
    hooks = [m.register_forward_hook(partial(keep, n)) for n, m in networks]
    try:
        probe.run(kind, probe.batches[kind], training=False, record=False, then=differentiate)
    finally:
        for hook in hooks:
            hook.remove()
    for name, pair in gradients.items():
        (x, a), (y, b) = outputs[name]
        if any(g is None for g in pair) or x.shape != y.shape or not x.is_floating_point():
            continue
        drawn = (pair[0] * (a - b)).sum(1).detach()  # above 0 where the distance shrinks
        apart = (x - y).flatten(1).norm(dim=1)
        groups = [(drawn[chosen], apart[chosen]) for chosen in (labels[0], ~labels[0])]
        if any(len(d) < FEWEST for d, _ in groups):
            continue
        (d1, x1), (d2, x2) = groups if bool((groups[0][0] > 0).float().mean() > 0.9) else groups[::-1]
        is_pair = float((d1 > 0).float().mean()) > 0.9 and float((d2 <= 0).float().mean()) > 0.9
        gap = (x1.mean() - x2.mean()) / (x1.var() / len(x1) + x2.var() / len(x2)).sqrt().clamp_min(1e-12)
        if is_pair and float(gap) > SURE:
            yield Line(
                f"the outputs of {name} are drawn together for the pairs whose inputs differ more (by "
                f"{float(x1.mean()):.3g}, others by {float(x2.mean()):.3g}), and apart for the others: are the labels "
                "of pairs inverted?"
            )
            return
