"""Probes of shapes and inputs: what one pass of the user's step shows, and which inputs matter to the loss."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from boltcutter.diagnosis.calls import is_equal, named_parts, remarks
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, is_metric, tensors_of, values
from boltcutter.diagnosis.graph import name_of, nodes_behind, saved
from boltcutter.diagnosis.loaders import digests, items
from boltcutter.diagnosis.probe import Probe, is_close, seeded
from boltcutter.diagnosis.signs import NEXT
from boltcutter.diagnosis.source import codes_of, own_classes, says
from boltcutter.diagnosis.targets import replaced
from boltcutter.structure import flatten, take_rows, tensors

# Metrics whose mean over batches is not that of all samples; IoU and Dice may be means of pictures.
NOT_ADDITIVE = re.compile(
    r"(^|[/_\-. ])(f1|fbeta|auc|auroc|roc_?auc|auprc|average_precision|r2|pearsonr?|spearmanr?|cohen_?kappa|qwk|mcc"
    r"|c_?index|concordance)($|[/_\-. 0-9@])",
    re.IGNORECASE,
)
NOT_ADDITIVE_CLASS = re.compile("F1|FBeta|AUROC|AveragePrecision|R2|Pearson|Spearman|Kappa|Matthews|Concordance")
BEFORE = ("on_validation_start", "on_validation_epoch_start")
MANY = 64  # values of a tensor, fewer of which may be equal by chance
LARGE = 1000.0  # size of a column, and its ratio to that of the others
MOST_DROPPED = 0.7  # share of conditions
UNUSED = 0.25  # share of an input without influence
FEWEST = 4  # nodes of a split
SIDE = 8  # pixels, and pictures
ALIKE, UNLIKE = 0.1, 0.05  # correlations of neighbours
COLORED = 0.03  # share of the variance that is of colors
ENDS = re.compile(r"(^|_)(not_)?(dones?|terminals?|terminated|is_last)($|_)")
SPLIT = re.compile(r"(^|\.)train(ing)?(_(masks?|idx|index|indices|ids|nodes))?$")
EVENTS = re.compile(r"(^|_)(events?|censored|censoring|uncensored|event_indicators?|is_event)($|_)", re.IGNORECASE)
ANEW = re.compile(r"^on_(validation|test|fit|load|save)|state|^setup$")
DISCOUNTS, REWARDS = re.compile(r"gamma|discount", re.IGNORECASE), re.compile(r"reward|(^|_)rews?($|_)|^r$")
OF_BODY = re.compile(r"(^|_)(age|height|sex|gender|bmi)($|_)", re.IGNORECASE)
WEIGHTS = re.compile(r"^(.*(?<!edge)_)?weights?$")
NEEDED = re.compile("|".join(part.pattern for part in (ENDS, EVENTS, NEXT, SPLIT, WEIGHTS)), re.IGNORECASE)


@check("channels-flattened", "certain", at="probe")
def channels_flattened(seen: Evidence) -> Lines:
    """Logits are flattened to rows while their classes are still dimension 1."""
    yield from remarks(seen, "channels-flattened")


@check("reshape-not-transpose", "likely", at="probe")
def reshape_not_transpose(seen: Evidence) -> Lines:
    """A reshape only exchanges the sizes of a tensor, so it mixes its rows."""
    if seen.probe is None or any(remark.check == "channels-flattened" for remark in seen.remarks):
        return
    for line in remarks(seen, "reshape-not-transpose"):
        traces = [seen.probe.with_copy(kind, training=kind == "training_step") for kind in seen.probe.batches]
        # With another number of samples, sizes that are exchanged by chance are no longer.
        if any(t is None or any(each.check == "reshape-not-transpose" for each in t.remarks) for t in traces):
            yield line


@check("reshape-not-transpose", "likely", at="probe")
def channels_reshaped(seen: Evidence) -> Lines:
    """Rows of pictures of 2 to 4 channels, or times of series, are like the next ones only if read in another order."""
    probe = seen.probe
    for t in flatten(probe.batches.get("training_step", ())) if probe is not None else ():
        is_data = isinstance(t, Tensor) and t.ndim > 2 and not t.is_complex() and len(t) >= SIDE
        if is_data and t.ndim == 4 and 2 <= t.shape[1] <= 4 and min(t.shape[2:]) >= SIDE:
            yield from _channels_of_pictures(t.double())
        elif is_data and t.ndim == 3 and t.is_floating_point() and 2 <= t.shape[1] <= t.shape[2] >= SIDE:
            yield from _channels_of_series(t.double())


def _channels_of_pictures(t: Tensor) -> Lines:
    x, (count, channels, height, width) = t - t.mean(0), t.shape
    if _likeness(x[:, :, 1:], x[:, :, :-1]) <= -UNLIKE:
        return  # a pattern that recurs after as many rows as there are channels makes neighbours unlike
    x = x - x.mean((1, 2, 3), keepdim=True)
    as_given, beside = _likeness(x[:, :, 1:], x[:, :, :-1]), _likeness(x[..., 1:], x[..., :-1])
    last, first = x.reshape(count, height, width, channels), x.movedim(1, 3).reshape(t.shape).movedim(1, 3)
    for read, remedy in (
        (last, "channels were last, and a reshape has only exchanged the sizes; use permute(2, 0, 1)"),
        (first, "channels were first, and a reshape has taken them for the last; use reshape(C, H, W)"),
    ):
        down, across = _likeness(read[:, 1:], read[:, :-1]), _likeness(read[:, :, 1:], read[:, :, :-1])
        # Of pictures of few colors, channels differ, read otherwise, but are the same as they are.
        colors, own = (float(means.var(1, correction=0).mean()) for means in (read.mean((1, 2)), x.mean((2, 3))))
        is_colored = down > as_given + COLORED and colors > COLORED * float(x.var()) and own < colors / 10
        is_wider = read is last or across > beside + COLORED  # as of rows that are one color each
        if across > down / 3 and is_wider and (is_colored or down > max(as_given + ALIKE, 1.5 * as_given)):
            yield (
                f"pictures {tuple(t.shape)} have rows that are like the next one ({down:.2f}) only if their values are "
                f"read in another order, and not as they are ({as_given:.2f}): {remedy}"
            )
            return


def _channels_of_series(t: Tensor) -> Lines:
    x, (count, channels, times) = t - t.mean(0), t.shape
    read = x.reshape(count, times, channels)
    as_given = max(_likeness(x[:, :, 1:], x[:, :, :-1]), _likeness(x[:, 1:], x[:, :-1]))
    along = _likeness(read[:, 1:], read[:, :-1])
    if -UNLIKE < as_given < ALIKE + UNLIKE and along > 2 * (as_given + ALIKE):
        yield (
            f"series {tuple(t.shape)} have times that are like the next one ({along:.2f}) only if their values are "
            f"read as {tuple(read.shape)}, and not as they are ({as_given:.2f}): channels were last, and a reshape "
            "has only exchanged the sizes; use transpose"
        )


def _likeness(a: Tensor, b: Tensor) -> float:
    """The correlation of values whose mean is 0."""
    return float((a * b).mean() / (a.square().mean().sqrt() * b.square().mean().sqrt() + 1e-12))


@check("in-place", "certain", at="probe")
def in_place(seen: Evidence) -> Lines:
    """The samples of the dataset differ after a training step on a batch of them."""
    probe, splits = seen.probe, seen.splits
    loader = splits.train if splits else None
    dataset = getattr(loader, "dataset", None)
    before = digests(dataset, 128)
    if before is not None and changes_its_samples(dataset):
        yield Line(
            "the dataset changes its own samples when it reads them, so that changes add up from epoch to epoch; copy "
            "a sample before it is changed in place",
            subject="dataset",
        )
        return
    if (
        probe is None
        or loader is None
        or before is None
        or before != digests(dataset, 128)
        or "training_step" not in probe.batches
    ):
        return  # random, or no dataset with indices
    with seeded(0):
        fresh = next(iter(loader))
    trainer = probe.trainer
    fresh = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(fresh))
    originals = tensors(fresh)
    kept = [t.clone() for t in originals]
    probe.run("training_step", fresh, training=True, copies=False, record=False)
    pairs = [*zip(originals, kept, strict=True)]
    # Else the step sets data by their indices, such as soft labels.
    is_of_batch = any(not torch.equal(t.nan_to_num(), value.nan_to_num()) for t, value in pairs)
    changed = is_of_batch and digests(dataset, 128) != before
    for tensor, value in pairs:
        tensor.copy_(value)  # which may be the samples themselves
    if changed:
        yield (
            "training_step changes its batch in place, and with it the data, which are changed again in each epoch; "
            "compute new tensors instead (x = x / 2, not x.div_(2))"
        )


def changes_its_samples(dataset: Any) -> bool:
    """Whether what was read of a sample changes when it is read again, or the row of an array of which it was read."""
    owners = [dataset, getattr(dataset, "dataset", None)]
    values = [v for owner in owners for v in getattr(owner, "__dict__", {}).values()]
    arrays = [v for v in values if isinstance(v, np.ndarray) and v.dtype.kind in "iuf" and v.flags.writeable]
    arrays = [v for v in arrays if v.ndim > 1 and len(v) >= len(dataset)]
    rows = [v[0].copy() for v in arrays]
    with seeded(0):
        first = [t for t in tensors_of([*items(dataset, range(1))]) if t.numel()]
        kept = [t.clone() for t in first]
        after = [v[0].copy() for v in arrays]
        again = [*items(dataset, range(1))]  # kept, so that no memory is used again
        changed = any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, kept, strict=True))
        with torch.no_grad():
            for t, value in zip(first, kept, strict=True):
                t.copy_(value)
        for array, row, later in zip(arrays, rows, after, strict=True):  # each reading has changed it
            if not np.array_equal(row, array[0], equal_nan=array.dtype.kind == "f"):
                changed |= not np.array_equal(row, later) and not np.array_equal(later, array[0])
                array[0] = row
    del again
    return changed


def input_gradients(seen: Evidence) -> list[tuple[int, Tensor, Tensor]]:
    """Of each floating-point part of the batch its index, value, and the gradient of the loss, where that is not 0."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return []
    leaves = flatten(probe.batches["training_step"])
    count = probe.size("training_step")
    parts = {
        j: t.detach().clone().requires_grad_()
        for j, t in enumerate(leaves)
        if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1 and len(t) == count
    }
    found: list[Tensor | None] = []

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            found.extend(torch.autograd.grad(loss, [*parts.values()], allow_unused=True))

    if parts:
        batch = replaced(probe, "training_step", parts)
        with suppress(RuntimeError):  # of a step that changes its inputs in place
            probe.run("training_step", batch, training=True, record=False, then=differentiate)
    gradients = zip(parts, found, strict=False)
    return [(j, leaves[j], grad) for j, grad in gradients if grad is not None and bool(grad.any())]


@check("nonfinite-gradient", "certain", at="probe")
def nonfinite_gradient(seen: Evidence) -> Lines:
    """The loss of the first batch is finite, and the gradient of a weight is not; names where it arises."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    weights = {name: p for name, p in probe.module.named_parameters() if p.requires_grad}
    lost, places = list[str](), list[str]()

    def watch(node: Any) -> Any:
        def look(results: Any, given: Any) -> None:
            if not places and _is_finite(given) and not _is_finite(results):
                places.append(name_of(node))

        return node.register_hook(look)

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.grad_fn is not None and loss.numel() == 1 and bool(loss.isfinite()):
            # Those of weights are nodes of all graphs.
            hooks = [
                watch(node) for node in nodes_behind(loss.grad_fn) if name_of(node) != "torch::autograd::AccumulateGrad"
            ]
            try:
                found = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
                lost.extend(n for n, g in zip(weights, found, strict=True) if not _is_finite([g]))
            except RuntimeError:  # of reentrant checkpoints
                return
            finally:
                for hook in hooks:
                    hook.remove()

    if weights:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=differentiate)
    if lost:
        place = f"the derivative of {places[0].lower()}" if places else "a derivative"
        yield (
            f"the loss is finite, but the gradient of {some(lost)} is not, as {place} is NaN or infinite, as at 0 or "
            "in a branch that where() leaves out; add a small number, or clamp, before it"
        )


def _is_finite(tensors: Any) -> bool:
    return all(bool(values(t).isfinite().all()) for t in tensors if isinstance(t, Tensor))


@check("constant-input", "certain", at="probe")
def constant_input(seen: Evidence) -> Lines:
    """All values of the inputs are equal, though the loss depends on them."""
    assert seen.probe is not None
    for j, value, _ in input_gradients(seen):
        leaves = flatten(seen.probe.batches["training_step"])
        wide = [t for t in leaves if isinstance(t, Tensor) and t.ndim and t.numel() > MANY]
        wide = [t for t in wide if t.ndim > 1 or len(t) != len(value)]  # as edges, and not targets
        # Beside data, a mask of ones is none.
        if value.numel() > MANY and all(bool((t == t.flatten()[0]).all()) for t in wide):
            yield (
                f"all values of part {j} of the batch, {tuple(value.shape)}, are {float(value.flatten()[0]):g}; "
                "correct how the data are read or scaled"
            )


@check("unused-input", "note", at="probe")
def unused_input(seen: Evidence) -> Lines:
    """A quarter of an input or more has no influence on the loss."""
    for j, value, grad in input_gradients(seen):
        used = grad.ne(0).flatten(1).any(0)
        share = float((~used).float().mean())
        if share >= UNUSED:
            places = (~used).view(value.shape[1:]).nonzero()
            ends = zip(places.min(0).values.tolist(), places.max(0).values.tolist(), strict=True)
            yield (
                f"{share:.0%} of part {j} of the batch, of shape {tuple(value.shape[1:])}, has no influence on the "
                f"loss: [{', '.join(f'{low}–{high}' for low, high in ends)}]; is that meant?"
            )


@check("scaled-twice", "likely", at="probe")
def scaled_twice(seen: Evidence) -> Lines:
    """Pictures have values of 0 to 1/255, which are whole numbers of 0 to 255 divided by 255 twice."""
    for j, t in enumerate(flatten(seen.probe.batches.get("training_step", ())) if seen.probe else ()):
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.ndim != 4 or t.numel() < MANY:
            continue
        whole = t.double() * 255 * 255
        high = float(t.max())
        if 0 < high <= 1.01 / 255 and float(t.min()) >= 0 and float((whole - whole.round()).abs().max()) < 0.05:
            yield (
                f"part {j} of the batch, {tuple(t.shape)}, has values of 0 to {high:.2g}: it was divided by 255 twice, "
                "as by ToTensor() and once more; divide once"
            )


@check("unused-part", "likely", at="probe")
def unused_part(seen: Evidence) -> Lines:
    """A step of training reads no part whose name says that it is needed: ends, next states, events, weights, rows."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    for name in dict.fromkeys(probe.base("training_step").unread):
        if SPLIT.search(name) and not _has_others(probe, name):
            continue
        if "." in name and not SPLIT.search(name):
            continue  # of something beside the samples
        is_next = bool(NEXT.search(name))
        if is_next and not (says(seen.module, DISCOUNTS) and says(seen.module, REWARDS)):
            continue  # as of cloning, or of returns that the data have
        if ENDS.search(name) and not says(seen.module, REWARDS):
            continue  # as of a model of what follows
        if WEIGHTS.search(name) and any(OF_BODY.search(other) for other in probe.base("training_step").unread):
            continue  # of a patient
        if NEEDED.search(name):
            yield Line(
                f"training_step does not read {name!r} of its batch; "
                + (
                    "the value after the end of an episode is 0: reward + gamma * (1 - done) * value"
                    if ENDS.search(name)
                    else "the value of what follows is that of the next state: reward + gamma * value(next_state)"
                    if NEXT.search(name)
                    else f"the loss also has samples of validation; use logits[batch[{name!r}]] and its targets"
                    if SPLIT.search(name)
                    else "a time without an event only says that it is later, so those count apart in the likelihood"
                    if EVENTS.search(name)
                    else "multiply the loss of each sample by it, or leave it out of the data"
                ),
                subject=name,
            )


def _has_others(probe: Probe, name: str) -> bool:
    """Whether a loss may have rows that a mask, or indices, of the batch leave out."""
    t = next((part for key, part in named_parts(probe.batches["training_step"]) if key == name), None)
    calls = [call for call in probe.base("training_step").calls if call.target.ndim]
    if t is None or t.is_floating_point():
        return True
    count = int((t != 0).sum()) if bool(((t == 0) | (t == 1)).all()) else t.numel()
    return count < t.numel() or t.dtype != torch.bool if not calls else any(len(c.target) > count for c in calls)


@check("unused-part", "likely", at="probe")
def unused_split(seen: Evidence) -> Lines:
    """The loss has the labels of all nodes in training, or of training in validation, though a mask tells these."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    own = {key: value for key, value in vars(seen.module).items() if key[:1] != "_"}
    held = [*named_parts(own), *((n, b) for n, b in seen.module.named_buffers())]
    named = [*named_parts(probe.batches[kind]), *held]
    masks = [(n, t) for n, t in named if SPLIT.search(n) and t.dtype == torch.bool]
    masks = [(n, t) for n, t in masks if FEWEST < int(t.sum()) < t.numel()]
    if not masks:
        return
    found: list[tuple[Tensor, int]] = []

    def read(loss: Any) -> None:
        for node in nodes_behind(loss.grad_fn) if isinstance(loss, Tensor) else ():
            target = saved(node, "target") if name_of(node) in ("NllLoss", "NllLoss2D") else None
            if target is not None and saved(node, "reduction") != 0:  # of each node, which may be multiplied by a mask
                found.append((target, saved(node, "ignore_index")))

    unread = probe.base(kind).unread
    probe.run(kind, probe.batches[kind], training=True, record=False, then=read)
    later = probe.base("validation_step").calls if "validation_step" in probe.batches else []
    for name, mask in (pair for pair in masks if pair[0] not in unread):
        labels = [t.flatten() for _, t in named if t.numel() == mask.numel() and t.dtype in (torch.int64, torch.int32)]
        for target, ignored in found:
            others = target.flatten()[~mask.flatten()] if target.numel() == mask.numel() else target[:0]
            if any(torch.equal(t, target.flatten()) for t in labels) and bool((others != ignored).any()):
                yield Line(
                    f"the loss has all {mask.numel()} labels, though {name!r} says which {int(mask.sum())} are of "
                    f"training; use logits[{name}] and its targets",
                    subject=name,
                )
                return
        of_training = [t[mask.flatten()] for t in labels]
        if later and all(any(torch.equal(c.target.flatten(), t) for t in of_training) for c in later):
            yield Line(
                f"validation has the labels that {name!r} says are of training; use the mask of validation",
                subject=name,
            )
            return


@check("condition-dropped", "likely", at="probe")
def condition_dropped(seen: Evidence) -> Lines:
    """An embedding gets, for most samples of training, one index in place of their classes, which none of them has."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or (count := probe.size("training_step")) < MANY // 4:
        return
    classes = [
        t for t in flatten(probe.batches["training_step"])
        if isinstance(t, Tensor) and t.shape == (count,) and not t.is_floating_point() and t.dtype != torch.bool
    ]  # fmt: skip
    embeddings = {name for name, part in seen.module.named_modules() if isinstance(part, nn.Embedding)}
    for name, t in probe.base("training_step").tensors:
        layer = name.removeprefix("the input of ")
        if layer not in embeddings or layer == name or t.shape != (count,):
            continue
        kept = [t == each for each in classes]
        value = t.mode().values
        share = float((t == value).float().mean())
        is_dropped = any(torch.equal(same, t != value) and bool(same.any()) for same in kept)
        if is_dropped and share > MOST_DROPPED and not any(bool((each == value).any()) for each in classes):
            yield (
                f"{layer} gets {int(value)} for {share:.0%} of the samples, in place of their class, as of a condition "
                "that is dropped at random: is the comparison of the random numbers reversed?"
            )
            return


@check("metric-shared", "likely", at="probe")
def metric_shared(seen: Evidence) -> Lines:
    """A metric that is logged or computed is updated in training and in validation."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    both = [probe.base(kind) for kind in ("training_step", "validation_step")]
    logged = {id(value) for trace in both for value in trace.logged.values() if is_metric_object(value)}
    codes = codes_of(seen.module)
    computes = any("compute" in code.co_names for code in codes)
    metrics = dict(seen.module.named_modules())
    for name in sorted(both[0].metrics & both[1].metrics):
        is_of_batches = not any(value is metrics[name] for value in both[0].logged.values())
        if is_of_batches and any(code.co_name in BEFORE and "reset" in code.co_names for code in codes):
            continue  # training logs only values of batches, and validation begins anew
        if computes or id(metrics[name]) in logged:
            yield (
                f"{name} is updated in training and in validation, so each of its values mixes both; create a metric "
                "for each"
            )
            return


@check("averaged-metric", "likely", at="probe")
def averaged_metric(seen: Evidence) -> Lines:
    """A validation of several batches logs the mean of a number of each batch that is named as F1, AUC, R2 and such."""
    probe = seen.probe
    if probe is None or "validation_step" not in probe.batches or seen.splits is None:
        return
    with suppress(KeyError, TypeError):  # of no loader, or one of unknown length
        base, count = probe.base("validation_step"), probe.size("validation_step")
        kinds = {name: base.of_metrics.get(name, "") for name in base.averaged}
        names = sorted(n for n, kind in kinds.items() if NOT_ADDITIVE.search(n) or NOT_ADDITIVE_CLASS.search(kind))
        names = [n for n in names if count > 1 and not _is_additive(probe, n, count)]
        loader = seen.splits.loaders["validation"]
        if names and len(loader) > 1:
            batches = getattr(loader, "batch_sampler", None)
            is_grouped = type(batches) is not BatchSampler or batches.batch_size < count  # as by user
            yield Line(
                f"{names[0]} is computed for each batch, and the mean of these is logged, which is not its value for "
                "all samples; update a metric of torchmetrics, and log it",
                "note" if is_grouped else None,
            )


def _is_additive(probe: Probe, name: str, count: int) -> bool:
    """Whether a number of a batch is the mean of those of its halves, as of an area under the curve of each sample."""
    half, found = count // 2, []
    for first, last in ((0, half), (half, 2 * half), (0, 2 * half)):
        part = take_rows(probe.batches["validation_step"], torch.arange(first, last), count)
        trace = probe.run("validation_step", part, training=False, record=False)
        value = trace.logged.get(name)
        if not isinstance(value, Tensor | float):
            return False
        found.append(float(value))
    one, other, whole = found
    return one != other and abs((one + other) / 2 - whole) < 1e-5 * max(1.0, abs(whole))


def is_metric_object(value: object) -> bool:
    """Whether a value that is logged is a metric."""
    return isinstance(value, nn.Module) and is_metric(value)


@check("unscaled-input", "likely", at="probe")
def unscaled_input(seen: Evidence) -> Lines:
    """A first layer gets pictures of 0 to 255, or that hardly vary, or a table with a column in the thousands."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    layers = dict(seen.module.named_modules())
    for name, t in probe.base("training_step").tensors:
        layer = layers.get(name.removeprefix("the input of "))
        if not name.startswith("the input of ") or not isinstance(layer, nn.Linear | nn.Conv2d) or not t.numel():
            continue
        parts = [leaf for leaf in flatten(probe.batches["training_step"]) if isinstance(leaf, Tensor)]
        are_pictures = any(p.ndim == 4 and p.shape[1] in (1, 3) and p.numel() == t.numel() for p in parts)
        mean, spread = float(t.float().mean()), float(t.float().std())
        if are_pictures and spread < abs(mean) / 50:
            yield (
                f"{name} has pictures of mean {mean:.3g} and deviation {spread:.2g}, as of values of 0 to 1 that are "
                "normalized as if they were 0 to 255; scale them to about 1"
            )
            return
        if not t.is_floating_point() or not any(_has(t, leaf) for leaf in flatten(probe.batches["training_step"])):
            return  # of the batch, after something else
        sizes = t.float().square().mean(0).sqrt() if t.ndim == 2 else t.float().square().mean().sqrt()
        is_bytes = t.ndim == 4 and t.shape[1] in (1, 3) and 100 < float(t.max()) <= 255 and bool((t == t.round()).all())
        is_uneven = t.ndim == 2 and float(sizes.max()) > LARGE and float(sizes.max()) > LARGE * float(sizes.median())
        if is_bytes or is_uneven:
            what = (
                "pixels of 0 to 255" if is_bytes else f"column {int(sizes.argmax())} of size {float(sizes.max()):.0f}"
            )
            yield (
                f"{name} has {what}, as the data have it, beside initial weights for inputs of about 1; standardize "
                "the inputs, or begin with a BatchNorm"
            )
        return


def _has(t: Tensor, leaf: Any) -> bool:
    """Whether a tensor has the values of a part of the batch."""
    return isinstance(leaf, Tensor) and leaf.numel() == t.numel() and torch.equal(leaf.flatten().to(t), t.flatten())


@check("unsaved-state", "likely", at="probe")
def unsaved_state(seen: Evidence) -> Lines:
    """Training changes a tensor that is in no checkpoint, on which predictions of validation depend."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    before = plain_tensors(seen.module)
    after: dict[tuple[str, str], Tensor] = {}

    def read(loss: Any) -> None:
        after.update({key: t.detach().clone() for key, t in plain_tensors(seen.module).items()})

    if before:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=read)
    batch, parts = probe.batches["validation_step"], dict(seen.module.named_modules())
    for (name, key), value in after.items():
        if _is_computed_anew(parts[name], seen.module, key):
            continue
        old = before.get((name, key))
        if (
            old is None
            or old.shape != value.shape
            or torch.equal(old, value)
            or probe.size("training_step") in value.shape
        ):
            continue
        base = probe.run("validation_step", batch, training=False, record=False)
        setattr(parts[name], key, value + value.abs().mean() + 1)
        try:
            other = probe.run("validation_step", batch, training=False, record=False)
        finally:
            setattr(parts[name], key, old)
        pairs = zip(base.calls, other.calls, strict=False)
        if any(a.prediction.shape == b.prediction.shape and not is_close(a.prediction, b.prediction) for a, b in pairs):
            yield (
                f"{name + '.' if name else ''}{key} changes in training and is used in validation, but it is "
                + (
                    "a buffer with persistent=False, so it is in no checkpoint; remove that"
                    if key in parts[name]._buffers
                    else "a plain attribute, so it is in no checkpoint and stays on its device; use register_buffer"
                )
            )
            return


def _is_computed_anew(part: nn.Module, module: nn.Module, key: str) -> bool:
    """Whether a hook before validation computes a tensor anew, or one of checkpoints keeps it."""
    for cls in {*own_classes(type(part)), *own_classes(type(module))}:
        for name, value in vars(cls).items():
            code = getattr(value, "__code__", None)
            names = {*code.co_names, *code.co_consts} if code is not None else set()
            if key in names and ANEW.search(name):
                return True
    return False


def plain_tensors(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Floating-point tensors of layers that are in no checkpoint, by layer and attribute."""
    return {
        (name, key): value
        for name, part in module.named_modules()
        if not is_metric(part)
        for key, value in (*vars(part).items(), *((k, part._buffers[k]) for k in part._non_persistent_buffers_set))
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
    }


@check("unused-part", "likely", at="probe")
def unread_batch(seen: Evidence) -> Lines:
    """No operation of a training step gets any part of its batch, as one of validation does of its own."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    train, held = (probe.base(kind) for kind in ("training_step", "validation_step"))
    given = next(iter(inspect.signature(probe.module.training_step).parameters), "_")
    is_counter = given.startswith("_") or probe.size("training_step") < 2  # which only says how many steps there are
    if held.reads_batch and not train.reads_batch and train.calls and not is_counter:
        other = probe.run("training_step", probe.batches["training_step"], training=True, seed=1)
        inputs = [[t for name, t in trace.tensors if name.startswith("the input of ")] for trace in (train, other)]
        if all(inputs) and not is_equal(inputs[0][0], inputs[1][0]):
            return  # it draws samples
        yield (
            "training_step reads nothing of its batch, so each step has the same samples, which may be those of "
            "validation, too; choose those of the batch"
        )
