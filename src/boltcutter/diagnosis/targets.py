"""Probes of targets: whether they are in the order of the predictions, and whether predictions depend on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.calls import DIFFERENCES, LOSSES, is_equal, rows_of
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS, Loss
from boltcutter.diagnosis.probe import STEPS, Probe, Trace, are_joined, is_close, kept, rows_that_differ, seeded, take
from boltcutter.diagnosis.source import is_installed, says
from boltcutter.structure import flatten, with_tensors

SHIFTING = re.compile(r"LMHeadModel$|ForCausalLM$")  # classes of transformers

OF_ONE = 0.9  # share of known targets
MISSING = 0.02  # share of targets
MOSTLY, FEW_ZEROS = 0.5, 0.2  # of the places, and of the values where there is something
BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
FILLED = 0.05  # of the deviation, within which a constant is the mean
FEWEST = 8  # samples of a batch
FEWEST_TIMES = 6
LAYERS = 16  # inputs and outputs of the first ones, and channels
INTEGERS = (torch.int64, torch.int32)
RESTORES = re.compile("autoenc|koopman|reconstruct|(^|_)ode|initial_state", re.IGNORECASE)


def steps_with_losses(seen: Evidence) -> Iterator[tuple[Probe, str, int]]:
    """Probe, step and number of samples, of each step that calls a loss function for enough samples."""
    for kind in STEPS:
        probe = seen.probe
        if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST:
            continue
        if probe.base(kind).calls and not are_joined(tensors_of(probe.batches[kind])):
            yield probe, kind, count


def same_shapes(a: Loss, b: Loss) -> bool:
    """Whether two calls have the same shapes."""
    return bool(a.prediction.shape == b.prediction.shape and a.target.shape == b.target.shape)


def changes(a: Loss, b: Loss) -> tuple[Tensor, Tensor] | None:
    """Which rows of predictions and of targets differ between two calls; None if they cannot be compared."""
    if (
        not same_shapes(a, b)
        or (one := rows_of(a)) is None
        or (other := rows_of(b)) is None
        or len(one[0]) != len(one[1])
    ):
        return None
    return rows_that_differ(one[0], other[0]), rows_that_differ(one[1], other[1])


@check("misaligned", "certain", at="probe")
def misaligned(seen: Evidence) -> Lines:
    """If half of the samples are replaced, over 20% of changed targets lie beside kept predictions, and the reverse."""
    for probe, kind, count in steps_with_losses(seen):
        base = probe.base(kind)
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in base.calls]
        half = count // 2
        for shift in (0, 1, 3):  # one replacement may have the same label
            rows = torch.arange(count)
            rows[:half] = torch.arange(half).roll(shift) + half
            other = probe.run(kind, take(probe.batches[kind], rows), training=kind == "training_step", record=False)
            for each, a, b in zip(found, base.calls, other.calls, strict=False):
                if (pair := changes(a, b)) is not None:
                    each.append(pair)
        for number, (call, pairs) in enumerate(zip(base.calls, found, strict=True)):
            others = [c for c in base.calls if is_equal(c.prediction, call.prediction)]
            if not pairs or any(not is_equal(c.target, call.target) for c in others):  # labels of mixed samples
                continue
            in_p, in_t = (torch.stack(part).any(0) for part in zip(*pairs, strict=True))
            only_t, only_p = int((in_t & ~in_p).sum()), int((in_p & ~in_t).sum())
            enough = min(int(in_p.sum()), int(in_t.sum())) >= 4 and only_p >= 3
            is_apart = enough and only_t > 0.2 * float(in_t.sum()) and only_p > 0.2 * float(in_p.sum())
            if is_apart and depends_on_others(probe, kind, number, in_t & ~in_p):
                yield (
                    f"{only_t / int(in_t.sum()):.0%} of the targets of {call.kind} in {kind} belong to other samples "
                    f"than the predictions beside them ({tuple(call.prediction.shape)} and "
                    f"{tuple(call.target.shape)}); shuffle, flatten or transpose both alike"
                )
                return


def depends_on_others(probe: Probe, kind: str, number: int, places: Tensor) -> bool:
    """Whether predictions beside targets of the first half depend on the other half, and not on nothing at all."""
    count = probe.size(kind)
    rows = torch.arange(count)
    rows[count // 2 :] = torch.arange(count - count // 2)
    other = probe.run(kind, take(probe.batches[kind], rows), training=kind == "training_step", record=False)
    base = probe.base(kind).calls
    pair = changes(base[number], other.calls[number]) if len(other.calls) == len(base) else None
    return pair is not None and bool((pair[0] & places).sum() * 2 >= places.sum())


@check("label-leak", "certain", at="probe")
def label_leak(seen: Evidence) -> Lines:
    """If the label of one sample is changed, its own prediction changes, at each place that is tried."""
    for probe, kind, count in steps_with_losses(seen):
        if probe.base(kind).differentiates:
            continue
        leaves = flatten(probe.batches[kind])
        for j, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count == leaf.numel():
                for call in _moved_by_label(probe, kind, j, leaf):
                    number = next(i for i, c in enumerate(probe.base(kind).calls) if c is call)
                    is_meant = _is_judged_by_frozen(probe, kind, call) or _is_drawn(probe, kind, number)
                    if not is_meant and _depends_on_more(probe, kind, j, call):
                        yield (
                            f"predictions in {kind} depend on the targets themselves, part {j} of the batch; leave "
                            "them out of the inputs"
                        )
                        return


def _moved_by_label(probe: Probe, kind: str, j: int, labels: Tensor) -> list[Loss]:
    """Calls of which the prediction for a sample depends on its label. That of others may, as in few-shot learning."""
    base = probe.base(kind)
    tried, moved = [0] * len(base.calls), [0] * len(base.calls)
    for place in sorted({0, len(labels) // 3, len(labels) // 2, len(labels) - 1}):
        others = (labels != labels[place]).flatten().nonzero()
        if not len(others):
            continue
        changed = labels.clone()
        changed[place] = labels[int(others[0])]
        other = probe.run(kind, replaced(probe, kind, {j: changed}), training=kind == "training_step", record=False)
        for k, (a, b) in enumerate(zip(base.calls, other.calls, strict=False)):
            if (pair := changes(a, b)) is None or not bool(pair[1].any()):
                continue
            (p, t), (q, u) = rows_of(a), rows_of(b)  # type: ignore[misc]  # as they have changes
            differ = ~torch.isclose(p.float(), q.float(), rtol=1e-3, atol=1e-5)
            if p.shape[1] > 1 and not t.is_floating_point():  # a margin changes the logits of these classes only
                for classes in (t, u):
                    differ.scatter_(1, classes.clamp(0, p.shape[1] - 1), False)
            tried[k] += 1
            moved[k] += bool(differ.any(1)[pair[1]].all())
        if moved and not any(moved):
            break  # no label changes its prediction
    found = [*zip(base.calls, tried, moved, strict=True)]
    may_differ = kind == "validation_step" or not probe.module.automatic_optimization
    if may_differ and any(n >= 2 and not m for _, n, m in found):
        return []  # the same labels beside a baseline of theirs, or of samples that a generator has made of them
    return [call for call, n, m in found if n >= 2 and m == n]


def _is_judged_by_frozen(probe: Probe, kind: str, call: Loss) -> bool:
    """Whether a part without trained weights has returned a prediction, as of what is generated for a class."""
    given = probe.base(kind).tensors
    outputs = {name.removeprefix("the output of ") for name, t in given if is_equal(t, call.prediction)}
    parts = [part for name, part in probe.module.named_modules() if name in outputs and [*part.parameters()]]
    return bool(parts) and not any(p.requires_grad for part in parts for p in part.parameters())


def _is_drawn(probe: Probe, kind: str, number: int) -> bool:
    """Whether a prediction is random in evaluation mode, too, as of a latent variable that knows the target."""
    one, other = (probe.repeated(kind, seed=seed).calls for seed in (0, 1))
    if not number < len(one) == len(other) or not same_shapes(one[number], other[number]):
        return False
    return not is_close(one[number].prediction, other[number].prediction)


def _depends_on_more(probe: Probe, kind: str, j: int, call: Loss) -> bool:
    """Whether the prediction depends on something else of the batch, so that part j is no input by itself."""
    leaves = flatten(probe.batches[kind])
    flipped = {i: leaf.flip(0) for i, leaf in enumerate(leaves) if i != j and isinstance(leaf, Tensor) and leaf.ndim}
    other = probe.run(kind, replaced(probe, kind, flipped), training=kind == "training_step", record=False)
    return any(same_shapes(c, call) and not is_close(c.prediction, call.prediction) for c in other.calls)


def replaced(probe: Probe, kind: str, parts: dict[int, Tensor]) -> Any:
    """The batch of a step with some other tensors."""
    leaves = flatten(probe.batches[kind])
    new = [parts.get(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return with_tensors(probe.batches[kind], new)


@check("future-leak", "certain", at="probe")
def series_leak(seen: Evidence) -> Lines:
    """If a value of a series is replaced, the prediction changes whose target it is, and targets are shifted inputs."""
    probe = seen.probe
    if probe is None or (count := probe.size(kind := probe.scored)) < 2:
        return
    base = probe.base(kind)
    for j, x in enumerate(flatten(probe.batches[kind])):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim not in (2, 3) or len(x) != count:
            continue
        for dim in range(1, x.ndim):
            if x.shape[dim] < FEWEST_TIMES or not any(_next_of(base, x, dim)):
                continue
            place = x.shape[dim] // 2
            new = x.clone().movedim(dim, 1)
            new[:, place] = new[:, place].roll(1, 0) + x.std()
            batch = replaced(probe, kind, {j: new.movedim(1, dim)})
            other = probe.run(kind, batch, training=kind == "training_step")
            leaked = [k for k, i in _next_of(base, x, dim) if _is_leaked(base, other, k, i, place, dim)]
            one, two = (_pairs_of(probe.repeated(kind, seed=seed)) for seed in (0, 1))
            drawn = {k for k, (a, b) in enumerate(zip(one, two, strict=False)) if not is_close(a[0], b[0])}
            if leaked and any(_is_learned(probe, kind, k) for k in {*leaked} - drawn):  # not of latent variables
                yield Line(
                    "each prediction depends on the value that it is to predict: use layers of one direction, or a "
                    "causal mask, and inputs up to the time before"
                )
                return


def _pairs_of(trace: Trace) -> list[tuple[Tensor, Tensor]]:
    """Predictions and targets of regressions, and values that were subtracted from each other, either way."""
    called = [(c.prediction, c.target) for c in trace.calls if c.kind in REGRESSIONS]
    return [*called, *trace.differences, *((b, a) for a, b in trace.differences)]


def _next_of(trace: Trace, x: Tensor, dim: int) -> Iterator[tuple[int, int | None]]:
    """Pairs whose target is what a part of the batch, or a layer's input, has one time later: their numbers."""
    given = [(i, t) for i, (name, t) in enumerate(trace.tensors[:LAYERS]) if name.startswith("the input of ")]
    for k, (p, t) in enumerate(_pairs_of(trace)):
        if p.shape == t.shape and t.ndim in (2, 3) and len(t) == len(x) and not _is_middle_of(t, x, dim):
            yield from ((k, i) for i, z in [(None, x), *given] if _is_ahead_of(t, z, dim))


def _by_time(t: Tensor, dim: int) -> Tensor:
    """A series as (N, T, C)."""
    return t[:, :, None] if t.ndim == 2 else t.movedim(dim, 1)


def _is_ahead_of(t: Tensor, z: Tensor, dim: int) -> bool:
    """Whether targets (N, S, …) are a series, or one channel of it, one time later, and not at the same time."""
    if z.ndim not in (2, 3) or len(z) != len(t) or not z.is_floating_point():
        return False
    one, series = _by_time(t, dim if t.ndim == 3 else 1), _by_time(z, dim if z.ndim == 3 else 1)
    width = min(one.shape[1], series.shape[1] - 1)
    if (
        width < FEWEST_TIMES - 1
        or not series.shape[1] - 1 <= one.shape[1] <= series.shape[1]
        or one.shape[2] not in (1, series.shape[2])
    ):
        return False
    channels = (
        [series] if one.shape[2] == series.shape[2] else series[:, :, :LAYERS].chunk(min(series.shape[2], LAYERS), 2)
    )
    one = one[:, :width]
    return any(torch.equal(one, c[:, 1 : width + 1]) and not torch.equal(one, c[:, :width]) for c in channels)


def _is_middle_of(t: Tensor, x: Tensor, dim: int) -> bool:
    """Whether targets are a series without its ends, as what a layer without padding reconstructs."""
    times = x.shape[dim] if x.ndim == 3 else x.shape[1]
    size = t.shape[dim] if t.ndim == 3 else t.shape[1]
    return 1 < size < times - 1 and _is_ahead_of(t, x.narrow(dim, 0, size + 1), dim)


def _is_leaked(base: Trace, other: Trace, k: int, source: int | None, place: int, dim: int) -> bool:
    """Whether the prediction changes of which the target is the value that was replaced."""
    ones, others = _pairs_of(base), _pairs_of(other)
    if len(ones) != len(others) or len(base.tensors) != len(other.tensors):
        return False
    (p, t), (q, u) = ones[k], others[k]
    if p.shape != q.shape or t.shape != u.shape:
        return False
    moved = _times_that_differ(t, u, dim)
    if not moved:  # they are a part of their own
        pair = (base.tensors[source][1], other.tensors[source][1]) if source is not None else None
        moved = [at - 1 for at in _times_that_differ(*pair, dim)] if pair is not None else [place - 1]
    times = p.shape[dim if p.ndim == 3 else 1]
    if not 0 < len(moved) <= 2 or not all(0 <= at < times for at in moved):
        return False  # as of statistics of the whole series
    return {*moved} <= {*_times_that_differ(p, q, dim)}


def _is_learned(probe: Probe, kind: str, k: int) -> bool:
    """Whether a prediction, and not its target, depends on weights."""
    with kept(probe.module), seeded(0), torch.no_grad():
        for weight in probe.module.parameters():
            if weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.1)
        other = probe.run(kind, probe.batches[kind], training=kind == "training_step", record=False)
    one, changed = _pairs_of(probe.base(kind)), _pairs_of(other)
    if len(one) != len(changed):
        return False
    return not is_close(one[k][0], changed[k][0]) and is_close(one[k][1], changed[k][1])


def _times_that_differ(a: Tensor, b: Tensor, dim: int) -> list[int]:
    if a.shape != b.shape:
        return []
    one, other = (_by_time(t, dim if t.ndim == 3 else 1) for t in (a, b))
    return [at for at in range(one.shape[1]) if not is_close(one[:, at], other[:, at])]


def _gets_all(trace: Trace, tokens: Tensor, kept: list[Tensor]) -> bool:
    """Whether a layer gets all tokens, or other ones, as an encoder may; others get the first ones, or kept parts."""
    inputs = [t for name, t in trace.tensors if name.startswith("the input of ")]
    read = [t for t in inputs if t.dtype == tokens.dtype and t.ndim == 2 and len(t) == len(tokens)]
    is_coded = any(
        t.ndim == 3 and t.is_floating_point() and bool(((t == 0) | (t == 1)).all()) for t in inputs
    )  # one-hot
    read = [t for t in read if not any(is_equal(t, part) for part in kept)]
    others = [t for t in read if t.shape[1] >= tokens.shape[1] or not torch.equal(t, tokens[:, : t.shape[1]])]
    return not read or is_coded or bool(others)


@check("future-leak", "certain", at="probe")
def future_leak(seen: Evidence) -> Lines:
    """If one token is replaced, the prediction changes whose target it is, of a causal model or of shifted targets."""
    probe = seen.probe
    if probe is None:
        return
    for kind in dict.fromkeys((probe.scored, "training_step")):  # validation may also continue a prefix
        if kind in probe.batches and (remedy := _leak(probe, kind)):
            yield Line(f"each prediction depends on the token that it is to predict: {remedy}")
            return


def _leak(probe: Probe, kind: str) -> str:
    """The remedy, if predictions of a step depend on the token that they are to predict; else empty."""
    if (count := probe.size(kind)) < 2:
        return ""
    leaves = flatten(probe.batches[kind])
    tokens = [j for j, t in enumerate(leaves) if _are_tokens(t, count)]
    calls = [c for c in probe.base(kind).calls if c.kind in ("cross_entropy", "nll_loss")] if tokens else []
    if not any(c.target.numel() >= 3 * count for c in calls):
        return ""
    shifted = {j for j in tokens for k in tokens if _are_next(leaves[j], leaves[k])}
    # Tokens that are targets, and no shifted inputs, before those of an encoder.
    cut = {j for j in tokens if any(_is_target(leaves[j][:, 1:], c) for c in calls)}  # which the step shifts itself
    tokens.sort(key=lambda j: j in shifted or not (j in cut or any(_is_target(leaves[j], c) for c in calls)))
    first = leaves[tokens[0]]
    place = first.shape[1] // 2
    new = {j: leaves[j].clone() for j in tokens}
    new[tokens[0]][:, place] = first[:, place].roll(1)
    is_shifted = False
    for j in tokens[1:]:
        if _are_next(leaves[j], first):
            new[j][:, place - 1] = new[tokens[0]][:, place]
            is_shifted = True
        elif leaves[j].shape == first.shape and torch.equal(leaves[j], first):
            new[j][:, place] = new[tokens[0]][:, place]
    training = kind == "training_step"
    other = probe.run(kind, replaced(probe, kind, new), training=training, record=False)
    for a, b in zip(probe.base(kind).calls, other.calls, strict=False):
        if a.kind not in ("cross_entropy", "nll_loss") or (pair := changes(a, b)) is None:
            continue
        in_p, in_t = pair
        if not bool(in_t.any()) or float((in_p & in_t).sum()) < 0.9 * float(in_t.sum()):
            continue
        is_cut = tokens[0] in cut and not is_shifted
        same = is_cut or (_is_target(first, a) and not is_shifted)
        # An autoencoder may see all tokens. A model is causal if no earlier position changes.
        is_whole = len(in_p) == (first[:, 1:] if is_cut else first).numel()
        is_causal = is_whole and not bool(in_p.view(count, -1)[:, : place - is_cut].any())
        unchanged = [t for j, t in enumerate(leaves) if isinstance(t, Tensor) and j not in new]
        unchanged += [leaves[j] for j in new if torch.equal(new[j], leaves[j])]
        gets_all = _gets_all(probe.base(kind), first, unchanged)
        if is_shifted or not same or is_causal or (is_cut and is_whole and not gets_all):
            return (
                "the targets are the inputs of the same positions; shift them by one"
                if same and is_causal
                else "use a causal mask, and shift what a decoder gets by one"
            )
    return ""


def _are_next(targets: Tensor, tokens: Tensor) -> bool:
    """Whether targets (N, T) are the next token of each of the tokens (N, T)."""
    return targets.shape == tokens.shape and torch.equal(targets[:, :-1], tokens[:, 1:])


def _is_target(tokens: Tensor, call: Loss) -> bool:
    """Whether tokens (N, T) are the targets of a loss function, in the same order, where it ignores none."""
    if tokens.numel() != call.target.numel():
        return False
    known = call.target.flatten() != call.options.get("ignore_index", -100)
    return bool(known.any()) and torch.equal(tokens.flatten()[known], call.target.flatten()[known])


def _are_tokens(t: Any, count: int) -> bool:
    is_matrix = isinstance(t, Tensor) and t.dtype in INTEGERS and t.ndim == 2
    return is_matrix and len(t) == count and t.shape[1] >= 4


@check("shifted-twice", "likely", at="probe")
def shifted_twice(seen: Evidence) -> Lines:
    """All targets of cross-entropy are the token after the next one of what an embedding gets, and none the next."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < 2:
        return
    layers = {n for n, m in seen.module.named_modules() if isinstance(m, nn.Embedding)}
    given = [
        t for name, t in probe.base(kind).tensors
        if name.removeprefix("the input of ") in layers and t.ndim == 2 and len(t) == count and t.shape[1] >= 6
    ]  # fmt: skip
    calls = [
        c
        for c in probe.base(kind).calls
        if c.kind in ("cross_entropy", "nll_loss") and not c.target.is_floating_point()
    ]
    rows = [
        c.target.reshape(count, -1) for c in calls if c.target.numel() % count == 0 and c.target.numel() >= 4 * count
    ]
    parts = [p for p in flatten(probe.batches[kind]) if isinstance(p, Tensor) and p.ndim == 2]
    for tokens in given:
        # The data have shifted them once; others may predict two ahead on purpose.
        is_shifted = any(_are_next(p, tokens) for p in parts)
        if len(torch.unique(tokens)) < 4 or not rows or not is_shifted:
            continue
        if all(_is_ahead(t, tokens, 2) and not _is_ahead(t, tokens, 1) for t in rows):
            yield (
                "the targets are the token after the next one, as inputs and targets are shifted both by the data and "
                "by the step; shift them once"
            )
            return


@check("shifted-twice", "certain", at="probe")
def labels_of_library(seen: Evidence) -> Lines:
    """A causal model of transformers gets labels that are its inputs shifted by one, and shifts them itself."""
    probe, kind = seen.probe, "training_step"
    parts = [m for m in seen.module.modules() if SHIFTING.search(type(m).__name__) and is_installed(m)]
    if probe is None or kind not in probe.batches or not parts:
        return
    given: list[tuple[str, Any, Any]] = []

    def keep(part: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        given.append((type(part).__name__, tokens, kwargs.get("labels")))

    handles = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in parts]
    try:
        probe.run(kind, probe.batches[kind], training=True, record=False)
    finally:
        for handle in handles:
            handle.remove()
    for name, tokens, labels in given:
        if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor) or tokens.shape != labels.shape:
            continue
        if tokens.ndim == 2 and _is_ahead(labels, tokens, 1) and not _is_ahead(labels, tokens, 0):
            yield (
                f"{name} gets labels that are its inputs shifted by one, and shifts them itself, so it learns the "
                "token after the next one; pass labels=input_ids"
            )
            return


def _is_ahead(targets: Tensor, tokens: Tensor, by: int) -> bool:
    """Whether targets (N, S) are tokens (N, T), a number of places later, where they are not ignored."""
    width = min(targets.shape[1], tokens.shape[1] - by)
    one, other = targets[:, :width], tokens[:, by : by + width]
    known = one >= 0
    return width >= 4 and bool((one == other)[known].all()) and int(known.sum()) >= 4 * len(targets)


@check("missing-targets", "likely", at="probe")
def missing_targets(seen: Evidence) -> Lines:
    """A part of the batch has NaN for missing targets, and the loss depends on the constant that they are set to."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    parts = [t for t in flatten(probe.batches[kind]) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
    base = probe.base(kind)
    given = [t for name, t in base.tensors if name.startswith("the input of ")]
    pairs: list[tuple[Any, Any, Loss | None]] = [(c.prediction, c.target, c) for c in base.calls]
    pairs += [(p, t, None) for a, b in base.differences for p, t in ((a, b), (b, a))]
    for p, t, call in pairs:
        for part in (each for each in parts if each.numel() == t.numel()):
            missing = part.isnan().flatten()
            share = float(missing.float().mean())
            if share <= MISSING or not _is_filled(t.flatten(), part.flatten(), p.flatten(), missing):
                continue
            if any(u.numel() == t.numel() and torch.equal(u.flatten().to(t), t.flatten()) for u in given):
                continue  # they are inputs, too
            value = float(t.flatten()[missing][0])
            if t.is_floating_point() and seen.module.automatic_optimization:
                is_taken = _depends_on(probe, t, missing.view(t.shape))
            else:  # of classes
                options = call.options if call is not None else {}
                is_mean = options.get("reduction") == "mean" and options.get("weight") is None
                is_taken = is_mean and value != options.get("ignore_index")
            if is_taken:
                name = call.kind if call is not None else "a difference in the loss"
                yield (
                    f"{share:.0%} of the targets are missing (NaN), and {name} takes them for {value:g}, as of "
                    "nan_to_num; leave them out of the loss: loss(prediction[known], target[known])"
                )
                return


def _is_filled(t: Tensor, part: Tensor, p: Tensor, missing: Tensor) -> bool:
    """Whether targets are a part of the batch, but for a constant in place of all that are missing."""
    known, filled = part[~missing], t[missing]
    if not len(known) or not bool((t[~missing].to(part) == known).all()) or not bool((filled == filled[0]).all()):
        return False
    is_left_out = len(p) == len(t) and bool((p[missing] == filled).all())
    is_code = float((known == 1).float().mean()) > OF_ONE and float(filled[0]) == 0  # of what is absent
    is_mean = float(filled[0]) != 0 and abs(float(filled[0]) - float(known.mean())) < FILLED * float(known.std())
    return not is_left_out and not is_code and not is_mean


class _Refilled(TorchFunctionMode):
    """Loss functions and differences get other values in place of missing targets."""

    def __init__(self, target: Tensor, missing: Tensor) -> None:
        super().__init__()
        self.target, self.missing = target, missing

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in LOSSES or name in DIFFERENCES:
            args = [self._refill(value) for value in args]
            kwargs = {key: self._refill(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    def _refill(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.requires_grad and is_equal(value, self.target):
            return torch.where(self.missing, value + 1, value)
        return value


def _depends_on(probe: Probe, target: Tensor, missing: Tensor) -> bool:
    """Whether the loss changes with the targets that are missing."""
    kind = "training_step"
    base = probe.run(kind, probe.batches[kind], training=True, record=False)
    with _Refilled(target, missing):
        other = probe.run(kind, probe.batches[kind], training=True, record=False)
    losses = [t.output.get("loss") if isinstance(t.output, dict) else t.output for t in (base, other)]
    one, two = losses
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    return not is_close(one.detach(), two.detach())


@check("ordinal-targets", "likely", at="probe")
def ordinal_targets(seen: Evidence) -> Lines:
    """Of targets of each level of a grade, the first is always 1, and those of the two highest grades are the same."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST:
        return
    parts = [t for t in flatten(probe.batches[kind]) if isinstance(t, Tensor) and t.numel() == count == len(t)]
    if any(_is_binary(t) for t in parts):
        return  # an event, of a time that is cut at the end
    grades = [t.flatten().long() for t in parts if not t.is_complex() and bool((t == t.trunc()).all())]
    for call in probe.base(kind).calls:
        t = call.target
        if t.ndim != 2 or len(t) != count or t.shape[1] < 2 or not _is_binary(t):
            continue
        most = t.shape[1]
        for grade in grades:
            is_whole = int(grade.min()) >= 0 and {most - 1, most} <= {*grade.tolist()} and int(grade.max()) == most
            is_late = torch.equal(t.long().sum(1), (grade + 1).clamp(max=most)) and bool((t.diff(dim=1) <= 0).all())
            if is_whole and is_late:
                yield (
                    f"targets of {call.kind} say for {most} levels whether a grade is at least that high, so the "
                    f"first is always 1, and grades {most - 1} and {most} have the same targets; use grade > level"
                )
                return


def _is_binary(t: Tensor) -> bool:
    return bool(((t == 0) | (t == 1)).all())


@check("first-target-known", "likely", at="probe")
def first_target_known(seen: Evidence) -> Lines:
    """The first of several targets in time is the last value of the inputs, for all samples, and others are not."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < FEWEST:
        return
    series = [
        _by_time(x, 1) for x in flatten(probe.batches[kind])
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim in (2, 3) and len(x) == count
    ]  # fmt: skip
    for p, t in _pairs_of(probe.base(kind)):
        if p.shape != t.shape or t.ndim not in (2, 3) or len(t) != count or t.shape[1] < 2:
            continue
        targets, predicted = _by_time(t, 1), _by_time(p, 1)
        first = targets[:, 0]
        if len(torch.unique(first[:, 0])) < FEWEST // 2 or torch.equal(predicted[:, 0], first):
            continue  # a solution that begins with what it gets
        for x in (x for x in series if x.shape[1] >= FEWEST_TIMES):
            if says(seen.module, RESTORES):
                return  # the present is restored from what is known of it
            if not _is_last(x, first) or _has_more(x, targets) or not probe.module.automatic_optimization:
                continue
            yield (
                f"the first of {t.shape[1]} targets in time is the last of the {x.shape[1]} values that the model "
                "gets, so that the target begins one time too early; begin it one time later"
            )
            return


def _is_last(x: Tensor, first: Tensor) -> bool:
    """Whether values (N, C) are the last of series (N, T, D), of all or of some of their channels."""
    last = x[:, -1]
    if first.shape == last.shape:
        return torch.equal(first, last)
    columns = last[:, :LAYERS].unbind(1)
    return all(any(torch.equal(column, each) for each in columns) for column in first[:, :LAYERS].unbind(1))


def _has_more(x: Tensor, targets: Tensor) -> bool:
    """Whether targets (N, S, C) have other times of series (N, T, D), too, as of what is reconstructed."""
    one = x.flatten(1)
    others = targets[:, 1:, 0].T
    return any(bool((one == each[:, None]).any(1).all()) for each in others)


@check("double-softmax", "certain", at="probe")
def probabilities(seen: Evidence) -> Lines:
    """Cross-entropy gets rows that are at least 0 and sum to 1, all of them."""
    for call in seen.calls:
        p = call.prediction
        if call.kind != "cross_entropy" or p.ndim < 2 or p.shape[1] < 2 or len(p) < FEWEST:
            continue
        if bool((p >= 0).all()) and bool(((p.double().sum(1) - 1).abs() < 1e-4).all()) and float(p.std()) > 0:
            yield (
                f"cross-entropy gets probabilities, {tuple(p.shape)} that sum to 1 over the classes, where it expects "
                "logits, so that learning is slow; remove the softmax, or use nll_loss of their logarithm"
            )
            return


@check("absent-targets", "likely", at="probe")
def absent_targets(seen: Evidence) -> Lines:
    """A regression of several values a place is also trained where the target of binary cross-entropy is 0, on 0."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    calls = probe.base(kind).calls
    masks = [c.target for c in calls if c.kind in BINARY and c.target.ndim > 1]
    for call in (c for c in calls if c.kind in REGRESSIONS and c.options.get("reduction") != "none"):
        for mask in masks:
            if (present := _spread_over(mask, call.target)) is None:
                continue
            zero, share = call.target == 0, float((~present).float().mean())
            if not bool(call.prediction[~present].any()):
                continue  # which are masked, too
            if share > MOSTLY and bool(zero[~present].all()) and float(zero[present].float().mean()) < FEW_ZEROS:
                yield (
                    f"{call.kind} is a mean over all places, but in {share:.0%} of them there is nothing by the target "
                    f"of {tuple(mask.shape)}, and its own values are 0, to which predictions are drawn; compute it "
                    "where there is something: pred[mask], target[mask]"
                )
                return


def _spread_over(mask: Tensor, target: Tensor) -> Tensor | None:
    """Where a mask (N, …) is 1, for a target that has several values in each place; None if it has not."""
    if target.ndim != mask.ndim + 1 or not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
        return None
    for dim in (1, -1):
        if target.shape[dim] > 1 and target.select(dim, 0).shape == mask.shape:
            return mask.bool().unsqueeze(dim).expand_as(target)
    return None
