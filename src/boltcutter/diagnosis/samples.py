"""Probes of samples: whether their results depend on other samples, or on their place in the batch, in evaluation."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.data import is_shuffled
from boltcutter.diagnosis.evidence import Evidence, is_metric, tensors_of
from boltcutter.diagnosis.probe import Probe, Trace, are_joined, is_close, take, tolerance
from boltcutter.diagnosis.source import codes_of, own_classes, says
from boltcutter.structure import map_tensors, take_rows

PADS = re.compile(r"(PAD|pad|PADDING|padding)(_?(ID|IDX|INDEX|TOKEN|id|idx|index|token))*$")
MOST_STAY = 0.6  # share of the samples: of equal length, some have another place
OVER_BATCH = re.compile(r"virtual_?batch|mini_?batch_?(std|stddev|disc)", re.IGNORECASE)  # layers that mean it
FEWEST = 4  # samples of a batch
MOST_COLUMNS = 4  # by which a loss may sort samples
SAME = 1e-3  # relative difference of losses
DRAWN = re.compile(r"(^|[._])(eps|epsilon|noise)(_|$)")  # a buffer that is drawn anew by each pass
MIXES = re.compile(r"mix(up|ture|er)|cutmix", re.IGNORECASE)
SEEDS = frozenset(("manual_seed", "set_rng_state", "fork_rng", "isolate_rng", "default_rng", "RandomState"))
SEQUENTIAL = (nn.MultiheadAttention, nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def layouts(t: Tensor, count: int) -> Iterator[Tensor]:
    """The tensor with the samples as dimension 0, in each way in which they may be arranged."""
    for d in range(min(t.ndim, 3)):
        if t.shape[d] == count:
            yield t.movedim(d, 0)
    if t.ndim and len(t) > count and len(t) % count == 0:
        yield t.reshape(count, -1)
        times = len(t) // count
        # As of two directions, each with all samples, which have several positions.
        for outer in (n for n in range(2, times + 1) if times % n == 0):
            yield t.reshape(outer, count, -1).movedim(1, 0)


def are_kept(a: Tensor, b: Tensor, keep: slice, count: int) -> bool:
    """Whether the rows of some samples are the same in some layout; True if there are no samples in it."""
    pairs = [*zip(layouts(a, count), layouts(b, count), strict=True)]
    return not pairs or any(is_close(x[keep], y[keep]) for x, y in pairs)


def are_reversed(a: Tensor, b: Tensor, count: int) -> bool:
    """Whether the rows are in reverse order in some layout; True if there are no samples in it."""
    pairs = [*zip(layouts(a, count), layouts(b, count), strict=True)]
    return not pairs or any(is_close(x, y.flip(0)) for x, y in pairs)


def are_permuted(a: Tensor, b: Tensor, most: int) -> bool:
    """Whether most rows of one are rows of the other, in any order, as after sorting; False if there are no rows."""
    if a.shape != b.shape or not a.ndim or not a.is_floating_point() or len(a) < most:
        return False
    distances = torch.cdist(a.reshape(len(a), -1).float(), b.reshape(len(b), -1).float(), p=math.inf)
    return int((distances.min(1).values <= tolerance(a)).sum()) >= most


def is_comparable(probe: Probe, kind: str) -> bool:
    """Whether a pass of evaluation can be repeated, and fits no weights, as MAML does within validation."""
    base, again = probe.base(kind, training=False), probe.repeated(kind, seed=0)
    same = all(is_close(a, b) for (_, a), (_, b) in zip(base.tensors, again.tensors, strict=False))
    count, tensors = probe.size(kind), tensors_of(probe.batches[kind])
    if any(t.shape == (count, count) or numbers_rows(t, count) for t in tensors[1:]) or are_joined(tensors):
        return False  # relations between the rows, as of the nodes of a graph
    if kind == "training_step" and says(probe.module, MIXES):
        return False  # each is mixed with another one on purpose
    return same and not base.is_packed and not (kind == "validation_step" and base.with_grad)


def numbers_rows(t: Tensor, count: int) -> bool:
    """Whether a tensor that is not of the rows has their numbers, as the edges of a graph have those of its nodes."""
    if t.dtype not in (torch.int64, torch.int32) or not t.ndim or not t.numel() or len(t) == count:
        return False
    return int(t.min()) == 0 and int(t.max()) == count - 1


def halves(probe: Probe) -> Iterator[tuple[slice, Trace]]:
    """Passes of evaluation with one half of the samples, while the others are copies of one of these."""
    kind = probe.evaluated
    count = probe.size(kind)
    half = count // 2
    for keep, donor in ((slice(0, half), 0), (slice(half, count), count - 1)):
        rows = torch.full((count,), donor)
        rows[keep] = torch.arange(count)[keep]
        yield keep, probe.run(kind, take(probe.batches[kind], rows), training=False)


@check("mixing", "likely", at="probe")
def mixing(seen: Evidence) -> Lines:
    """In evaluation, results of kept samples change if the others become copies of one of them; so for both halves."""
    probe = seen.probe
    if probe is None or (count := probe.size(probe.evaluated)) < FEWEST or not is_comparable(probe, probe.evaluated):
        return
    base = probe.base(probe.evaluated, training=False)
    for keep, other in halves(probe):
        if [(n, t.shape) for n, t in other.tensors] != [(n, t.shape) for n, t in base.tensors]:
            return  # the samples decide what is computed
        if base.random is None or other.random is None or not torch.equal(base.random, other.random):
            return  # or how many numbers are drawn, as of Gamma distributions
        for i, ((name, a), (_, b)) in enumerate(zip(base.tensors, other.tensors, strict=True)):
            if (
                (a.is_floating_point() or a.is_complex())
                and is_of_samples(probe, name, a, count)
                and not are_kept(a, b, keep, count)
                and not are_permuted(a, b, keep.stop - keep.start)
                and has_rows(probe, base, i, count)
            ):
                yield _mixing_line(probe, name, base, a, count)
                return
        for x, y in zip(base.calls, other.calls, strict=False):
            same_shapes = x.prediction.shape == y.prediction.shape and x.target.shape == y.target.shape
            if not same_shapes or are_kept(x.prediction, y.prediction, keep, count) or not x.target.ndim:
                continue
            if not is_close(x.target, y.target) and are_kept(x.target, y.target, keep, count):
                # By no layer, so rather by the loss, as of prototypes that are means of other samples.
                yield Line(f"what {x.kind} gets for a sample depends on the other samples of its batch", "note")


def is_of_samples(probe: Probe, name: str, t: Tensor, count: int) -> bool:
    """Whether a layer gets or returns samples: neither pairs of them in a loss, nor weights that MAML has adapted."""
    part = dict(probe.module.named_modules()).get(name.removeprefix("the input of ").removeprefix("the output of "))
    if part is None or "torch.nn.modules.loss" in {cls.__module__ for cls in type(part).__mro__}:
        return part is None
    is_other = name.startswith("the input of ") and t.ndim > 0 and len(t) != count
    return not (is_other and any(p.shape == t.shape for p in part.parameters()))


def has_rows(probe: Probe, base: Trace, place: int, count: int) -> bool:
    """Whether the dimension of ``layouts`` is that of the samples, and not as large by chance, as one of times."""
    trace = probe.with_copy(probe.evaluated, training=False)
    name, t = base.tensors[place]
    rows = [d for d, size in enumerate(t.shape[:3]) if size == count or (not d and size % count == 0)]
    if trace is None or not rows:
        return True
    # Of a layer that is called several times, as by a search, how often may depend on the samples.
    number = [n for n, _ in base.tensors[:place]].count(name)
    others = [other for n, other in trace.tensors if n == name and other.ndim == t.ndim]
    if not others:
        return True
    other = others[min(number, len(others) - 1)]
    return sum(t.shape[d] != other.shape[d] for d in rows) == 1  # else of pairs of samples


def are_parts(probe: Probe, t: Tensor, count: int) -> bool:
    """Whether rows are within others, of which the batch has no such number: parts of a series, cut in windows."""
    sizes = {size for part in tensors_of(probe.batches[probe.evaluated]) for size in part.shape}
    return t.ndim > 2 and t.shape[0] > 1 and t.shape[0] not in sizes and count in t.shape[1:]


def _mixing_line(probe: Probe, name: str, base: Trace, first: Tensor, count: int) -> Line:
    layer = name.removeprefix("the input of ").removeprefix("the output of ")
    parts = layer.split(".")
    path = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    modules = dict(probe.module.named_modules())
    inside = any(isinstance(modules.get(n), SEQUENTIAL) for n in path)
    shapes = [base.inputs.get(n) for n in path]
    # A dimension of size 1 beside the samples was added by hand: they are meant to be a sequence.
    meant = any(shape and len(shape) == 3 and 1 in shape[:2] and count in shape[:2] for shape in shapes)
    remedy = "remove statistics, softmax or reshapes over the batch"
    if getattr(modules.get(layer), "batch_first", None) is False:
        remedy = "set batch_first=True, as its input begins with the samples"
    part = modules.get(layer)
    is_chosen = getattr(part, "track_running_stats", None) is False  # as an argument of BatchNorm
    is_chosen |= any(OVER_BATCH.search(type(m).__name__) for m in (part.modules() if part is not None else ()))
    return Line(
        "the result for a sample depends on the other samples of its batch, in evaluation mode too, first in "
        f"{name}, so metrics depend on the batch size; {remedy}",
        "note" if is_chosen or (inside and meant) or are_parts(probe, first, count) else None,
    )


@check("position", "likely", at="probe")
def position(seen: Evidence) -> Lines:
    """In evaluation, reversing the order of the samples does not reverse that of the results."""
    probe = seen.probe
    if probe is None or (count := probe.size(probe.evaluated)) < FEWEST or not is_comparable(probe, probe.evaluated):
        return
    kind, module = probe.evaluated, probe.module
    base = probe.base(kind, training=False)
    known = {id(t) for t in (*module.parameters(), *module.buffers())}
    kept = [v for part in module.modules() for v in vars(part).values() if isinstance(v, Tensor | tuple | list)]
    if any(id(v) not in known and count in v.shape for v in tensors_of(kept)):
        return  # a state for each place in the batch, as of a recurrent network, is meant to stay there
    other_seed = probe.repeated(kind, seed=1)
    if probe.draws_by_itself(kind) or any(SEEDS & {*code.co_names} for code in codes_of(module)):
        return  # noise for each place of the batch, the same each time
    flipped = probe.run(kind, take(probe.batches[kind], torch.arange(count).flip(0)), training=False)
    names = [name for name, _ in base.tensors]
    if names != [name for name, _ in flipped.tensors] or names != [name for name, _ in other_seed.tensors]:
        return
    parts = zip(base.tensors, flipped.tensors, other_seed.tensors, strict=True)
    for i, ((name, a), (_, b), (_, c)) in enumerate(parts):
        # Integers may be places on purpose, such as those at which the tokens of each text begin.
        is_same = (
            not (a.is_floating_point() or a.is_complex())
            or a.shape != b.shape
            or is_close(a, b)
            or are_reversed(a, b, count)
            or are_permuted(a, b, count)
        )
        if is_close(a, c) and not is_same and is_of_samples(probe, name, a, count) and has_rows(probe, base, i, count):
            yield Line(
                f"the result for a sample depends on its place in the batch, first in {name}, of shape "
                f"{tuple(a.shape)} with {count} samples; add positions along time, not along the batch",
                "note" if are_parts(probe, a, count) else None,
            )
            return


@check("misaligned", "likely", at="probe")
def results_stay(seen: Evidence) -> Lines:
    """If the samples of a batch are reversed, its targets are reversed, too, but the predictions stay in place."""
    probe = seen.probe
    if probe is None or (count := probe.size(kind := probe.scored)) < FEWEST:
        return
    if are_joined(tensors_of(probe.batches[kind])):
        return
    base, again = probe.base(kind, training=False), probe.repeated(kind, seed=1)
    flipped = probe.run(kind, take(probe.batches[kind], torch.arange(count).flip(0)), training=False, record=False)
    for a, same, b in zip(base.calls, again.calls, flipped.calls, strict=False):
        p, q, t, u = a.prediction, b.prediction, a.target, b.target
        if p.shape != q.shape or t.shape != u.shape or p.ndim == 0 or len(p) != count or t.shape[:1] != (count,):
            continue
        if not is_close(p, same.prediction) or not torch.equal(u, t.flip(0)) or torch.equal(u, t):
            continue
        rows, others = p.reshape(count, -1), q.reshape(count, -1)
        scale = 1e-3 * float(rows.std(0).norm()) + 1e-12
        stays, moves = ((others - r).norm(dim=1) < scale for r in (rows, rows.flip(0)))
        if float(stays.float().mean()) > MOST_STAY and float(moves.float().mean()) < 1 - MOST_STAY:
            yield (
                f"what {a.kind} gets for the samples of a batch does not follow their order, but its targets do, as if "
                "samples are sorted, such as by their length, and not put back: undo the order of the results, or "
                "order the targets alike"
            )
            return


@check("edges-not-shifted", "likely", at="probe")
def edges_not_shifted(seen: Evidence) -> Lines:
    """Edges of a batch of graphs are all among as many nodes as its largest graph has, though there are others."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    parts = [t for t in tensors_of(probe.batches["training_step"]) if t.dtype == torch.int64 and t.ndim and t.numel()]
    for owners in parts:  # of each node, its graph
        steps = owners.diff() if owners.ndim == 1 and len(owners) > FEWEST and not int(owners[0]) else owners[:0]
        graphs = int(owners[-1]) + 1 if len(steps) else 0
        if graphs < FEWEST or bool(((steps < 0) | (steps > 1)).any()):
            continue
        most = int(owners.bincount().max())
        for edges in parts:
            is_pairs = edges.ndim == 2 and 2 in edges.shape and edges.numel() >= len(owners)
            of_edges = [
                t for t in parts if t is not owners and t.ndim == 1 and len(t) > graphs and int(t[-1]) == graphs - 1
            ]
            if not is_pairs or any(bool((t.diff() >= 0).all()) for t in of_edges):
                continue  # a step may add the numbers by the graph of each edge
            if int(edges.min()) >= 0 and int(edges.max()) < most < len(owners):
                yield (
                    f"all edges of the batch, {tuple(edges.shape)}, are among its first {most} nodes, of {len(owners)} "
                    f"in {graphs} graphs: those of later graphs have none; add the number of nodes before a graph to "
                    "its edges"
                )
                return


@check("batch-order", "likely", at="probe")
def batch_order(seen: Evidence) -> Lines:
    """The loss has a cumulative sum over the samples, and changes in evaluation if their order is reversed."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or (count := probe.size("training_step")) < FEWEST:
        return
    if not (name := probe.base("training_step").cumulative):
        return
    if not is_shuffled(seen) or are_joined(tensors_of(probe.batches["training_step"])):
        return  # the order of the samples may be that of time
    columns = [t for t in tensors_of(probe.batches["training_step"]) if t.ndim == 1 and bool((t != t[0]).any())]
    if any(torch.equal(t, t.sort(descending=d).values) for t in columns for d in (False, True)):
        return  # the loader has sorted them
    batch, rows = probe.batches["training_step"], torch.arange(count)

    def loss(order: Tensor) -> Tensor | None:
        part = take_rows(batch, order, count)
        output = probe.run("training_step", part, training=False, record=False).output
        found = output.get("loss") if isinstance(output, dict) else output
        return found.detach() if isinstance(found, Tensor) else None

    base, again, reverse = loss(rows), loss(rows), loss(rows.flip(0))
    if base is None or again is None or reverse is None:
        return
    if is_close(base, again) and not is_close(base, reverse):
        for t in columns[:MOST_COLUMNS]:
            equal = t[:, None] == t
            alone = rows[equal.int().argmax(1) == rows.to(t.device)]  # of equal values the first, as any order is right
            one, other = loss(alone), loss(alone.flip(0))
            if len(alone) <= max(FEWEST, count // 4) or one is None or other is None:
                continue
            if torch.allclose(one, other, rtol=1e-6):
                return  # the loss sorts the samples by it
        yield (
            f"{name} goes over the samples in the order of the batch, which is random, so the loss depends "
            "on it; sort the samples first, as by time"
        )


@check("sum-and-mean", "likely", at="probe")
def sum_and_mean(seen: Evidence) -> Lines:
    """Of copies of a batch, one part of the loss grows with their number, and another one does not."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or (count := probe.size("training_step")) < FEWEST:
        return
    whole, half = torch.arange(count), torch.arange(count // 2)
    first = [_loss(probe, whole, times) for times in (1, 2, 3)]
    noise = abs(_loss(probe, whole, 1, seed=1) - first[0])
    if (parts := _fixed_and_growing(first, noise)) is None:
        return
    # A penalty of the weights may be fixed beside a sum over samples.
    halves = [[_loss(probe, rows, n) for n in (2, 4, 6)] for rows in (half, half + count // 2)]
    one, other = (_fixed_and_growing(each, noise) for each in halves)
    if one and other and all(abs(a - b) > 10 * SAME * abs(a) + 20 * noise for a, b in zip(one, other, strict=True)):
        yield (
            f"of the loss of this batch, {parts[0]:.3g} is a mean over samples, and {parts[1]:.3g} is a sum, which "
            "grows with the batch size, so what counts more depends on it; reduce all terms alike, such as by "
            ".sum(1).mean()"
        )


def _loss(probe: Probe, rows: Tensor, times: int, seed: int = 0) -> float:
    """The loss in evaluation mode of several copies of some samples; NaN if there is none."""
    batch, count = probe.batches["training_step"], probe.size("training_step")
    try:
        chosen = take_rows(batch, rows.repeat(times), count)
        output = probe.run("training_step", chosen, training=False, seed=seed, record=False).output
    except (IndexError, RuntimeError, ValueError, AssertionError):  # of a step for one size of batches
        return math.nan
    loss = output.get("loss") if isinstance(output, dict) else output
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan


def _fixed_and_growing(losses: list[float], noise: float) -> tuple[float, float] | None:
    """The parts of a loss of 1, 2 and 3 batches that are the same, and proportional to their number; None: others."""
    step, next_step = losses[1] - losses[0], losses[2] - losses[1]
    fixed, least = losses[0] - step, SAME * abs(losses[0]) + 20 * noise
    # Those of pairs grow with the logarithm of their number, or with its square.
    is_even = abs(step - next_step) <= min(SAME * abs(step) + 6 * noise, 0.1 * abs(step))
    return (fixed, step) if is_even and abs(step) > least and abs(fixed) > least else None


@check("updated-in-validation", "likely", at="probe")
def updated_in_validation(seen: Evidence) -> Lines:
    """A layer changes a floating-point buffer in evaluation mode, as it does in training."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    both = probe.base("training_step").buffers & probe.base("validation_step").buffers
    buffers, metrics = dict(probe.module.named_buffers()), [n for n, m in probe.module.named_modules() if is_metric(m)]
    count = probe.size("validation_step")
    names = [
        n for n in sorted(both)
        if n in buffers and buffers[n].is_floating_point() and "." in n and count not in buffers[n].shape
        and not DRAWN.search(n)
        and not any(n.startswith(f"{metric}.") for metric in metrics)
    ]  # fmt: skip
    names = [n for n in names if _is_kept(probe, n)]
    if names:
        yield (
            f"{some(names)} is updated in validation, too, so what is trained afterwards depends on validation data; "
            "update it only if self.training"
        )


def _is_kept(probe: Probe, name: str) -> bool:
    """Whether the loss of a training step, or the buffer after it, depends on the value that a buffer has before."""
    buffer, found = probe.module.get_buffer(name), list[Tensor]()
    old = buffer.clone()

    def read(loss: Any) -> None:
        values = [loss.get("loss") if isinstance(loss, dict) else loss, probe.module.get_buffer(name)]
        found.append(torch.cat([t.detach().flatten().float().cpu() for t in values if isinstance(t, Tensor)]))

    try:
        for factor in (1, 2):
            buffer.copy_(factor * old + factor - 1)
            probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=read)
    finally:
        buffer.copy_(old)
    return len(found) < 2 or not torch.equal(*found)


@check("global-seed", "likely", at="probe")
def step_seeds(seen: Evidence) -> Lines:
    """After training_step, the generator of torch is in the same state, whatever it was before."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    one = probe.base("training_step").random
    two = probe.run("training_step", probe.batches["training_step"], training=True, seed=1, record=False).random
    if one is not None and two is not None and torch.equal(one, two):
        yield (
            "training_step seeds torch, so dropout and augmentation draw the same numbers in each step; remove the "
            "call of manual_seed or seed_everything, or use a torch.Generator"
        )


def random_in_validation(seen: Evidence) -> list[str]:
    """The tensors of a validation step that depend on random numbers, in the order in which they are computed."""
    probe = seen.probe
    if probe is None or "validation_step" not in probe.batches:
        return []
    base, other = probe.base("validation_step"), probe.repeated("validation_step", seed=1)
    return [name for (name, a), (_, b) in zip(base.tensors, other.tensors, strict=False) if not is_close(a, b)]


@check("random-validation", "note", at="probe")
def random_validation(seen: Evidence) -> Lines:
    """In validation, results depend on random numbers."""
    if random_in_validation(seen):
        yield "validation_step draws random numbers, so its metrics vary; compare means of several validations"


DROPS = re.compile("drop", re.IGNORECASE)
MASKS = re.compile("patch|token|mask", re.IGNORECASE)
ON_PURPOSE = re.compile("mc|monte|bayes|concrete|always", re.IGNORECASE)  # dropout that estimates uncertainty


@check("dropout-in-validation", "likely", at="probe")
def own_dropout(seen: Evidence) -> Lines:
    """In evaluation, the output of a layer of the user's own named as dropout depends on random numbers."""
    for name in random_in_validation(seen)[:1]:  # what follows depends on the first
        layer = name.removeprefix("the output of ")
        kind = type(dict(seen.module.named_modules()).get(layer))
        own = not kind.__module__.startswith("torch.") and DROPS.search(kind.__name__)
        if MASKS.search(kind.__name__):
            continue  # what is hidden, and is to be restored
        if own and not ON_PURPOSE.search(kind.__name__):
            yield (f"{layer} ({kind.__name__}) drops values in validation, too; return its input if not self.training")


@check("padding-matters", "likely", at="probe")
def padding_matters(seen: Evidence) -> Lines:
    """In evaluation, predictions of a model with attention change if a batch gets one more column of padding."""
    probe = seen.probe
    if probe is None:
        return
    if depends_on_padding(probe, probe.scored):
        attends = any("attention" in type(m).__name__.lower() for m in probe.module.modules())
        yield Line(
            "predictions for a sample depend on how far its batch is padded; pass the mask of padding to attention "
            "and leave padding out of means",
            # A maximum of convolutions or a last state is often taken like this.
            None if attends or _averages_padding(probe, probe.scored) else "note",
        )


def _averages_padding(probe: Probe, kind: str) -> bool:
    """Whether embeddings (N, T, D) are averaged over T, and T differs between training and validation."""
    widths, found = set[int](), False
    for each in probe.batches:
        layers = {n for n, m in probe.module.named_modules() if isinstance(m, nn.Embedding)}
        outputs = [t for n, t in probe.base(each).tensors if n.removeprefix("the output of ") in layers and t.ndim == 3]
        widths |= {t.shape[1] for t in outputs[:1]}
        later = [t for n, t in probe.base(each).tensors if n.startswith("the input of ")]
        found |= any(is_close(t, out.mean(1)) for out in outputs for t in later if t.shape == out.mean(1).shape)
    return found and len(widths) > 1


def depends_on_padding(probe: Probe, kind: str) -> bool | None:
    """Whether predictions change with one more column of padding; None if that cannot be tried."""
    if (padded := one_more_column(probe, kind)) is None or not is_comparable(probe, kind):
        return None
    try:
        other = probe.run(kind, padded, training=False, record=False)
    except (IndexError, RuntimeError, ValueError):  # of positions that end, or another fixed length
        return None
    pairs = zip(probe.base(kind, training=False).calls, other.calls, strict=False)
    found = [(a.prediction, b.prediction) for a, b in pairs if a.prediction is not None and b.prediction is not None]
    return any(p.shape == q.shape and not is_close(p, q) for p, q in found)


def named_padding(module: nn.Module, tokens: Tensor) -> int | None:
    """The number at the end of most rows of tokens (N, T), if a name of the user's file has it that says padding."""
    last = int(tokens[:, -1].mode().values)
    runs = tokens.eq(last).flip(1).long().cumprod(1).sum(1)  # at the end of rows
    if int(runs.max()) < 2 or int(runs.min()) == int(runs.max()):
        return None
    files = {cls.__module__ for part in module.modules() for cls in own_classes(type(part))}
    names = {n: v for f in files for n, v in vars(sys.modules.get(f, types)).items() if isinstance(v, int)}
    return last if any(v == last and type(v) is int and PADS.match(n) for n, v in names.items()) else None


def one_more_column(probe: Probe, kind: str) -> Any:
    """The batch with one more column of padding; None without padded tokens, of which an embedding knows the index."""
    batch, count = probe.batches[kind], probe.size(kind)
    pads = {m.padding_idx for m in probe.module.modules() if isinstance(m, nn.Embedding)} - {None}
    tensors = [t for t in tensors_of(batch) if t.ndim == 2 and len(t) == count and t.shape[1] > 1]
    tokens = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool and int(t.max()) > 1]
    if not pads and tokens and (number := named_padding(probe.module, tokens[0])) is not None:
        pads = {number}
    if len(pads) != 1 or not tokens:
        return None
    (pad,) = pads
    is_pad = tokens[0].eq(pad)  # type: ignore[arg-type]
    ends = is_pad.flip(1).cummin(1).values.flip(1)  # of which all that follows is padding
    if not bool(ends[:, -1].any()) or not torch.equal(is_pad, ends) or bool(is_pad.all(1).any()):
        return None
    row = int(ends[:, -1].nonzero()[0])

    def widen(t: Tensor) -> Tensor:
        if t.ndim != 2 or t.shape != tokens[0].shape:
            return t
        return torch.cat([t, t[row, -1].expand(count, 1)], 1)

    return map_tensors(batch, widen)
