"""Checks of samples and groups that are in two splits: for ``audit``."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice, pairwise
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from boltcutter.diagnosis.arguments import code_of
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.loaders import SECONDS, Splits, digest, first_leaf, items
from boltcutter.diagnosis.probe import is_close, seeded
from boltcutter.diagnosis.source import own_classes, says
from boltcutter.diagnosis.unread import source_of
from boltcutter.structure import flatten, inputs_of, targets_of

DRAWS = 8  # of a random sample
WIDE = 32  # values of a sample, fewer of which may be equal by chance
FEWEST_ROWS = 50  # of a table
GROUPED = re.compile(
    r"subject|speaker|participant|donor|cohort|session_|sessions|recording|domain|per_user|groupby\(|instrument|scanner|"
    r"hospital|batch_effect",
    re.IGNORECASE,
)
GROUPS = re.compile(
    r"^_?(patients?|subjects?|participants?|donors?|volunteers?|animals?)(_?(ids?|index|idx|names?|numbers?|nos?))?$",
    re.IGNORECASE,
)
TOPICS = re.compile(r"^_?(subjects?|animals?)(_?names?)?$", re.IGNORECASE)  # or kinds, if they have no number
DIVIDES = re.compile(r"\b(permutation|randperm|random_split|train_test_split|StratifiedKFold|KFold)\(")
WITHIN_GROUPS = re.compile(
    r"personal|calibrat|within_|per_(subject|patient|user)|embed\w*_(subject|patient)", re.IGNORECASE
)
MANY_DRAWS = 1000
COMMON = 0.2  # share of rows
FEWEST_OF_CLASS = 8  # samples
TIGHT = 0.6  # of the median distance
APART = 1.2  # how much farther than the group the next sample is
MOST_IN_GROUP = 60
WITHIN = 0.8  # share of samples
CLOSE = 0.2  # of the median distance
SMALL = 0.3  # share of a class
MOST_AXES = 4  # of a grid
FEWEST_COPIES = 3  # one or two may be equal by chance, as in iris
MOST_INPUTS = 4096  # of a sample, the first ones
PAIRS = (("train", "validation"), ("train", "test"), ("validation", "test"))


def keys_of(splits: Splits, name: str) -> list[tuple[bytes, int, Any]]:
    """Hash of the inputs of each sample, its size, and itself; without constant ones, such as empty tiles."""
    found = []
    for sample in splits.samples(name):
        leaf = first_leaf(sample)
        if leaf is not None and leaf.numel() >= 4 and not bool((leaf == leaf.flatten()[0]).all()):
            found.append((digest(inputs_of(sample)), leaf.numel(), sample))
    return found


@check("overlap", "likely", at="data")
def overlap(seen: Evidence) -> Lines:
    """Samples are in two splits, by index, or as copies where copies within training are rare."""
    splits = seen.splits
    if splits is None:
        return
    for first, second in PAIRS:
        a, b = splits.dataset(first), splits.dataset(second)
        if a is None or b is None:
            continue
        if isinstance(a, Subset) and isinstance(b, Subset) and a.dataset is b.dataset:
            common = {int(i) for i in a.indices} & {int(i) for i in b.indices}
            if common:
                yield Line(
                    f"{len(common)} of {len(b)} {second} samples are also {first} samples, by index; split once, "
                    "before any shuffle",
                    "certain",
                    subject=second,
                )
                continue
        one, other = keys_of(splits, first), keys_of(splits, second)
        if not one or len(other) < 2:  # a single one, such as a graph, may have a mask for each split
            continue
        counts: dict[bytes, int] = {}
        for key, *_ in one:
            counts[key] = counts.get(key, 0) + 1
        own = sum(n for n in counts.values() if n > 1) / len(one)
        copies = [sample for key, _, sample in other if key in counts]
        shared = len(copies) / len(other)
        is_wide = other[0][1] >= WIDE or _has_fractions(other[0][2])
        is_copied = (
            own < 0.5
            and shared > (0.01 if is_wide else 0.05)  # small samples of integers may be equal by chance
            and len(copies) >= FEWEST_COPIES
            and (shared > 3 * own or (is_wide and shared > max(0.05, 1.5 * own + 4 * math.sqrt(own / len(other)))))
        )
        is_copied = is_copied and len(copies) >= FEWEST_COPIES
        label = copied_class(one, other) if own >= 0.5 and _has_fractions(other[0][2]) else None
        if label is not None:
            yield Line(
                f"{shared:.1%} of the {second} samples are exact copies of {first} samples, most of them of class "
                f"{label}, and hardly any of another one; split before rare samples are copied",
                subject=second,
                sample=copies[0],
            )
        elif is_copied and not (shared == 1 and second == "validation" and divides_samples(seen)):
            is_meant = shared == 1 and (_is_grid(splits.samples(first)) or _have_other_parts(one, other))
            yield Line(
                f"{shared:.1%} of the {second} samples are exact copies of {first} samples, of which only {own:.1%} "
                "are copies of one another; split before shuffling or copying",
                "note" if is_meant else None,
                subject=second,
                sample=copies[0],
            )


def _is_grid(samples: Sequence[Any]) -> bool:
    """Whether samples are all the points of a grid, as those of a field that a network of coordinates fits."""
    points = [leaf.flatten() for sample in samples if (leaf := first_leaf(sample)) is not None]
    if len({len(p) for p in points}) != 1 or len(points[0]) > MOST_AXES:
        return False
    return math.prod(len(torch.unique(axis)) for axis in torch.stack(points).unbind(1)) == len(points)


def _have_other_parts(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether samples of equal inputs have further parts in the second split only, or other targets of many values."""
    known: dict[bytes, list[Any]] = {key: flatten(sample) for key, _, sample in one}
    pairs = [(known[key], flatten(sample)) for key, _, sample in other if key in known]
    if all(len(a) < len(b) for a, b in pairs):
        return True
    targets = [(a[-1], b[-1]) for a, b in pairs]
    return all(isinstance(b, Tensor) and b.numel() >= WIDE and digest(a) != digest(b) for a, b in targets)


def copied_class(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The class of which most samples are copies of ones in the first split, if of another one hardly any are."""
    known = {key for key, *_ in one}
    found: dict[int, list[bool]] = {}
    for key, _, sample in other:
        label = targets_of(sample)
        label = torch.as_tensor(label) if isinstance(label, Tensor | np.ndarray | np.generic | int) else None
        if label is None or label.numel() != 1 or label.is_floating_point():
            return None
        found.setdefault(int(label), []).append(key in known)
    shares = {label: sum(each) / len(each) for label, each in found.items() if len(each) >= FEWEST_OF_CLASS}
    copied = max(shares, key=lambda label: shares[label], default=None)
    return copied if copied is not None and shares[copied] > 0.5 and min(shares.values()) < 0.02 else None


def divides_samples(seen: Evidence) -> bool:
    """Whether the first layer gets something else of the same batch in validation than in training, as of a series."""
    probe, kinds = seen.probe, ("training_step", "validation_step")
    if probe is None or not {*kinds} <= probe.batches.keys():
        return False
    probe.end, probe.most = monotonic() + SECONDS, probe.passes + len(kinds)
    try:
        traces = [probe.run(kind, probe.batches["validation_step"], training=False) for kind in kinds]
    except Exception:  # of the user's code, which may not take the batch
        return False
    first, second = (next((t for name, t in trace.tensors if "input of" in name), None) for trace in traces)
    return first is not None and second is not None and not is_close(first, second)


def _has_fractions(sample: Any) -> bool:
    """Whether a sample has eight numbers with fractions, which are rarely equal by chance."""
    leaf = first_leaf(sample)
    return leaf is not None and leaf.is_floating_point() and int((leaf != leaf.round()).sum()) >= WIDE // 4


def has_groups(seen: Evidence) -> bool:
    """Whether the files of the module and of the data name groups of samples, such as subjects."""
    owners = [seen.module, getattr(seen.trainer, "datamodule", None), *map(seen.splits.dataset, seen.splits.loaders)]  # type: ignore[union-attr]
    names = {cls.__module__ for owner in owners for cls in own_classes(type(owner))}
    return any(GROUPED.search(source_of(name)) for name in names)


@check("shared-rows", "likely", at="data")
def shared_rows(seen: Evidence) -> Lines:
    """Two parts of each sample, as support and query of an episode, have rows in common; in validation, not all."""
    for name in ("train", "validation") if seen.splits else ():
        with seeded(0):
            pairs = [_two_parts(each) for each in _first_samples(seen.splits.dataset(name), DRAWS)]  # type: ignore[union-attr]
        shares = [_share_of_rows(*pair) if pair else 0.0 for pair in pairs]
        is_meant = name == "validation" and min(shares, default=1.0) == 1  # as all points, some of which are given
        if len(shares) >= DRAWS // 2 and min(shares) > COMMON and pairs[0] and not is_meant:
            shapes = " and ".join(str(tuple(t.shape)) for t in pairs[0])
            yield Line(
                f"of two parts of a {'training' if name == 'train' else name} sample, {shapes}, {min(shares):.0%} of "
                "the rows of the smaller one are also in the other one, as if a query were in its own support; choose "
                "them of different samples",
                sample=pairs[0],
            )
            return


def _first_samples(dataset: Any, count: int) -> list[Any]:
    """The first samples of a dataset, or of one pass over it; empty if it has no length."""
    if isinstance(dataset, IterableDataset):
        return [*islice(iter(dataset), count)]
    return [*items(dataset, range(min(count, len(dataset))))] if hasattr(dataset, "__len__") else []


def _two_parts(sample: Any) -> tuple[Tensor, Tensor] | None:
    """The only two parts of a sample that have rows, shape (…, F), of equal size, in two or more dimensions before."""
    leaves = [torch.as_tensor(t) for t in flatten(sample) if isinstance(t, Tensor | np.ndarray)]
    wide = [t for t in leaves if t.is_floating_point() and t.ndim >= 2 and t.numel()]
    if len(wide) != 2 or wide[0].ndim != wide[1].ndim or wide[0].shape == wide[1].shape:
        return None
    same = [a == b for a, b in zip(wide[0].shape, wide[1].shape, strict=True)]
    if sum(not each for each in same) != 1:
        return None
    place = same.index(False) + 1  # up to which dimensions count rows
    rows = tuple(t.flatten(0, place - 1).flatten(1) if t.ndim > place else t[:0] for t in wide)
    is_wide = rows[0].ndim == 2 and rows[0].shape[1] >= WIDE // 2
    return (rows[0], rows[1]) if is_wide else None


def _share_of_rows(one: Tensor, other: Tensor) -> float:
    """The share of the rows of the smaller part that are in the other one; 0 if they are at regular places."""
    keys = [[digest(row) for row in part] for part in sorted((one, other), key=len)]
    places = [keys[1].index(key) for key in keys[0] if key in keys[1]]
    steps = {b - a for a, b in pairwise(places)}
    is_regular = not steps - {1} or (len(places) > FEWEST_COPIES and len(steps) == 1)
    return 0.0 if is_regular else len(places) / len(keys[0])


@check("group-overlap", "likely", at="data")
def group_overlap(seen: Evidence) -> Lines:
    """A group, such as a patient, has samples in two splits, where datasets have an attribute ``groups``."""
    splits = seen.splits
    for first, second in PAIRS if splits else ():
        one, other = (_groups(splits.dataset(name)) for name in (first, second))  # type: ignore[union-attr]
        # Series or users of whom each is one sample are split by time.
        if (common := sorted(map(str, {*one} & {*other}))) and (len({*one}) < len(one) or len({*other}) < len(other)):
            text = f"groups {some(common)} have samples in {first} and {second}; split by group"
            is_part = _are_in_samples(splits.dataset(first), one)  # type: ignore[union-attr]  # such as sexes
            yield Line(text, "note" if is_part else None, subject=second)


def _groups(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset):
        whole = getattr(dataset.dataset, "groups", None)
        return [_plain(whole[i]) for i in dataset.indices] if whole is not None else []
    found = getattr(dataset, "groups", None)
    return [_plain(group) for group in found] if found is not None and not callable(found) else []


@check("group-overlap", "likely", at="data")
def named_groups_overlap(seen: Evidence) -> Lines:
    """Of 8 or more patients, subjects or donors, by names of data that no step reads, one is in two splits."""
    splits = seen.splits
    for first, second in PAIRS if splits else ():
        one, other = (_named_groups(seen, name) for name in (first, second))
        common = one.keys() & other.keys()
        if len(one.keys() | other.keys()) < FEWEST_OF_CLASS or not common:
            continue
        # Of files of their own, one may have the later samples of each.
        whole = [_whole(splits.dataset(name)) for name in (first, second)]  # type: ignore[union-attr]
        are_parts = whole[0] is whole[1] and whole[0] is not splits.dataset(first)  # type: ignore[union-attr]
        places = [(one[group], other[group]) for group in common]
        if are_parts and all(max(a) < min(b) for a, b in places):
            continue
        yield Line(
            f"{some(sorted(map(str, common)))} have samples in {first} and {second}; split by patient or subject "
            "(GroupShuffleSplit)",
            None if are_parts and not says(seen.module, WITHIN_GROUPS) else "note",
            subject=second,
        )


@check("group-overlap", "likely", at="data")
def groups_unread(seen: Evidence) -> Lines:
    """A function that divides samples at random has their patients or subjects, by name, and does not read these."""
    for code in code_of(seen):
        text = ast.unparse(code.tree)
        names = [node for node in ast.walk(code.tree) if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        got = [
            part.id for node in ast.walk(code.tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets if isinstance(target, ast.Tuple)
            for part in target.elts if isinstance(part, ast.Name)
        ]  # fmt: skip
        unread = [name for name in got if GROUPS.match(name) and name not in read]
        if unread and DIVIDES.search(text) and not says(seen.module, WITHIN_GROUPS):
            yield Line(
                f"{code.name} divides the samples at random, and does not read {unread[0]}, so those of each are in "
                f"both splits; divide {unread[0]} (GroupShuffleSplit)",
                subject=code.name,
            )


def _named_groups(seen: Evidence, name: str) -> dict[Any, list[int]]:
    """Groups of the samples of a split, and the places of each in the whole dataset, where these are known."""
    dataset, found = seen.splits.dataset(name), dict[Any, list[int]]()  # type: ignore[union-attr]
    if (pair := _group_column(dataset)) is not None:
        if _are_in_samples(dataset, pair[1]):
            return found
        for place, group in zip(*pair, strict=True):
            found.setdefault(_plain(group), []).append(place)
        return found
    samples = seen.splits.samples(name)  # type: ignore[union-attr]
    keys = [k for k in samples[0] if isinstance(k, str) and GROUPS.match(k)] if _are_mappings(samples) else []
    probe, kind = seen.probe, "training_step"
    if len(keys) != 1 or probe is None or kind not in probe.batches:
        return found
    is_tensor = isinstance(samples[0][keys[0]], int | float | Tensor | np.generic)
    if is_tensor and keys[0] not in probe.base(kind).unread:
        return found  # an input, or a target
    if TOPICS.match(keys[0]) and _are_words([sample[keys[0]] for sample in samples if keys[0] in sample]):
        return found
    for sample in samples:
        if keys[0] in sample and isinstance(group := _plain(sample[keys[0]]), Hashable):
            found.setdefault(group, []).append(0)
    return found


def _are_in_samples(dataset: Any, groups: Sequence[Any]) -> bool:
    """Whether each of the first samples has the number or name of its group."""
    with seeded(0):
        few = [flatten(sample) for sample in items(dataset, range(min(FEWEST_OF_CLASS, len(dataset))))]
    parts = ([_plain(value) for value in leaves if np.size(value) == 1] for leaves in few)
    return all(_plain(group) in values for values, group in zip(parts, groups, strict=False))


def _whole(dataset: Any) -> Any:
    return _whole(dataset.dataset) if isinstance(dataset, Subset) else dataset


def _are_mappings(samples: list[Any]) -> bool:
    return bool(samples) and all(isinstance(sample, Mapping) for sample in samples)


def _group_column(dataset: Any) -> tuple[list[int], list[Any]] | None:
    """Places and groups of all samples of a dataset, by an attribute or a column of a table that says so."""
    if isinstance(dataset, Subset):
        whole = _group_column(dataset.dataset)
        chosen = [int(i) for i in dataset.indices]
        return None if whole is None else ([whole[0][i] for i in chosen], [whole[1][i] for i in chosen])
    attributes = [*getattr(dataset, "__dict__", {}).items()]
    for _, table in attributes:
        if hasattr(table, "columns") and hasattr(table, "iloc"):
            attributes += [(str(c), table[c]) for c in table.columns]
    for name, value in attributes:
        is_column = isinstance(value, list | tuple | Tensor | np.ndarray) or hasattr(value, "iloc")
        if GROUPS.match(name) and name != "groups" and is_column and not hasattr(value, "columns"):
            groups = [*value] if len(value) == len(dataset) else []
            if TOPICS.match(name) and _are_words(groups):
                continue
            if groups and all(isinstance(_plain(g), Hashable) for g in groups):
                return [*range(len(groups))], groups
    return None


def _are_words(values: Sequence[Any]) -> bool:
    return not any(char in "0123456789" for value in values for char in str(value))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and np.prod(value.shape) == 1 else value


@check("group-overlap", "likely", at="data")
def tight_groups(seen: Evidence) -> Lines:
    """Most validation samples lie in small tight groups of training samples with their target, far from all others."""
    tables = [seen.splits.table(name) if seen.splits else None for name in ("train", "validation")]
    if (found := tables[0]) is None or (held := tables[1]) is None or found[0].shape[1:] != held[0].shape[1:]:
        return
    (x, y), (held_x, held_y) = found, held
    if x.shape[1] < FEWEST_ROWS // 6 or len(x) < 2 * FEWEST_ROWS or len(held_x) < FEWEST_ROWS:
        return
    g = torch.Generator().manual_seed(0)
    chosen, rows = torch.randperm(len(x), generator=g)[: 4 * MANY_DRAWS], torch.randperm(len(held_x), generator=g)
    rows = rows[: MANY_DRAWS // 4]
    x, y, held_x = x[chosen, :MOST_INPUTS].nan_to_num(), y[chosen], held_x[rows, :MOST_INPUTS].nan_to_num()
    spread = x.std(0)
    held_x, x = (part[:, spread > 0] / spread[spread > 0] for part in (held_x, x))
    distances = torch.cdist(held_x, x)
    order = distances.sort(dim=1)
    near = order.values < TIGHT * distances.median(dim=1, keepdim=True).values
    sizes = near.sum(1)
    after = order.values.gather(1, sizes.clamp(max=len(x) - 1)[:, None])[:, 0]
    last = order.values.gather(1, (sizes - 1).clamp(min=0)[:, None])[:, 0]
    targets = torch.where(near, y[order.indices], held_y[rows].to(y.dtype)[:, None])
    is_one = (targets == held_y[rows].to(y.dtype)[:, None]).all(1)
    is_group = (sizes >= 2) & (sizes <= MOST_IN_GROUP) & (after > APART * last)
    if (label := _copied_closely(order.values, y[order.indices], held_y[rows], y)) is not None:
        yield (
            f"validation samples of class {label} lie within small groups of training samples of this class, several "
            "times closer than all others, and hardly any of another class do, as copies with noise; split before rare "
            "samples are copied or interpolated"
        )
        return
    size = float(sizes[is_group].double().mean()) if bool(is_group.any()) else 0.0
    groups = len(x) / size if size else 0
    if float((is_group & is_one).double().mean()) < WITHIN or groups < 2 * FEWEST_OF_CLASS:
        return
    if len(torch.unique(y)) > groups / 4:  # each group may be a class, or a value of its own
        return
    closer = float((after / last)[is_group].median())
    yield (
        f"{float(is_group.double().mean()):.0%} of the validation samples lie among about {size:.0f} training samples "
        f"with the same target, {closer:.1f} times closer than all others, as if they were of one patient, speaker or "
        f"recording of about {groups:.0f}; split by what they are of (GroupShuffleSplit)"
    )


def _copied_closely(distances: Tensor, labels: Tensor, held: Tensor, train: Tensor) -> int | None:
    """The class of which most samples have a few much closer ones of training, all of it, as hardly any of others have.

    Args:
        distances: From samples to those of training, ascending, shape (N, M).
        labels: Of these, shape (N, M).
        held: Labels of the samples, shape (N,).
        train: Labels of training, shape (M,).
    """
    if train.is_floating_point() and not bool((train == train.round()).all()):
        return None
    close = distances < CLOSE * distances.median(dim=1, keepdim=True).values
    is_one = ((labels == held[:, None].to(labels.dtype)) | ~close).all(1) & close.any(1)
    shares = {}
    for label in torch.unique(held).tolist():
        own = held == label
        is_small = close.sum(1) < SMALL * int((train == label).sum())
        if int(own.sum()) >= FEWEST_OF_CLASS:
            shares[int(label)] = float((is_one & is_small)[own].double().mean())
    label = max(shares, key=lambda key: shares[key], default=None)
    return (
        label if label is not None and len(shares) > 1 and shares[label] > WITHIN > 8 * min(shares.values()) else None
    )


@check("duplicates", "note", at="data")
def duplicates(seen: Evidence) -> Lines:
    """Over 1% of the training samples are copies of another one."""
    found = keys_of(seen.splits, "train") if seen.splits else []
    known: set[bytes] = set()
    copies = [sample for key, _, sample in found if key in known or known.add(key)]  # type: ignore[func-returns-value]
    if found and (share := len(copies) / len(found)) > 0.01:
        yield Line(f"{share:.1%} of {len(found)} training samples are copies of another one", sample=copies[0])
