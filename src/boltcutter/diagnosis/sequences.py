"""Probes of sequences: what padding and its mask do, whether order matters, and states that are carried over."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from boltcutter.diagnosis.arguments import PADDED
from boltcutter.diagnosis.baselines import baselines
from boltcutter.diagnosis.calls import CLASSES, is_equal
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.data import is_shuffled
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.graph import Loss
from boltcutter.diagnosis.loaders import items
from boltcutter.diagnosis.probe import Probe, Trace, is_close, kept, seeded, take
from boltcutter.diagnosis.samples import depends_on_padding, is_comparable
from boltcutter.diagnosis.source import is_own_file, says
from boltcutter.diagnosis.targets import replaced
from boltcutter.diagnosis.unread import source_of
from boltcutter.structure import flatten, inputs_of

FEWEST_DRAWN = 32  # indices
FEWEST = 4  # samples, and times
PAIRED = 2000  # samples of which neighbours are counted
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ATTENTION = re.compile("attention|transformer|bert|gpt", re.IGNORECASE)
LENGTHS = re.compile(r"(^|_)(len(gth)?s?|attention_mask|padding_mask|pad_mask)($|_)", re.IGNORECASE)
TRANSFORMERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
ORDERLESS = re.compile(r"Set[A-Z]|[A-Z]\w*Sets?$|DeepSet|[Pp]ermut|[Uu]nordered|[Nn]o positions|[Oo]rder of the")
UNKNOWN = re.compile(
    r"unk|missing|oov|cold_|(^|_)(none|null|absent|empty|other|others|default|guest|new|nothing|dropped|uncond\w*)(_|$)|"
    r"anonym|absen|unseen|unlabel|no_(?!grad)\w+",
    re.IGNORECASE,
)
CELLS = (nn.RNNBase, nn.RNNCellBase)
RARE, FREQUENT = 0.15, 0.3  # share of tokens
# Code that gives what it does not know a number.
DEFAULTS = re.compile(r"\.get\([^()]*, |default_index|defaultdict|\bunk|oov|missing|drop(ped)?_?(words?|tokens?)", re.I)
EMPTY_CELLS = re.compile(r"isna|isnull|fillna|\bnan\b|cat\.codes|factorize", re.IGNORECASE)  # of tables
MANY_ROWS = 256  # samples that are read
MANY_STEPS = 3  # in time


class Padding(NamedTuple):
    """A part of the batch that is padded, and the one that says where.

    Args:
        part: Index of the padded part.
        values: It, shape (N, T, …).
        valid: Where it is no padding, shape (N, T).
    """

    part: int
    values: Tensor
    valid: Tensor


def paddings(leaves: list[Any], count: int) -> Iterator[Padding]:
    """Parts that have one value behind the end of each sample, by a mask or lengths in the same batch."""
    tensors = [(j, t) for j, t in enumerate(leaves) if isinstance(t, Tensor) and t.ndim and len(t) == count]
    for j, values in tensors:
        if values.ndim < 2 or values.shape[1] < FEWEST:
            continue
        length = values.shape[1]

        for k, mask in tensors:
            valid = _valid(mask, length) if k != j else None
            if valid is None or bool(valid.all()) or not bool(valid[:, 0].all()):
                continue
            padded = values[~valid]
            is_padded = padded.numel() and bool((padded == padded.flatten()[0]).all())
            if is_padded and not _is_mask(values):
                yield Padding(j, values, valid)
                break


def _is_mask(t: Tensor) -> bool:
    return bool(((t == 0) | (t == 1)).all())


def _valid(t: Tensor, length: int) -> Tensor | None:
    """Where a mask, or lengths, say that there is no padding; None if it is neither."""
    if t.ndim == 2 and t.shape[1] == length and _is_mask(t):
        valid = t.bool()
        valid = valid if bool(valid[:, 0].all()) else ~valid  # of torch's masks, True is padding
        is_prefix = torch.equal(valid, valid.long().cummin(1).values.bool())
        return valid if is_prefix else None
    if t.ndim == 1 and t.dtype in INTEGERS and int(t.min()) > 0 and int(t.max()) <= length and int(t.max()) > 1:
        return torch.arange(length, device=t.device) < t[:, None]
    return None


def first_results(call: Loss, count: int, length: int) -> Tensor | None:
    """Predictions of each sample, or, of one for each time, those of the first time, shape (N, …); None for others."""
    p: Tensor = call.prediction
    t: Tensor = call.target
    if p.ndim and len(p) == count and (t.ndim == 0 or t.numel() == count or p.ndim < 3):
        return p.reshape(count, -1)
    if p.ndim >= 2 and len(p) == count * length:
        return p.reshape(count, length, -1)[:, 0]
    if p.ndim == 3 and len(p) == count and length in p.shape[1:]:
        return (p if p.shape[1] == length else p.transpose(1, 2))[:, 0]
    return None


def moved(one: Trace, other: Trace, count: int, length: int, rows: Any = slice(None)) -> bool | None:
    """Whether the predictions of two passes differ, for some rows; None if there are none that can be compared."""
    found = []
    for a, b in zip(one.calls, other.calls, strict=False):
        p, q = first_results(a, count, length), first_results(b, count, length)
        if p is not None and q is not None and p.shape == q.shape and p.is_floating_point():
            found.append(not is_close(p[rows], q[rows]))
    return any(found) if found else None


def permuted_within(values: Tensor, places: Tensor) -> Tensor:
    """The values at some places (N, T), each replaced by one of another place that is not padding."""
    new = values.clone()
    rows = places.nonzero()
    donors = values[:, 0].roll(1, 0)  # the first time of another sample, which is never padding
    new[rows[:, 0], rows[:, 1]] = donors[rows[:, 0]]
    return new


@check("padding-in-loss", "likely", at="probe")
def padded_targets(seen: Evidence) -> Lines:
    """Cross-entropy has targets where tokens are padding, over 5% of all, which are one class that is not ignored."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    pads = {m.padding_idx for m in probe.module.modules() if isinstance(m, nn.Embedding)} - {None}
    count = probe.size("training_step")
    tokens = [t for t in flatten(probe.batches["training_step"]) if len(pads) == 1 and _are_padded(t, count)]
    for call in probe.base("training_step").calls:
        target, options = call.target, call.options
        if call.kind not in CLASSES or target.is_floating_point() or options.get("reduction") == "none":
            continue
        for t in tokens if options.get("weight") is None else ():
            is_pad = t == next(iter(pads))
            ends = is_pad.flip(1).cummin(1).values.flip(1)  # of which all that follows is padding
            if target.numel() != t.numel() or not torch.equal(is_pad, ends) or float(is_pad.float().mean()) < 0.05:
                continue
            (kinds, of_tokens) = (target.reshape(t.shape)[where].unique().tolist() for where in (is_pad, ~is_pad))
            if len(kinds) == 1 < len(of_tokens) and kinds[0] != options.get("ignore_index"):
                yield (
                    f"{float(is_pad.float().mean()):.0%} of the targets of cross-entropy are {kinds[0]} where the "
                    "tokens are padding (padding_idx), which it learns to predict; pad targets with -100, which it "
                    "ignores, and leave them out of metrics"
                )
                return


@check("masked-matters", "likely", at="probe")
def masked_matters(seen: Evidence) -> Lines:
    """Predictions depend on what a mask or lengths say is padding, by attention or a cell, or no step reads them."""
    for inverted, text in mask_findings(seen):
        if not inverted:
            yield text


@check("mask-inverted", "certain", at="probe")
def mask_inverted(seen: Evidence) -> Lines:
    """Predictions depend on what a mask says is padding, and not on the rest; or attention leaves out all tokens."""
    for inverted, text in mask_findings(seen):
        if inverted:
            yield text


def mask_findings(seen: Evidence) -> Iterator[tuple[bool, str | Line]]:
    """Whether a mask is inverted, and the line."""
    probe = seen.probe
    if probe is None or (count := probe.size(kind := probe.scored)) < FEWEST:
        return
    masks = probe.base(kind, training=False).masks
    leaves = flatten(probe.batches[kind])
    padded_parts = {j: valid for j, _, valid in paddings(leaves, count)}
    for j, t in enumerate(leaves):
        is_known = j in padded_parts and any(_leaves_out(mask, padded_parts[j]) for mask in masks)
        if is_known or (_are_padded(t, count) and any(_is_inverted(mask, t) for mask in masks)):
            yield (
                True,
                f"attention leaves out the content of part {j} of the batch {tuple(t.shape)}, and not its padding: the "
                "mask is inverted; True is padding for nn.MultiheadAttention and masked_fill, and what counts for "
                "scaled_dot_product_attention",
            )
            return
    if not is_comparable(probe, kind):
        return
    base = probe.base(kind, training=False)
    for j, values, valid in paddings(flatten(probe.batches[kind]), count):
        by_padding = _after(probe, base, kind, j, permuted_within(values, ~valid))
        if not by_padding:
            continue
        inner = valid.clone()
        inner[:, 0] = False
        padded = (~valid).any(1) & inner.any(1)  # a sample without padding has only content to attend to
        by_content = _after(probe, base, kind, j, permuted_within(values, inner), padded)
        # A cell may have forgotten all content by the end of the padding.
        forgets = not has_attention(probe.module) and any(isinstance(m, CELLS) for m in probe.module.modules())
        if by_content is False and bool(padded.any()) and not forgets:
            yield (
                True,
                (
                    f"predictions depend on what is padding in part {j} of the batch, {tuple(values.shape)}, and not "
                    "on what is none: the mask is inverted; in torch's key_padding_mask, True is padding"
                ),
            )
            return
        if depends_on_padding(probe, kind) is False:  # the module knows what is padding by its number
            return
        is_sequential = has_attention(probe.module) or any(isinstance(m, CELLS) for m in probe.module.modules())
        # Of a mask that is read, convolutions still reach one place beyond the end.
        is_convolved = any(isinstance(m, nn.Conv1d) and max(m.kernel_size) > 1 for m in probe.module.modules())
        is_read = not any(PADDED.search(name) for name in probe.base("training_step").unread)
        is_sequential = is_sequential and not (is_convolved and is_read)
        is_sequential |= any(LENGTHS.search(name) for name in probe.base("training_step").unread)
        yield (
            False,
            Line(
                f"predictions depend on what is padding in part {j} of the batch, {tuple(values.shape)}, although a "
                "mask or lengths are beside it; pass them to the model, and leave padding out of attention, means and "
                "last states",
                None if is_sequential else "note",
            ),
        )
        return


def _are_padded(t: Any, count: int) -> bool:
    is_matrix = isinstance(t, Tensor) and t.dtype in INTEGERS and t.ndim == 2 and len(t) == count
    return is_matrix and t.shape[1] >= FEWEST and not _is_mask(t)


def _is_inverted(mask: Tensor, tokens: Tensor) -> bool:
    """Whether a mask leaves out all tokens, and nothing of what fills the ends of rows; it may have one more column."""
    ends, length = ends_of(tokens), tokens.shape[1]
    filled = ends < length
    valid = torch.arange(length, device=tokens.device) < ends[:, None]
    if mask.ndim != 2 or len(mask) != len(tokens) or mask.shape[1] - length not in (0, 1) or int(filled.sum()) < 2:
        return False
    return any(_leaves_out(part, valid) for part in (mask[:, :length], mask[:, -length:]))


def _leaves_out(mask: Tensor, valid: Tensor) -> bool:
    """Whether a mask leaves out all that is valid, and nothing else, of the samples that are padded."""
    filled = ~valid.all(1)
    return mask.shape == valid.shape and bool(filled.any()) and torch.equal(mask[filled], valid[filled])


def _after(probe: Probe, base: Trace, kind: str, j: int, new: Tensor, rows: Any = slice(None)) -> bool | None:
    other = probe.run(kind, replaced(probe, kind, {j: new}), training=False, record=False)
    return moved(base, other, len(new), new.shape[1], rows)


def has_attention(module: nn.Module) -> bool:
    """Whether a layer attends."""
    return any(isinstance(m, TRANSFORMERS) or ATTENTION.search(type(m).__name__) for m in module.modules())


@check("padding-is-token", "likely", at="probe")
def padding_is_a_number(seen: Evidence) -> Lines:
    """An embedding gets one number for each sample, of which the padding_idx is frequent, and no name says unknown."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or says(seen.module, UNKNOWN):
        return
    count, parts = probe.size("training_step"), flatten(probe.batches["training_step"])
    inputs = dict(reversed([(n, t) for n, t in probe.base("training_step").tensors if n.startswith("the input of ")]))
    found = {n: inputs.get(f"the input of {n}") for n, m in seen.module.named_modules() if isinstance(m, nn.Embedding)}
    columns = [column for part in parts if _is_table(part, count) for column in part.unbind(1)]
    several = [t for t in found.values() if t is not None and any(is_equal(c, t) for c in columns)]
    for name, layer in seen.module.named_modules():
        t = found.get(name)
        if not isinstance(layer, nn.Embedding) or layer.padding_idx is None or t is None or t.shape != (count,):
            continue
        # A layer of its own for each column has categories; a column of tokens may be read one by one.
        is_category = any(is_equal(t, each) for each in several) and len(several) > 1
        if not is_category and not any(isinstance(part, Tensor) and is_equal(part, t) for part in parts):
            continue
        if layer.padding_idx == 0 and EMPTY_CELLS.search(_files_beside(seen)):
            continue
        share = float((t == layer.padding_idx).float().mean())
        if count >= 2 * FEWEST and share >= 1 / layer.num_embeddings and share > 0.01:
            yield (
                f"{name} gets one number for each sample, and {share:.0%} of them are its padding_idx "
                f"({layer.padding_idx}), whose embedding stays 0 and is never trained; leave padding_idx out"
            )
            return


@check("drawn-from-others", "likely", at="probe")
def drawn_from_others(seen: Evidence) -> Lines:
    """Random indices of an embedding are all below the size of another, smaller one; those of the batch are not."""
    probe, kind = seen.probe, "training_step"
    layers = {f"the input of {n}": m for n, m in seen.module.named_modules() if isinstance(m, nn.Embedding)}
    sizes = {m.num_embeddings for m in layers.values()}
    if probe is None or kind not in probe.batches or len(sizes) < 2:
        return
    passes = [*zip(probe.base(kind).tensors, probe.repeated(kind, seed=1).tensors, strict=False)]
    fixed: dict[str, list[Tensor]] = {name: [] for name in layers}  # what is not drawn
    for (name, one), (_, two) in passes:
        if name in layers and is_equal(one, two):
            fixed[name].append(one)
    for (name, one), (_, two) in passes:
        if name not in layers or one.shape != two.shape or one.numel() < FEWEST_DRAWN or is_equal(one, two):
            continue
        count, most = layers[name].num_embeddings, max(int(one.max()), int(two.max())) + 1
        for size in (size for size in sizes if most <= size < 0.9 * count and most > 0.8 * size):
            share = max((float((t >= size).float().mean()) for t in fixed[name]), default=0)
            own = (t for n, t in probe.base(kind).tensors if n in layers and layers[n].num_embeddings < count)
            if share > 0.1 and not any(is_equal(one, t) for t in own):  # else they are of both
                yield (
                    f"random indices of {name.removeprefix('the input of ')}, which has {count} rows, are all below "
                    f"{size}, the size of another embedding, though {share:.0%} of those of the batch are not; draw "
                    f"them below {count}"
                )
                return


def _is_table(part: Any, count: int) -> bool:
    return isinstance(part, Tensor) and part.dtype in INTEGERS and part.ndim == 2 and len(part) == count


@check("order-ignored", "likely", at="probe")
def order_ignored(seen: Evidence) -> Lines:
    """Predictions of a transformer are the same if the tokens between the first and the last are reversed."""
    probe = seen.probe
    if probe is None or not has_attention(probe.module) or (count := probe.size(kind := probe.scored)) < FEWEST:
        return
    leaves = flatten(probe.batches[kind])
    tokens = [
        j for j, t in enumerate(leaves)
        if isinstance(t, Tensor) and t.ndim == 2 and len(t) == count and t.shape[1] >= 6 and not _is_mask(t)
        and t.dtype in INTEGERS
    ]  # fmt: skip
    if not tokens or not is_comparable(probe, kind) or _are_fields(leaves[tokens[0]]):
        return
    base = probe.base(kind, training=False)
    length = leaves[tokens[0]].shape[1]
    new = {j: leaves[j].clone() for j in tokens if leaves[j].shape[1] == length}
    if len(new) > 1:  # one may be the target of another one
        return
    (first,) = new.values()
    short = ends_of(first)
    for i, end in enumerate(short.tolist()):
        first[i, 1 : end - 1] = first[i, 1 : end - 1].flip(0)
    other = probe.run(kind, replaced(probe, kind, new), training=False, record=False)
    sampled = [c for c in base.calls if c.target.numel() == count]
    is_other = not torch.equal(first, leaves[tokens[0]])
    if sampled and is_other and moved(base, other, count, length) is False and ignores(probe, kind, new, length):
        attentive = [m for m in probe.module.modules() if isinstance(m, TRANSFORMERS)]
        sure = any(p.requires_grad for m in attentive for p in m.parameters())  # a frozen one was chosen as it is
        yield Line(
            "predictions do not depend on the order of the tokens: attention knows no positions; add positional "
            "embeddings or encodings to what the first layer gets",
            None if sure and not are_sets(seen) and not says(seen.module, ORDERLESS) else "note",
        )


def _are_fields(tokens: Tensor) -> bool:
    """Whether each column (N, T) has a range of its own, so that a number says by itself where it stands."""
    ranges = sorted(zip(tokens.amin(0).tolist(), tokens.amax(0).tolist(), strict=True))
    return all(one[1] < other[0] for one, other in pairwise(ranges))


def ignores(probe: Probe, kind: str, new: dict[int, Tensor], length: int) -> bool:
    """Whether predictions also stay with other weights: what is 0 at first attends to all places alike."""
    with kept(probe.module), seeded(0), torch.no_grad():
        for weight in probe.module.parameters():
            if weight.is_floating_point() and not bool(weight.any()):
                weight.normal_(std=0.02)
        base, other = (
            probe.run(kind, batch, training=False, record=False)
            for batch in (probe.batches[kind], replaced(probe, kind, new))
        )
    return moved(base, other, probe.size(kind), length) is False


def are_sets(seen: Evidence) -> bool:
    """Whether tokens of training are in no order, and how often each is there tells most of the target; or sorted."""
    if seen.splits is None:
        return False
    samples = [inputs_of(sample) for sample in seen.splits.samples("train")[:PAIRED]]
    if any(isinstance(sample, Mapping | list | tuple) for sample in samples):
        return False
    flat = [torch.as_tensor(sample).reshape(-1) for sample in samples]
    rows = [row[: int(ends_of(row[None]))] for row in flat]
    has_first = len({int(row[0]) for row in rows if len(row)}) == 1  # as [CLS]
    rows = [row[has_first:] for row in rows]
    if all(bool((row[:-1].diff() >= 0).all()) for row in rows):  # the last one may be a single filling
        return True
    _, found = baselines(seen.splits)
    if len(found) < 2 or float(found[-1].errors.mean()) > 0.5 * float(found[0].errors.mean()):
        return False
    pairs, g = torch.cat([torch.stack([row[:-1], row[1:]]) for row in rows], 1), torch.Generator().manual_seed(0)
    shuffled = [row[torch.randperm(len(row), generator=g)] for row in rows]
    others = torch.cat([torch.stack([row[:-1], row[1:]]) for row in shuffled], 1)
    kinds, expected = (len(torch.unique(p, dim=1).T) for p in (pairs, others))
    return abs(kinds - expected) < 0.02 * expected


def ends_of(tokens: Tensor) -> Tensor:
    """The number of tokens of each row before the value that fills its end, shape (N,)."""
    is_fill = tokens == tokens[:, -1:]
    run = is_fill.flip(1).long().cummin(1).values.sum(1)
    return torch.where(run > 1, tokens.shape[1] - run, tokens.shape[1])


@check("state-carried", "likely", at="trial")
def state_carried(seen: Evidence) -> Lines:
    """A recurrent layer begins with a state of an earlier batch, though samples are shuffled."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not is_shuffled(seen):
        return
    held = {
        t.data_ptr()
        for part in probe.module.modules()
        for key, value in vars(part).items()
        if key not in ("_parameters", "_buffers", "_modules")
        for t in flatten(value if isinstance(value, list | tuple | dict | Tensor) else [])
        if isinstance(t, Tensor) and t.numel() and t.is_floating_point() and bool(t.any())
    }
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            state = args[1] if len(args) > 1 else kwargs.get("hx")
            if any(isinstance(t, Tensor) and t.data_ptr() in held for t in flatten(state)):
                found.append(name)

        return hook

    layers = [(n, m) for n, m in probe.module.named_modules() if isinstance(m, CELLS)] if held else []
    handles = [m.register_forward_pre_hook(look(n), with_kwargs=True) for n, m in layers]
    try:
        if handles:
            probe.run("training_step", probe.batches["training_step"], training=True, record=False)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        yield (
            f"{found[0]} begins with the state at the end of the batch before, but samples are shuffled, so it is that "
            "of another sequence; begin with zeros in each batch"
        )


@check("random-state", "likely", at="probe")
def random_state(seen: Evidence) -> Lines:
    """In evaluation, a recurrent layer begins with random numbers that no layer has computed."""
    probe, kind = seen.probe, "training_step"
    layers = [(n, m) for n, m in seen.module.named_modules() if isinstance(m, CELLS)]
    if probe is None or kind not in probe.batches or not layers or (count := probe.size(kind)) < FEWEST:
        return
    states: dict[str, list[Tensor]] = {}

    def look(name: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            state = flatten(args[1] if len(args) > 1 else kwargs.get("hx"))
            # Of several slots of a sample, random numbers tell which is which.
            is_of_samples = state and isinstance(state[0], Tensor) and count in state[0].shape[:-1]
            if is_of_samples and not state[0].requires_grad:
                states.setdefault(name, []).append(state[0].detach().clone())

        return hook

    handles = [m.register_forward_pre_hook(look(n), with_kwargs=True) for n, m in layers]
    try:
        found, batch = list[dict[str, list[Tensor]]](), probe.batches[kind]
        others = take(batch, torch.arange(probe.size(kind)).roll(1))
        for seed, each in ((0, batch), (1, batch), (0, others)):
            if found and not found[0]:
                return
            probe.run(kind, each, training=False, seed=seed, record=False)
            found.append({**states})
            states.clear()
    finally:
        for handle in handles:
            handle.remove()
    is_supervised = any(
        isinstance(t, Tensor) and t.shape == c.target.shape and torch.equal(t, c.target)
        for c in probe.base(kind).calls
        for t in flatten(batch)
    )  # else it may be what a generator begins with
    for name in found[0].keys() & found[1].keys() & found[2].keys() if is_supervised else ():
        one, other, of_others = (each[name][0] for each in found)
        if any(not is_equal(one, state) for state in found[0][name][1:]):
            continue  # several samples are drawn, of which the best one may be trained
        is_drawn = one.shape == of_others.shape and torch.equal(one, of_others)
        if is_drawn and one.shape == other.shape and one.numel() >= FEWEST and bool((one != other).any(-1).all()):
            yield Line(
                f"{name} begins with random numbers, in evaluation too, so its predictions are others each time; begin "
                "with zeros, or with a learned state",
                subject=name,
            )


@check("padding-in-loss", "likely", at="probe")
def padding_in_loss(seen: Evidence) -> Lines:
    """Over 5% of the targets of cross-entropy, which ignores none, are padding by the mask of the batch."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or (count := probe.size("training_step")) < FEWEST:
        return
    for padding in paddings(flatten(probe.batches["training_step"]), count):
        for call in probe.base("training_step").calls:
            t, valid = call.target, padding.valid
            shifted = valid[:, 1:] if t.numel() == count * (valid.shape[1] - 1) else valid
            is_of_tokens = call.kind == "cross_entropy" and not t.is_floating_point() and t.numel() == shifted.numel()
            if not is_of_tokens or call.options["reduction"] == "none":
                continue
            share = float((~shifted).float().mean())
            if share > 0.05 and not bool((t == call.options["ignore_index"]).any()):
                yield (
                    f"{share:.0%} of the targets of cross_entropy are padding by the mask or lengths of the batch, and "
                    "count as others; set them to -100, which it ignores"
                )
                return


def is_installed(module: nn.Module) -> bool:
    """Whether the class of a module is that of an installed package."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@check("padding-is-token", "likely", at="probe")
def padding_is_token(seen: Evidence) -> Lines:
    """Most tokens that are the padding_idx of an embedding, 1 to 30% of content, have others behind, at many places."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    inputs = dict(reversed([(n, t) for n, t in probe.base("training_step").tensors if n.startswith("the input of ")]))
    for name, layer in seen.module.named_modules():
        t = inputs.get(f"the input of {name}")
        if (
            not isinstance(layer, nn.Embedding)
            or layer.padding_idx is None
            or t is None
            or t.ndim != 2
            or t.shape[1] < 6
            or is_installed(seen.module.get_submodule(name.rpartition(".")[0]))  # whose tokenizer has a token for it
        ):
            continue
        is_pad = t == layer.padding_idx
        at_end = is_pad.flip(1).long().cummin(1).values.flip(1).bool()
        at_begin = is_pad.long().cummin(1).values.bool()
        inner = is_pad & ~at_end & ~at_begin
        share = float(inner.sum() / (~at_end & ~at_begin).sum().clamp_min(1))
        is_token = float(inner.float().mean()) > 0.01 and share < FREQUENT  # not an empty field of a board
        parts = [p for p in flatten(probe.batches["training_step"]) if isinstance(p, Tensor) and p.shape == t.shape]
        if any(bool((p[inner] != t[inner]).any()) and is_equal(p[~is_pad], t[~is_pad]) for p in parts):
            continue  # tokens are dropped on purpose
        if is_token and float(inner.sum()) > 0.5 * float(is_pad.sum()) and _are_ends_spread(is_pad, at_end):
            is_last = 0 < int(layer.padding_idx) == layer.num_embeddings - 1  # which may stand for what is not known
            yield Line(
                f"{int(layer.padding_idx)}, the padding_idx of {name}, is a token within sequences, so its embedding "
                "stays 0 and is never trained; leave padding_idx out, or shift the tokens by one",
                "note" if is_last else None,
            )
            return


@check("padding-is-token", "likely", at="probe")
def padding_is_a_word(seen: Evidence) -> Lines:
    """The padding_idx of an embedding fills ends of rows, and stands alone between tokens at many places, all along."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys() or says(seen.module, UNKNOWN):
        return
    found = [
        dict(reversed([(n, t) for n, t in probe.base(kind).tensors if n.startswith("the input of ")]))
        for kind in ("training_step", "validation_step")
    ]
    for name, layer in seen.module.named_modules():
        if not isinstance(layer, nn.Embedding) or layer.padding_idx is None:
            continue
        if is_installed(seen.module.get_submodule(name.rpartition(".")[0])):
            continue
        fill = int(layer.padding_idx)
        both = [inputs.get(f"the input of {name}") for inputs in found]
        used = [t for t in both if t is not None and t.ndim == 2 and bool((t[:, :-1] == fill).any())]
        if len(used) < len(both):
            continue
        kinds = zip(("training_step", "validation_step"), used, strict=True)
        # One batch may have few of them.
        if not all(_has_single(t, fill) or _has_single(more_rows(seen, kind, t), fill) for kind, t in kinds):
            continue
        if DEFAULTS.search(_files_beside(seen)):
            continue  # which may stand for tokens that are not known
        yield Line(
            f"{int(layer.padding_idx)}, the padding_idx of {name}, fills the ends of sequences, and is a token within "
            "them, too, whose embedding stays 0 and which a mask leaves out; number tokens from 1",
            subject="filled",
        )
        return


def more_rows(seen: Evidence, kind: str, t: Tensor) -> Tensor:
    """A padded part (N, T) of a batch, but of more samples, collated together; itself if they cannot be read."""
    loader: Any = (
        seen.splits.loaders.get(kind.removesuffix("_step").replace("training", "train")) if seen.splits else None
    )
    leaves = flatten(seen.probe.batches[kind]) if seen.probe else []
    place = next((j for j, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_equal(leaf, t)), None)
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if place is None or collate is None or not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        return t
    with suppress(Exception), seeded(0):  # of samples that cannot be read or joined here
        part = flatten(collate([*items(dataset, range(min(MANY_ROWS, len(dataset))))]))[place]
        if isinstance(part, Tensor) and part.ndim == 2 and part.dtype == t.dtype:
            return part.to(t.device)
    return t


def _files_beside(seen: Evidence) -> str:
    """The source of the files of the module, the data and what these have imported by name."""
    loader = seen.splits.train if seen.splits else None
    owners = [seen.module, getattr(seen.trainer, "datamodule", None), getattr(loader, "dataset", None)]
    owners += [getattr(loader, "collate_fn", None)]
    names = {getattr(each, "__module__", "") for each in owners}
    names |= {getattr(v, "__module__", "") for n in names for v in vars(sys.modules.get(n, types)).values()}
    own = [n for n in names if isinstance(n, str) and n in sys.modules]
    return "\n".join(source_of(n) for n in sorted(own) if is_own_file(getattr(sys.modules[n], "__file__", None)))


def _has_single(t: Tensor, fill: int) -> bool:
    """Whether a number fills the ends of many rows (N, T), and is at single places of several columns within them.

    It is rare within them, unlike an empty field of a board, and not at the end of each segment.
    """
    if t.ndim != 2 or t.shape[1] < 2 * FEWEST or len(t) < 2 * FEWEST:
        return False
    is_fill = t == fill
    at_end = is_fill.flip(1).long().cummin(1).values.flip(1).bool()
    inner = is_fill & ~at_end
    share = float(inner.sum() / (~at_end).sum().clamp_min(1))
    ends = float((at_end.sum(1) > 1).float().mean())
    alone = inner[:, 1:-1] & ~is_fill[:, :-2] & ~is_fill[:, 2:]
    is_padded = ends >= max(0.2, 10 * share**2) and 0.003 < share < RARE
    return is_padded and int(alone.sum()) >= 2 * FEWEST and _are_ends_spread(is_fill, at_end)


def _are_ends_spread(is_fill: Tensor, at_end: Tensor) -> bool:
    """Whether what fills rows (N, T) is followed by tokens at many columns, unlike the ends of segments of a row."""
    followed = (is_fill & ~at_end)[:, :-1] & ~is_fill[:, 1:]
    columns = (~at_end)[:, 1:].sum(0) >= len(is_fill) / 4  # in which several rows have a token behind
    count, number = int(columns.sum()), int(followed[:, columns].sum())
    expected = count * (1 - math.exp(-number / max(1, count)))
    return count >= FEWEST and float(followed.any(0)[columns].sum()) > 0.7 * expected


@check("cut-gradient", "likely", at="probe")
def state_is_cut(seen: Evidence) -> Lines:
    """A recurrent cell gets its last state without a gradient at each of several steps in time."""
    probe, kind = seen.probe, "training_step"
    cells = {n: m for n, m in seen.module.named_modules() if isinstance(m, nn.GRUCell | nn.LSTMCell | nn.RNNCell)}
    if probe is None or kind not in probe.batches or not cells:
        return
    states: dict[str, list[tuple[Tensor | None, Tensor]]] = {name: [] for name in cells}

    def keep(name: str) -> Any:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            given = args[1][0] if len(args) > 1 and isinstance(args[1], tuple) else args[1] if len(args) > 1 else None
            states[name].append((given, output[0] if isinstance(output, tuple) else output))

        return hook

    hooks = [cell.register_forward_hook(keep(name)) for name, cell in cells.items()]
    try:
        probe.run(kind, probe.batches[kind], training=True, record=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(probe.base(kind).calls) >= MANY_STEPS:
        return  # each time may have a loss of its own
    for name, calls in states.items():
        pairs = [(new, old) for (_, old), (new, _) in pairwise(calls) if new is not None and old.requires_grad]
        same = [new for new, old in pairs if new.shape == old.shape and torch.equal(new, old)]
        if len(calls) > MANY_STEPS and len(same) == len(calls) - 1 and not any(t.requires_grad for t in same):
            yield (
                f"{name} gets its last state without a gradient at each of {len(calls)} steps in time, so it learns "
                "nothing that takes two steps; detach the state between batches only"
            )
            return
