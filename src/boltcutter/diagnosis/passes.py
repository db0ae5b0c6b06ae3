"""Probes of what layers and losses get: repeated passes, the ends of padded samples, masked targets, and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from boltcutter.diagnosis.calls import CLASSES
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, overrides
from boltcutter.diagnosis.graph import REGRESSIONS, Loss
from boltcutter.diagnosis.loaders import items
from boltcutter.diagnosis.probe import STEPS, Trace, kept, seeded
from boltcutter.diagnosis.sequences import paddings
from boltcutter.diagnosis.source import own_classes
from boltcutter.structure import flatten

FEWEST = 4  # samples, passes and values of a window
MANY = 16  # targets that count
SHARE = 0.25
MOST_KNOWN = 0.9  # share of places
LAYERS = 8  # of the first ones
EXACT = 1e-4  # of a deviation
EPSILON = 0.03  # by which a deviation may be less than 1, as something was added to what it is divided by
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
HOOKS = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_model_eval"),
    *("on_sanity_check_start", "on_fit_start", "on_train_start"),
)


@check("same-passes", "likely", at="probe")
def same_passes(seen: Evidence) -> Lines:
    """Passes of validation, which are stacked or have a deviation, give equal results, and with train() they do not."""
    probe, kind = seen.probe, "validation_step"
    if probe is None or kind not in probe.batches or _sets_modes(seen):
        return
    base = probe.base(kind)
    count = base.identical
    if count < FEWEST or not _gets_same(base, count):
        return
    calls = [Counter(n for n, _ in probe.base(each).tensors) for each in STEPS if each in probe.batches]
    if all(any(n >= count for n in each.values()) for each in calls) and len(calls) > 1:
        return  # training makes as many passes, as of several dropout layers before one head
    layers = [part for part in probe.module.modules() if isinstance(part, DROPOUTS)]
    hooks = [part.register_forward_hook(_drop) for part in layers]
    try:
        trained = probe.run(kind, probe.batches[kind], training=True)
    finally:
        for hook in hooks:
            hook.remove()
    if trained.identical >= count:
        return
    with kept(probe.module), seeded(0), torch.no_grad():
        for weight in probe.module.parameters():  # as copies of a network may be equal at first
            if weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.05)
        moved = probe.run(kind, probe.batches[kind], training=False)
    if moved.identical >= count:
        yield (
            f"{count} passes of the same samples in validation give equal results, so they have no deviation: dropout "
            "and all else that is random is off; set the dropout layers to train() for these passes"
        )


def _drop(part: Any, args: Any, output: Tensor) -> Tensor:
    """A forward hook of dropout that is off."""
    return output if part.training else nn.functional.dropout(output, part.p)


def _sets_modes(seen: Evidence) -> bool:
    """Whether a layer has its own train(), or a hook may set the mode of layers."""
    parts = [cls for part in seen.module.modules() for cls in own_classes(type(part))]
    callbacks = [cls for each in seen.trainer.callbacks for cls in own_classes(type(each))]  # type: ignore[attr-defined]
    callbacks = [cls for cls in callbacks if not cls.__module__.startswith("boltcutter.")]
    has_hook = any(overrides(seen.module, hook) for hook in HOOKS)
    has_own = any({"train", "eval"} & {*vars(cls)} for cls in parts)
    return has_hook or has_own or any({*HOOKS} & {*vars(cls)} for cls in callbacks)


def _gets_same(trace: Trace, count: int) -> bool:
    """Whether a layer gets the same input in each pass, or each sample as often in one."""
    inputs: dict[str, list[Tensor]] = {}
    for name, t in trace.tensors:
        if name.startswith("the input of "):
            inputs.setdefault(name, []).append(t)
    for found in inputs.values():
        first = found[0]
        if len(found) >= count and sum(t.shape == first.shape and torch.equal(t, first) for t in found) >= count:
            return True
        if first.ndim > 1 and len(first) % count == 0:
            rows = first.reshape(count, -1), first.reshape(len(first) // count, count, -1).transpose(0, 1)
            if any(bool((part == part[:1]).all()) for part in rows):
                return True
    return False


@check("padded-output", "likely", at="probe")
def padded_output(seen: Evidence) -> Lines:
    """A layer gets 0 for all samples that are shorter than the longest one, in place of the states of a sequence."""
    probe = seen.probe
    if probe is None or not probe.batches:
        return
    kind = probe.evaluated
    base, count = probe.base(kind, training=False), probe.size(kind)
    parts = [t for t in flatten(probe.batches[kind]) if isinstance(t, Tensor)]
    found = [base.lengths] if base.lengths is not None else []
    found += [padding.valid.sum(1).cpu() for padding in paddings(flatten(probe.batches[kind]), count)]
    for lengths in found:
        is_short = lengths < lengths.max()
        if int(is_short.sum()) < max(FEWEST, SHARE * len(lengths)) or len(torch.unique(lengths[is_short])) < FEWEST - 1:
            continue
        for name, t in base.tensors:
            is_state = t.is_floating_point() and t.ndim == 2 and len(t) == len(lengths) and t.shape[1] >= FEWEST
            if not name.startswith("the input of ") or not is_state or _is_any_of(t, parts):
                continue
            rows = t.cpu() != 0
            columns = ~rows[is_short].any(0) & rows[~is_short].all(0)
            zeros = (~rows[is_short]).sum(1)
            shorter = lengths[is_short][:, None] < lengths[is_short]
            is_time = bool((zeros[:, None] > zeros)[shorter].all())  # columns are times, of which the last are padding
            if _longest_run(columns) >= max(FEWEST, SHARE * t.shape[1]) and not is_time:
                yield (
                    f"{name.removeprefix('the input of ')} gets 0 for all {int(is_short.sum())} of {len(lengths)} "
                    "samples that are shorter than the longest: the last time of a padded batch is none of theirs; "
                    "read outputs[torch.arange(N), lengths - 1], or the last state h_n"
                )
                return


def _longest_run(chosen: Tensor) -> int:
    best = run = 0
    for each in chosen.tolist():
        run = run + 1 if each else 0
        best = max(best, run)
    return best


@check("masked-targets", "likely", at="probe")
def masked_targets(seen: Evidence) -> Lines:
    """Most targets that count are one value, which the input has at their places and nowhere else, as of a mask."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    base, again = probe.base(kind), None
    inputs = [(i, t) for i, (name, t) in enumerate(base.tensors[: 4 * LAYERS]) if name.startswith("the input of ")]
    for call in base.calls:
        is_class = call.kind in CLASSES and not call.target.is_floating_point()
        if not is_class and call.kind not in REGRESSIONS:
            continue
        for i, t in inputs:
            value = _masked_value(call, t) if t.is_floating_point() != is_class and t.ndim > 1 else None
            if value is None:
                continue
            again = again or probe.run(kind, probe.batches[kind], training=True, seed=1)
            other = again.tensors[i][1] if i < len(again.tensors) else t
            if (other.shape == t.shape and not torch.equal(other == value, t == value)) or _draws(seen, value):
                yield (
                    f"most targets of {call.kind} that count are {value:g}, which the input has in their places, and "
                    "nowhere else, as of a mask: they were copied after values were masked; copy them before"
                )
                return


def _draws(seen: Evidence, value: float) -> bool:
    """Whether samples, or a batch of the same ones, have a value at other places if they are read again."""
    loader = seen.splits.train if seen.splits else None
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        return False
    places: list[list[Tensor]] = []
    with suppress(Exception):  # of samples that cannot be read or joined here
        for seed in (1, 2):
            with seeded(seed):
                rows = [*items(dataset, range(min(2 * FEWEST, len(dataset))))]
                read = collate(rows) if collate is not None and getattr(loader, "batch_size", None) else rows
                places.append([t == value for t in flatten(read) if isinstance(t, Tensor)])
    one, other = places if len(places) == 2 else ([], [])
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(one, other, strict=False))


def _masked_value(call: Loss, t: Tensor) -> float | None:
    """The value that masks an input, if it is also the target of most masked places; else None."""
    target, own = call.target.flatten(), t.flatten()
    known = target != call.options.get("ignore_index", -100) if call.kind in CLASSES else torch.ones_like(target) == 1
    is_whole = float(known.float().mean()) > MOST_KNOWN and len(target) >= len(own)
    if is_whole or int(known.sum()) < MANY:
        return None
    value = target[known].mode().values
    is_most = float((target[known] == value).float().mean()) > 0.5
    if not is_most or (call.kind in REGRESSIONS and bool((target[known] != value).any())):
        return None
    places = own == value
    if len(target) == len(own):
        is_same = torch.equal(target[known], own[known]) and not bool((places & ~known).any())
    else:  # those of the masked places only
        is_same = len(target) < len(own) and int(places.sum()) == int((target == value).sum())
    return float(value) if is_same and bool((own[~places] != own[~places][:1]).any()) else None


@check("future-leak", "likely", at="probe")
def scaled_with_future(seen: Evidence) -> Lines:
    """Inputs and targets of each sample together have the mean 0 and deviation 1, or the range 0 to 1, exactly."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or (count := probe.size(kind)) < 2 * FEWEST:
        return
    base = probe.base(kind)
    leaves = [t for t in flatten(probe.batches[kind]) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
    inputs = [t for name, t in base.tensors[: 2 * LAYERS] if name.startswith("the input of ")]
    targets = [c.target for c in base.calls if c.kind in REGRESSIONS]
    targets += [t for pair in base.differences for t in pair]
    inputs += leaves
    known = [t for t in inputs if t.ndim and len(t) == count and _is_centered(t)]  # by their own statistics
    pasts = [*_series([t for t in inputs if not any(t is each for each in known)], count)]
    futures = [*_series([t for t in targets + leaves if not _is_any_of(t, inputs[: -len(leaves)] + known)], count)]
    for past, future in product(pasts, futures):
        size = past.values.shape[1] + future.values.shape[1]
        is_centered = abs(past.total + future.total) < EXACT * size
        is_range = abs(min(past.low, future.low)) < EXACT and abs(max(past.high, future.high) - 1) < EXACT
        # Of differences within a step, such as those of a student from its teacher, a range may be so by chance.
        is_range = is_range and not any(future.source is t for pair in base.differences for t in pair)
        is_other = past.source is not future.source and (is_centered or is_range)
        is_other = is_other and bool((future.values != future.values[:1]).any())
        how = _how_scaled(past.values, future.values) if is_other and not _are_drawn(past, future, known) else ""
        if how:
            yield (
                f"{past.values.shape[1]} inputs of each sample and its {future.values.shape[1]} targets together have "
                f"{how}, and the inputs alone have not, so these tell of the targets; compute the statistics of a "
                "window from its inputs only"
            )
            return


class Series(NamedTuple):
    """Values of one channel of each sample, and what is known of those of the first sample.

    Args:
        values: In the order of time, shape (N, T).
        total: Their sum.
        low: The least of them.
        high: The largest of them.
        source: Of what they are a part.
    """

    values: Tensor
    total: float
    low: float
    high: float
    source: Tensor


def _is_centered(t: Tensor) -> bool:
    """Whether the values of each sample, or of each of its channels, have the mean 0."""
    dims = [tuple(range(1, t.ndim)), *((d,) for d in range(1, t.ndim))] if t.ndim > 1 and t.numel() else []
    return any(float(t.double().mean(d).abs().max()) < EXACT for d in dims)


def _are_drawn(past: Series, future: Series, wholes: list[Tensor]) -> bool:
    """Whether both have the values of a part of the batch, but in another order, as of what a mask hides at random."""
    whole = torch.cat([t.reshape(len(t), -1) for t in (past.source, future.source)], 1)
    for t in (t.reshape(len(t), -1) for t in wholes):
        if t.shape == whole.shape and not torch.equal(t, whole):
            return torch.equal(t.sort(1).values, whole.sort(1).values)
    return False


def _is_any_of(t: Tensor, others: list[Tensor]) -> bool:
    return any(t.numel() == each.numel() and torch.equal(t.flatten(), each.flatten().to(t)) for each in others)


def _series(parts: list[Tensor], count: int) -> Iterator[Series]:
    """Channels that may be series; those of a flat part, (N, T * C), are beside or behind each other."""
    for t in parts:
        if not t.is_floating_point() or t.ndim not in (1, 2, 3) or len(t) != count or not t.numel():
            continue
        source, t = t, t.detach().double()
        flat = t.reshape(count, -1)
        layouts = [flat[:, :, None]] if t.ndim < 3 else [t, t.transpose(1, 2)]
        for channels in range(2, FEWEST + 1) if t.ndim == 2 and t.shape[1] >= 2 * FEWEST else ():
            if t.shape[1] % channels == 0:
                layouts += [t.reshape(count, -1, channels), t.reshape(count, channels, -1).transpose(1, 2)]
        for each in (layout[:, :, c] for layout in layouts for c in range(min(layout.shape[2], LAYERS))):
            first = each[0]
            yield Series(each, float(first.sum()), float(first.min()), float(first.max()), source)


def _how_scaled(past: Tensor, future: Tensor) -> str:
    """What inputs and targets of each sample have in common, which inputs alone have not; else empty."""
    whole, size = torch.cat([past, future], 1), past.shape[1] + future.shape[1]
    if past.shape[1] < FEWEST or size < 2 * FEWEST or not bool(whole.isfinite().all()):
        return ""
    if past.shape == future.shape and torch.equal(past, future):
        return ""
    deviations = whole.std(1, correction=0)
    is_unit = [bool(((d > 1 - EPSILON) & (d < 1 + EXACT)).all()) for d in (deviations, whole.std(1))]
    is_centered = float(whole.mean(1).abs().max()) < EXACT and float(past.mean(1).abs().median()) > 100 * EXACT
    if any(is_unit) and is_centered:
        return "the mean 0 and the deviation 1"
    low, high = whole.amin(1), whole.amax(1)
    is_range = float(low.abs().max()) < EXACT and float((high - 1).abs().max()) < EXACT
    without = [((t.amin(1) > EXACT) | (t.amax(1) < 1 - EXACT)).double().mean() for t in (past, future)]
    is_shared = min(map(float, without)) > SHARE / 2
    is_varied = len(torch.unique(future)) > future.numel() / 2 and len(torch.unique(past)) > past.numel() / 4
    ends = torch.stack([past[:, -1], future[:, 0]])
    if is_range and is_shared and is_varied and float(torch.corrcoef(ends)[0, 1]) > 0.3:
        return "the range 0 to 1"
    return ""
