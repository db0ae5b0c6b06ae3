"""Checks of the data of a run, by samples of its splits after their transforms: for ``audit``."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import combinations, islice, pairwise
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from boltcutter.diagnosis.calls import CLASSES, LossCalls, Remark
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.cuts import Cuts, wrap_line
from boltcutter.diagnosis.data import Scale, compare_scales, has_unit_per_class
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.loaders import SECONDS, Splits, digest, items
from boltcutter.diagnosis.probe import is_close, seeded
from boltcutter.diagnosis.source import own_classes, says
from boltcutter.diagnosis.unread import source_of
from boltcutter.structure import flatten, inputs_of, take_rows, targets_of

DRAWS = 8  # of a random sample
MOST_OF_SPLIT = 10_000_000  # values of a part
DIFFERENT = 20  # values of a part, fewer of which are classes or levels
WIDE = 32  # values of a sample, fewer of which may be equal by chance
FEWEST_ROWS = 50  # of a table
NUMBERS = (Tensor, np.ndarray, np.number, int, float)
LIKE = 0.9  # correlation of two draws of a picture
TURNS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.flip(-1),
    lambda t: t.flip(-2),
    lambda t: t.flip(-2, -1),
    lambda t: t.rot90(1, (-2, -1)),
    lambda t: t.rot90(3, (-2, -1)),
)
LEFT = 0.01  # share of a split
GROUPED = re.compile(
    r"subject|speaker|participant|donor|cohort|session_|sessions|recording|domain|per_user|groupby\(|instrument|scanner|"
    r"hospital|batch_effect",
    re.IGNORECASE,
)
GROUPS = re.compile(
    r"^_?(patients?|subjects?|participants?|donors?|volunteers?|animals?)(_?(ids?|index|idx|names?|numbers?|nos?))?$",
    re.IGNORECASE,
)
WITHIN_GROUPS = re.compile(
    r"personal|calibrat|within_|per_(subject|patient|user)|embed\w*_(subject|patient)", re.IGNORECASE
)
BALANCED = re.compile(r"balanc|bootstrap|episod|resampl", re.IGNORECASE)
MANY_DRAWS = 1000
COMMON = 0.2  # share of rows
FEWEST_OF_CLASS = 8  # samples
MAX_BOXES = 100  # of a sample
MOST_INDICES = 256  # of a sampler
TIGHT = 0.6  # of the median distance
APART = 1.2  # how much farther than the group the next sample is
MOST_IN_GROUP = 60
WITHIN = 0.8  # share of samples
CLOSE = 0.2  # of the median distance
SMALL = 0.3  # share of a class
SPECIAL = 4
FEWEST_COPIES = 3  # one or two may be equal by chance, as in iris
MOST_INPUTS = 4096  # of a sample, the first ones
MOST_NUMBERS = 200_000  # of which the order of the first appearances is looked at
LEVELS = 16  # samples whose parts are compared
PAIRS = (("train", "validation"), ("train", "test"), ("validation", "test"))
SAME = 0.999999  # correlation


def first_leaf(sample: Any) -> Tensor | None:
    """The first tensor of a sample's inputs; None if they are something else."""
    leaf = next(iter(flatten(inputs_of(sample))), None)
    return torch.as_tensor(leaf) if isinstance(leaf, Tensor | np.ndarray) else None


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
            yield Line(
                f"{shared:.1%} of the {second} samples are exact copies of {first} samples, of which only {own:.1%} "
                "are copies of one another; split before shuffling or copying",
                subject=second,
                sample=copies[0],
            )


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
    traces = [probe.run(kind, probe.batches["validation_step"], training=False) for kind in kinds]
    first, second = (next((t for name, t in trace.tensors if "input of" in name), None) for trace in traces)
    return first is not None and second is not None and not is_close(first, second)


def _has_fractions(sample: Any) -> bool:
    """Whether a sample has eight numbers with fractions, which are rarely equal by chance."""
    leaf = first_leaf(sample)
    return leaf is not None and leaf.is_floating_point() and int((leaf != leaf.round()).sum()) >= WIDE // 4


@check("own-scale", "certain", at="data")
def own_scale(seen: Evidence) -> Lines:
    """Columns of training, and of another split, have the mean 0 and the deviation 1, or the range 0 to 1, exactly."""
    one = _numeric_parts(seen.splits, "train") if seen.splits else []
    kinds = [_scales(x) for x in one]
    for name in ("validation", "test") if any(kinds) else ():
        other = _numeric_parts(seen.splits, name)
        for j, (known, x) in enumerate(zip(kinds, other, strict=False) if len(other) == len(one) else ()):
            same = known & _scales(x) if known and x.shape[1:] == one[j].shape[1:] else set()
            if same:
                yield Line(
                    f"training and {name} are {sorted(same)[0]}, so equal numbers mean different values; use those of "
                    "training for both",
                    "note" if _has_groups(seen) else None,  # each of which may be standardized by itself
                    subject=name,
                )
                break


def _has_groups(seen: Evidence) -> bool:
    """Whether the files of the module and of the data name groups of samples, such as subjects."""
    owners = [seen.module, getattr(seen.trainer, "datamodule", None), *map(seen.splits.dataset, seen.splits.loaders)]  # type: ignore[union-attr]
    names = {cls.__module__ for owner in owners for cls in own_classes(type(owner))}
    return any(GROUPED.search(source_of(name)) for name in names)


def _numeric_parts(splits: Splits | None, name: str) -> list[Tensor]:
    """Each part of the samples of a split that is floating-point, and of one shape, (N, …) in float64; else empty."""
    rows = [flatten(sample) for sample in (splits.samples(name) if splits else [])]
    found = []
    for leaves in zip(*rows, strict=True) if len({len(row) for row in rows}) == 1 else ():
        is_array = all(isinstance(leaf, Tensor | np.ndarray | np.floating | float) for leaf in leaves)
        parts = [torch.as_tensor(leaf) for leaf in leaves] if is_array else []
        is_one = len({t.shape for t in parts}) == 1 and all(t.is_floating_point() for t in parts)
        is_small = is_one and len(parts) * max(1, parts[0].numel()) <= MOST_OF_SPLIT
        found.append(torch.stack(parts).double() if is_small else torch.zeros(0, 0))
    return found


def _scales(x: Tensor) -> set[str]:
    """How each column of a part (N, …), or all of it, was scaled by its own values; empty if it was not."""
    x = x[:, None] if x.ndim == 1 else x
    if len(x) < FEWEST_ROWS or not bool(x.isfinite().all()) or len(torch.unique(x[:MANY_DRAWS])) < DIFFERENT:
        return set()
    if _is_scaled_within(x):
        return set()
    flat, found = x.flatten(1), set()
    varied = flat[:, flat.std(0) > 0]
    gaps = varied.sort(0).values.diff(dim=0)
    if varied.numel() and bool((gaps.std(0) < 1e-3 * gaps.mean(0)).any()):
        return set()  # evenly spaced, as coordinates
    dims = {(0,), tuple(range(x.ndim)), (0, *range(2, x.ndim)), tuple(range(x.ndim - 1))} if x.ndim > 1 else {(0,)}
    if varied.numel() and any(_is_standard(x, each) for each in dims):
        found.add("standardized each by its own mean and deviation")
    if varied.numel() and x.ndim == 2 and varied.shape[1] > 1:
        is_continuous = all(len(torch.unique(column)) > 0.9 * len(x) for column in varied.unbind(1))
        ends = ((varied == 0).sum(0), (varied == 1).sum(0), varied.amin(0), varied.amax(0))
        # As there is one of each, they are the least and the largest value of the split.
        is_range = not bool(ends[2].any()) and bool((ends[3] == 1).all())
        if is_range and is_continuous and all(bool((n == 1).all()) for n in ends[:2]):
            found.add("scaled each by its own least and largest value")
    return found


def _is_scaled_within(x: Tensor) -> bool:
    """Whether each sample, or each of several groups of samples in a row, was standardized by itself."""
    kinds = {tuple(range(1, x.ndim)), tuple(range(2, x.ndim)), *((d,) for d in range(1, x.ndim))} - {()}
    for dims in kinds:
        if math.prod(x.shape[d] for d in dims) > 1 and float(x.mean(dims).abs().max()) < 1e-3:
            return True
    flat = x.flatten(1)
    sums, squares = (t.cumsum(0)[FEWEST_OF_CLASS - 1 : -FEWEST_OF_CLASS] for t in (flat, flat**2 - 1))
    return bool(len(sums) and ((sums.abs() < 1e-3).all(1) & (squares.abs() < 1.5).all(1)).any())


def _is_standard(x: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether the mean over dimensions is 0, and the deviation 1, for all that varies."""
    count = math.prod(x.shape[d] for d in dims)
    means, deviations = x.mean(dims).flatten(), x.std(dims, correction=0).flatten()
    means, deviations = means[deviations > 0], deviations[deviations > 0]
    exact = torch.minimum((deviations - 1).abs(), (deviations * math.sqrt(count / (count - 1)) - 1).abs())
    return bool(len(means) and means.abs().max() < 1e-4 and exact.max() < 1e-4)


@check("fitted-before-split", "note", at="data")
def scaled_before_split(seen: Evidence) -> Lines:
    """Columns of all splits together have the mean 0 and the deviation 1, exactly, and those of training have not."""
    names = [*seen.splits.loaders] if seen.splits else []
    splits = [_numeric_parts(seen.splits, name) for name in names]
    if len(splits) < 2 or len({len(parts) for parts in splits}) > 1 or len(splits[0]) < 2:
        return  # without targets
    for parts in zip(*splits, strict=True):
        if len({part.shape[1:] for part in parts}) > 1 or parts[0].ndim != 2 or parts[0].shape[1] < 2:
            continue
        if any("standardized" in kind for kind in _scales(torch.cat(parts))) and not _scales(parts[0]):
            yield (
                "inputs are standardized by the mean and deviation of the samples of all splits, so training knows "
                "something of validation and test; compute both from training only"
            )
            return


@check("rounded-integers", "certain", at="data")
def rounded_integers(seen: Evidence) -> Lines:
    """Integers are all even above 2048, and multiples of 4 above 4096, as after float16; or as of other precisions."""
    for j, leaves in enumerate(zip(*map(flatten, seen.splits.samples("train") if seen.splits else ()), strict=False)):
        numbers = [torch.as_tensor(t).flatten()[:64] for t in leaves if isinstance(t, NUMBERS)]
        if not numbers or any(t.is_complex() or t.dtype != numbers[0].dtype for t in numbers):
            continue
        columns = torch.stack(numbers).unbind(1) if len({len(t) for t in numbers}) == 1 else []
        for t in (torch.cat(numbers), *columns):
            if kind := _rounded_to(t[t.isfinite()].double()):
                yield (
                    f"integers in part {j} of the samples, of up to {int(t.max())}, were rounded, as by "
                    f"{str(kind).removeprefix('torch.')}, in which those above {int(2 / torch.finfo(kind).eps)} are "
                    "not exact; keep them as integers"
                )
                break


def _rounded_to(t: Tensor) -> torch.dtype | None:
    """The precision to which integers were rounded; None if there are others, or too few."""
    for kind in (torch.float16, torch.bfloat16) if len(t) and bool((t == t.round()).all()) else ():
        exact = 2 / torch.finfo(kind).eps  # up to which all integers are exact
        sizes = torch.unique(t.abs())
        low, middle, high = (sizes[(sizes >= a * exact) & (sizes < b * exact)] for a, b in ((0, 1), (1, 2), (2, 4)))
        # Others, as of prices, have more in common: multiples of 50.
        common = [math.gcd(*map(int, part.tolist())) for part in (low, middle, high)]
        if common == [1, 2, 4] and min(len(middle), len(high)) >= DRAWS:
            return kind
    return None


@check("target-not-flipped", "likely", at="data")
def target_not_flipped(seen: Evidence) -> Lines:
    """Between two draws of a training sample, its picture and its mask, boxes or points are not turned alike."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    if dataset is None or isinstance(dataset, IterableDataset):
        return
    draws: list[list[Any]] = []
    for seed in range(DRAWS):
        with seeded(seed):
            draws.append([_picture_and_mask(each) for each in items(dataset, range(min(DRAWS, len(dataset))))])
        if not any(draws[-1]):
            return
    count = 0
    for pairs in zip(*draws, strict=True):
        if not all(pairs):
            continue
        (first, mask), *rest = pairs
        for picture, other in rest:
            of_picture = [n for n, turn in enumerate(TURNS) if _likeness(turn(first), picture) > LIKE]
            turns = TURNS if mask.shape[-2:] == first.shape[-2:] else TURNS[:1]
            of_mask = [n for n, turn in enumerate(turns) if torch.equal(turn(mask), other)]
            if len(of_picture) == 1:  # else it is symmetric, or changed otherwise
                count += -MANY_DRAWS if not of_mask else of_picture[0] not in of_mask
    if count >= 3:
        yield (
            "pictures of training samples and their masks, boxes or points are flipped or turned at random, but not "
            "alike; apply each random transform to both"
        )


def _picture_and_mask(sample: Any) -> tuple[Tensor, Tensor] | None:
    """A picture (…, H, W), and then a mask of integers, or of 0 and 1, (…, H, W), or boxes, or points, of a sample."""
    leaves = [torch.as_tensor(t) for t in flatten(sample) if isinstance(t, Tensor | np.ndarray)]
    spatial = [t for t in leaves if t.ndim in (2, 3) and min(t.shape[-2:]) >= 4 and not t.is_complex()]
    if len(spatial) == 1 and len(leaves) == 2:
        picture, other = spatial[0], leaves[1]
        if _are_boxes(other, picture.shape[-2:]) or _are_points(other, picture):
            return picture, other
    if len(spatial) != 2 or spatial[0].shape[-2:] != spatial[1].shape[-2:]:
        return None
    if spatial[1].is_floating_point() and not bool(((spatial[1] == 0) | (spatial[1] == 1)).all()):
        return None
    return spatial[0], spatial[1]


def _are_boxes(t: Tensor, size: torch.Size) -> bool:
    """Whether numbers, (…, 4), are corners, or center and size, of boxes within a picture, in parts of it or pixels."""
    if t.shape[-1:] != (4,) or t.numel() > 4 * MAX_BOXES or not t.is_floating_point() or not t.numel():
        return False
    limits = torch.tensor([size[1], size[0]]) if float(t.max()) > 1 else torch.ones(2)
    one, other = t[..., :2], t[..., 2:]
    return any(
        bool(((low >= -0.01) & (high <= limits + 0.01) & (low < high)).all())
        for low, high in ((one, other), (one - other / 2, one + other / 2))
    )


def _are_points(t: Tensor, picture: Tensor) -> bool:
    """Whether numbers, (…, 2) or (2 * points,), are places within a picture, where it differs from the mirrored places.

    Places are in parts of the picture, from 0 or from -1 to 1, or in pixels; of a flat vector, they alternate.
    """
    is_short = t.is_floating_point() and 2 <= t.numel() <= 2 * MAX_BOXES and t.numel() % 2 == 0
    if not is_short or not bool(t.isfinite().all()) or float(t.abs().max()) == 0:
        return False
    if t.ndim > 1 and t.shape[-1] != 2:
        return False
    height, width = picture.shape[-2:]
    points, size = t.double().reshape(-1, 2), torch.tensor([width - 1.0, height - 1.0], dtype=torch.float64)
    if float(points.max()) <= 1:
        points = (points + (points.min() < 0)) / (2 if points.min() < 0 else 1) * size
    if float(points.min()) < 0 or bool((points > size + 1).any()):
        return False
    seen = picture.double().flatten(0, -3).sum(0) if picture.ndim > 2 else picture.double()
    marks = (seen - seen.median()).abs()
    x, y = points.round().clamp(torch.zeros(2), size).long().T
    return abs(float(marks[y, x].mean()) - float(marks[y, width - 1 - x].mean())) > float(marks.mean())


def _likeness(a: Tensor, b: Tensor) -> float:
    pair = [t.flatten().double() for t in (a, b)]
    return float(torch.corrcoef(torch.stack(pair))[0, 1]) if a.shape == b.shape else 0.0


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
    """The share of the rows of the smaller part that are in the other one; 0 if they follow one another, as times."""
    keys = [[digest(row) for row in part] for part in sorted((one, other), key=len)]
    places = [keys[1].index(key) for key in keys[0] if key in keys[1]]
    steps = {b - a for a, b in pairwise(places)}
    return len(places) / len(keys[0]) if steps - {1} else 0.0


@check("group-overlap", "likely", at="data")
def group_overlap(seen: Evidence) -> Lines:
    """A group, such as a patient, has samples in two splits, where datasets have an attribute ``groups``."""
    splits = seen.splits
    for first, second in PAIRS if splits else ():
        one, other = (_groups(splits.dataset(name)) for name in (first, second))  # type: ignore[union-attr]
        # Series or users of whom each is one sample are split by time.
        if (common := sorted(map(str, {*one} & {*other}))) and (len({*one}) < len(one) or len({*other}) < len(other)):
            yield Line(f"groups {some(common)} have samples in {first} and {second}; split by group", subject=second)


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


def _named_groups(seen: Evidence, name: str) -> dict[Any, list[int]]:
    """Groups of the samples of a split, and the places of each in the whole dataset, where these are known."""
    dataset, found = seen.splits.dataset(name), dict[Any, list[int]]()  # type: ignore[union-attr]
    if (pair := _group_column(dataset)) is not None:
        with seeded(0):
            few = [flatten(sample) for sample in items(dataset, range(min(FEWEST_OF_CLASS, len(dataset))))]
        if all(
            _plain(g) in [_plain(v) for v in leaves if np.size(v) == 1] for leaves, g in zip(few, pair[1], strict=False)
        ):
            return found  # each sample has it
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
    for sample in samples:
        if keys[0] in sample and isinstance(group := _plain(sample[keys[0]]), Hashable):
            found.setdefault(group, []).append(0)
    return found


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
            if groups and all(isinstance(_plain(g), Hashable) for g in groups):
                return [*range(len(groups))], groups
    return None


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


@check("numbered-apart", "likely", at="data")
def numbered_apart(seen: Evidence) -> Lines:
    """Numbers first appear in the order 0, 1, 2, … in validation, and in training as well, though none are sorted."""
    rows = {name: seen.splits.samples(name) if seen.splits else [] for name in ("train", "validation")}
    if not all(rows.values()):
        return
    leaves = {name: [flatten(inputs_of(row)) for row in found] for name, found in rows.items()}
    for j in range(len(leaves["train"][0])):
        counts = []
        for found in leaves.values():
            column = [torch.as_tensor(row[j]) for row in found if j < len(row) and isinstance(row[j], NUMBERS)]
            counts.append(first_appearances(column))
        if all(counts):
            yield (
                f"part {j} of validation samples is numbered in the order in which values first appear there (0 to "
                f"{counts[1] - 1}), and so is that of training, so that one number means two things; number both by "
                "one table"
            )
            return


def first_appearances(column: Sequence[Tensor]) -> int:
    """How many different numbers appear in ascending order without a gap, if chance does not explain it; else 0."""
    if not column or any(t.dtype not in (torch.int64, torch.int32) or t.ndim > 1 for t in column):
        return 0
    special = SPECIAL if column[0].ndim else 0  # numbers of padding, unknown words and the like
    numbers = (number for t in column for number in t.reshape(-1).tolist() if number >= special)
    values = [*islice(numbers, MOST_NUMBERS)]
    first = [*dict.fromkeys(values)]
    steps = [b - a for a, b in pairwise(values)]
    regular = sum(step in (0, 1) for step in steps) / max(len(steps), 1)  # sorted, or counted again and again
    begins = first[0] if first else 0
    is_counted = begins <= special and first == [*range(begins, begins + len(first))]
    is_by_chance = len(first) < FEWEST_OF_CLASS or len(values) < 2 * len(first) or regular > 0.5
    return 0 if is_by_chance or not is_counted else begins + len(first)


@check("duplicates", "note", at="data")
def duplicates(seen: Evidence) -> Lines:
    """Over 1% of the training samples are copies of another one."""
    found = keys_of(seen.splits, "train") if seen.splits else []
    known: set[bytes] = set()
    copies = [sample for key, _, sample in found if key in known or known.add(key)]  # type: ignore[func-returns-value]
    if found and (share := len(copies) / len(found)) > 0.01:
        yield Line(f"{share:.1%} of {len(found)} training samples are copies of another one", sample=copies[0])


@check("shared-augmentation", "note", at="data")
def shared_augmentation(seen: Evidence) -> Lines:
    """Validation and training are parts of one dataset, whose samples are random."""
    splits = seen.splits
    a, b = (splits.dataset("train"), splits.dataset("validation")) if splits else (None, None)
    if isinstance(a, Subset) and isinstance(b, Subset) and a.dataset is b.dataset and len(b):
        found = set()
        for seed in (1, 2):
            with seeded(seed):
                found.add(digest(b[0]))
        if len(found) > 1:
            yield (
                "both splits are parts of one dataset whose samples are random, so validation is augmented as training "
                "is; give each split a dataset with its own transform"
            )


@check("worker-generator", "certain", at="data")
def worker_generator(seen: Evidence) -> Lines:
    """Copies of the dataset, as of two workers, draw the same numbers, however torch is seeded."""
    loader = seen.splits.train if seen.splits else None
    dataset = getattr(loader, "dataset", None)
    is_seeded = not getattr(loader, "num_workers", 0) or getattr(loader, "worker_init_fn", None) is not None
    if dataset is None or is_seeded or isinstance(dataset, IterableDataset) or not len(dataset):
        return
    try:
        one, other = copy.deepcopy(dataset), copy.deepcopy(dataset)
    except (TypeError, RuntimeError):  # of shared memory, or an open file
        return
    with seeded(1):
        first = [digest(sample) for _ in range(2) for sample in items(one, range(1))]
    with seeded(2):
        second = [digest(sample) for _ in range(2) for sample in items(other, range(1))]
    if first == second and first[0] != first[1]:
        yield (
            "the dataset has a random generator of its own, which is copied to all "
            f"{loader.num_workers} workers, and again in each epoch: all draw the same numbers; use torch's or NumPy's "  # type: ignore[union-attr]
            "global generator, or seed it in worker_init_fn"
        )


@check("target-column", "likely", at="data")
def target_column(seen: Evidence) -> Lines:
    """The correlation of an input with the target, or with one of its classes, is 1."""
    table = seen.splits.table("train") if seen.splits else None
    if table is None:
        return
    x, y = table
    kinds = torch.unique(y)
    if x.shape[1] > 2000 or len(y) < 100 or not (len(kinds) >= 10 or (not y.is_floating_point() and len(kinds) > 1)):
        return
    # Of classes, a column may also tell one of them, as of labels that are one-hot.
    columns = [y.double()] + (
        [(y == k).double() for k in kinds] if not y.is_floating_point() and len(kinds) <= 50 else []
    )
    x = x - x.mean(0)
    for column in columns:
        column = column - column.mean()
        correlation = ((x * column[:, None]).sum(0) / (x.norm(dim=0) * column.norm() + 1e-12)).abs()
        best = int(correlation.nan_to_num().argmax())
        if float(correlation[best]) > SAME:
            yield f"column {best} of the inputs is the target (correlation 1.000000); leave it out"
            return


@check("nonfinite-data", "likely", at="data")
def nonfinite_data(seen: Evidence) -> Lines:
    """Samples have NaN or Inf in them, and so has the loss of a training step on these."""
    for name in seen.splits.loaders if seen.splits else ():
        samples = seen.splits.samples(name)  # type: ignore[union-attr]
        bad = [sample for sample in samples if any(bool((~t.isfinite()).any()) for t in floating(sample))]
        if bad:
            yield Line(
                f"{len(bad)} of {len(samples)} {name} samples have values that are NaN or Inf; replace or remove them",
                None if _spoils_loss(seen, bad) else "note",  # marks of missing values, which the module knows
                subject=name,
                sample=bad[0],
            )


def _spoils_loss(seen: Evidence, samples: list[Any]) -> bool:
    collate = getattr(seen.splits and seen.splits.train, "collate_fn", None)
    if seen.probe is None or collate is None or "training_step" not in seen.probe.batches:
        return False
    strategy = seen.probe.trainer.strategy
    batch = strategy.batch_to_device(collate([samples[i % len(samples)] for i in range(8)]))
    output = seen.probe.run("training_step", batch, training=True, record=False).output
    loss = output.get("loss") if isinstance(output, dict) else output
    return isinstance(loss, Tensor) and not bool(loss.isfinite().all())


@check("bytes-wrap", "certain", at="data")
def bytes_of_samples(seen: Evidence) -> Lines:
    """Sums, differences or products of integers of 8 or 16 bits wrap around."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return
    lines: list[str] = []
    with suppress(Exception), seeded(0), Cuts(()) as cuts:  # of a library that takes no subclass of an array
        [*items(_with_exact_arrays(dataset, lines), range(min(DRAWS, len(dataset))))]
    lines += [remark.text for remark in cuts.remarks if remark.check == "bytes-wrap"]
    if lines:
        yield Line(f"in the dataset, {lines[0]}", subject="dataset")


@check("mask-resized", "likely", at="data")
def masks_of_samples(seen: Evidence) -> Lines:
    """Within the dataset, integers are interpolated between neighbours, and become integers again."""
    yield from _said_of_data(seen, "mask-resized")


@check("repeated-index", "likely", at="data")
def repeats_of_samples(seen: Evidence) -> Lines:
    """The dataset, or what makes batches of it, adds rows at indices of which some repeat, and keeps one for each."""
    yield from _said_of_data(seen, "repeated-index")


@check("digits-lost", "likely", at="data")
def digits_of_samples(seen: Evidence) -> Lines:
    """Large values in a row, as times since 1970, are converted to so few digits that steps between them are lost."""
    yield from _said_of_data(seen, "digits-lost")


def _said_of_data(seen: Evidence, name: str) -> Lines:
    """What was seen while samples of training, and a batch of them, were made."""
    if seen.splits is None:
        return
    if seen.splits.remarks is None:
        seen.splits.remarks = [*_remarks_of(seen.splits.train)]
    for remark in [each for each in seen.splits.remarks if each.check == name][:1]:
        yield Line(f"in the data, {remark.text}", subject="dataset")


def _remarks_of(loader: Any) -> list[Remark]:
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return []
    cuts = Cuts(())
    with suppress(Exception), seeded(0), torch.no_grad(), cuts:
        rows = [*items(dataset, range(min(DRAWS, len(dataset))))]
        if collate is not None and getattr(loader, "batch_size", None):
            collate(rows)
    return cuts.remarks


@check("global-seed", "likely", at="data")
def same_noise(seen: Evidence) -> Lines:
    """Two parts of a training sample differ by the same values in all samples, as of noise that is seeded for each."""
    samples = [flatten(sample) for sample in (seen.splits.samples("train") if seen.splits else [])[:LEVELS]]
    if len(samples) < LEVELS or not all(
        isinstance(t, Tensor) and t.is_floating_point() for row in samples for t in row
    ):
        return
    for i, j in combinations(range(min(map(len, samples))), 2):
        pairs = [(row[i], row[j]) for row in samples]
        if any(a.shape != b.shape or a.numel() < WIDE // 2 for a, b in pairs) or len({a.shape for a, _ in pairs}) > 1:
            continue
        differences = torch.stack([(a - b).flatten() for a, b in pairs]).double()
        scale = float(differences.std(1).mean())
        varies = float(torch.stack([b.flatten() for _, b in pairs]).double().std(0).mean())
        kinds = len({*(differences[0] / scale).mul(1e4).round().tolist()}) if scale > 0 else 0
        if kinds < differences.shape[1] // 2:
            continue  # of numbers in steps, as of two times with a fixed distance
        if float(differences.std(0).max()) < 1e-5 * max(scale, varies) < varies:
            yield (
                f"parts {i} and {j} of a training sample differ by the same values in all samples, as of noise whose "
                "seed is the same for each of them; draw it without a seed, or with one of the sample and the epoch"
            )
            return


@check("reshape-not-transpose", "likely", at="data")
def reshape_of_samples(seen: Evidence) -> Lines:
    """A reshape within the dataset only exchanges the sizes of a tensor, so it mixes its rows."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return
    with suppress(Exception), seeded(0), LossCalls() as calls:
        [*items(dataset, range(1))]
    for remark in [each for each in calls.remarks if each.check == "reshape-not-transpose"][:1]:
        yield Line(f"in the dataset, {remark.text}", subject="dataset")


def _with_exact_arrays(dataset: Any, lines: list[str]) -> Any:
    """A copy whose arrays of narrow integers say it if they wrap around."""
    copied = copy.copy(dataset)
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype.itemsize < 4:
            new = value.view(ExactArray)
            new.lines = lines
            setattr(copied, name, new)
        elif name == "dataset":  # as of a Subset
            copied.dataset = _with_exact_arrays(value, lines)
    return copied


class ExactArray(np.ndarray[Any, Any]):
    """An array that compares sums, differences and products with those of larger integers.

    Attributes:
        lines: What it says.
    """

    lines: list[str]

    def __array_finalize__(self, other: Any) -> None:
        """Keep what a slice says."""
        self.lines = getattr(other, "lines", [])

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Compute it, and compare."""
        plain = [_plain_array(value) for value in inputs]
        wide = [value.astype(np.int64) if isinstance(value, np.ndarray) else value for value in plain]
        is_narrow = all(v.dtype.kind in "iu" for v in plain if isinstance(v, np.ndarray))
        compares = method == "__call__" and ufunc in (np.add, np.subtract, np.multiply) and is_narrow
        exact = ufunc(*wide) if compares else None
        out = kwargs.get("out")
        if out is not None:
            kwargs["out"] = tuple(_plain_array(value) for value in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        if not isinstance(result, np.ndarray | np.generic) or result.dtype.kind not in "iu":
            return result
        if compares and result.dtype.itemsize < 4 and (wrong := np.mean(exact != result)) > 0:
            self.lines.append(wrap_line(ufunc.__name__, str(result.dtype), np.shape(result), float(wrong)))
        if out is not None:
            return out[0]
        new = np.asarray(result).view(ExactArray)
        new.lines = self.lines
        return new


def _plain_array(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ExactArray) else value


def floating(sample: Any) -> list[Tensor]:
    """The floating-point tensors and arrays of a sample."""
    found = [torch.as_tensor(leaf) for leaf in flatten(sample) if isinstance(leaf, Tensor | np.ndarray | float)]
    return [t for t in found if t.is_floating_point()]


@check("constant-column", "note", at="data")
def constant_column(seen: Evidence) -> Lines:
    """A column of a table has one value only."""
    table = seen.splits.table("train") if seen.splits else None
    if table is not None and len(table[0]) >= 20:
        same = (table[0] == table[0][:1]).all(0).nonzero().flatten().tolist()
        if same:
            yield f"{len(same)} of {table[0].shape[1]} inputs have one value in training: {some([*map(str, same)])}"


def class_count(seen: Evidence) -> tuple[int, int] | None:
    """The number of classes and ignore_index, if cross-entropy gets the labels of the batch as they are."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return None
    labels = tensors_of(probe.batches["training_step"])
    for call in probe.base("training_step").calls:
        p, t = call.prediction, call.target
        is_plain = call.kind in ("cross_entropy", "nll_loss") and p is not None and t is not None
        if is_plain and t.ndim == 1 and p.ndim == 2 and any(x.shape == t.shape and torch.equal(x, t) for x in labels):
            return p.shape[1], call.options["ignore_index"]
    return None


def labels_of(seen: Evidence) -> dict[str, Tensor]:
    """Labels of the samples of each split, if they are integers."""
    tables = {name: seen.splits.table(name) for name in seen.splits.loaders} if seen.splits else {}
    return {name: table[1] for name, table in tables.items() if table and not table[1].is_floating_point()}


def _first(seen: Evidence, name: str, chosen: Tensor) -> Any:
    """The first of the chosen samples of a split."""
    return seen.splits.samples(name)[int(chosen.nonzero()[0])] if seen.splits else None


@check("label-range", "certain", at="data")
def label_range(seen: Evidence) -> Lines:
    """A label of a split is no class of the model, which gets labels as they are, and is not ignored."""
    if (found := class_count(seen)) is None:
        return
    count, ignored = found
    held = seen.probe.base("validation_step").calls if seen.probe and "validation_step" in seen.probe.batches else []
    is_open = not any(call.kind in CLASSES for call in held)  # pairs of new classes may be compared
    for name, labels in labels_of(seen).items():
        strange = ((labels >= count) | (labels < 0)) & (labels != ignored)
        if outside := torch.unique(labels[strange]).tolist():
            yield Line(
                f"{name} has labels {some([*map(str, outside)])}, but the model has {count} classes, 0 to {count - 1}; "
                "correct num_classes or the labels",
                "note" if is_open and name != "train" else None,
                subject=name,
                sample=_first(seen, name, strange),
            )


@check("unseen-labels", "likely", at="data")
def unseen_labels(seen: Evidence) -> Lines:
    """Over 1% of the samples of validation or test have a class of the model that no training sample has."""
    found, labels = class_count(seen), labels_of(seen)
    train = labels.pop("train", None)
    if found is None or train is None or len(train) < 8 * (count := found[0]):
        return
    for name, held in labels.items():
        unseen = ~torch.isin(held, train) & (held >= 0) & (held < count)
        share = float(unseen.double().mean())
        if share > 0.01:
            classes = some([*map(str, torch.unique(held[unseen]).tolist())])
            yield Line(
                f"{share:.1%} of the {name} samples have classes that no training sample has ({classes}); "
                "shuffle before splitting, or split by class",
                subject=name,
                sample=_first(seen, name, unseen),
            )


@check("split-scale", "likely", at="data")
def split_scale(seen: Evidence) -> Lines:
    """Inputs of two splits differ tenfold in deviation and size, or pictures by a factor of 2.5 and not in shape."""
    tables = [seen.splits.table(name) for name in ("train", "test")] if seen.splits else []
    found = [Scale.of(table[0]) for table in tables if table is not None]
    if len(found) == 2:
        yield from compare_scales("test", *found)


@check("global-seed", "likely", at="data")
def global_seed(seen: Evidence) -> Lines:
    """Reading any training sample leaves a global generator in the same state, whatever it was before."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or len(dataset) < 2:
        return
    states: dict[str, set[Any]] = {"torch": set(), "numpy.random": set(), "random": set()}
    for seed in (1, 2):
        with seeded(seed):
            for i in range(2):
                [*items(dataset, range(i, i + 1))]
                states["torch"].add(torch.get_rng_state().numpy().tobytes())
                state: Any = np.random.get_state()
                states["numpy.random"].add(state[1].tobytes())
                states["random"].add(random.getstate()[1])
    for name, found in states.items():
        if len(found) == 1:
            yield Line(
                f"the dataset seeds {name} for each sample, so dropout and augmentation draw the same numbers again "
                "and again; use a generator of its own",
                subject=name,
            )
            return


@check("partial-validation", "likely", at="data")
def partial_validation(seen: Evidence) -> Lines:
    """The loader of another split leaves out 1% of its samples or more, or draws them with replacement."""
    for name, loader in seen.splits.loaders.items() if seen.splits else ():
        dataset, batches = seen.splits.dataset(name), getattr(loader, "batch_sampler", None)  # type: ignore[union-attr]
        size, sampler = getattr(batches, "batch_size", 0), getattr(loader, "sampler", None)
        if name == "train" or not size or not hasattr(dataset, "__len__") or sampler is None:
            continue
        left = len(dataset) % size if getattr(batches, "drop_last", False) and len(sampler) == len(dataset) else 0
        if left >= LEFT * len(dataset) and not _needs_whole_batches(seen):
            yield Line(
                f"drop_last=True leaves {left} of {len(dataset)} {name} samples out; set drop_last=False",
                subject=name,
            )
        if getattr(sampler, "replacement", False):
            is_meant = says(seen.module, BALANCED) or len(sampler) != len(dataset)
            yield Line(
                f"{type(sampler).__name__} draws {name} samples with replacement, so some count several times and "
                "others not at all; read each of them once, without a sampler",
                "note" if is_meant or not hasattr(sampler, "weights") else None,
                subject=name,
            )


def _needs_whole_batches(seen: Evidence) -> bool:
    """Whether a step compares samples with each other, and not with labels, or takes no smaller batch."""
    probe = seen.probe
    if probe is None or not probe.batches:
        return False
    kind = next(reversed(probe.batches))
    batch, calls = probe.batches[kind], [c for each in probe.batches for c in probe.base(each).calls]
    parts = [t for each in probe.batches.values() for t in tensors_of(each)]
    if not any(t.shape == c.target.shape and torch.equal(t, c.target) for c in calls for t in parts):
        return True
    try:
        smaller = take_rows(batch, torch.arange(max(1, probe.size(kind) - 1)), probe.size(kind))
        probe.run(kind, smaller, training=kind == "training_step", record=False)
    except Exception:  # as of a state of one size; or the time is used up
        return True
    return any(call.options.get("product") for call in calls)


@check("constant-target", "likely", at="data")
def constant_target(seen: Evidence) -> Lines:
    """All training samples have the same target, which a loss function gets."""
    table = seen.splits.table("train") if seen.splits else None
    if table is None or seen.probe is None or "training_step" not in seen.probe.batches or len(table[1]) < 100:
        return
    y = table[1]
    calls = seen.probe.base("training_step").calls
    is_used = any(
        c.target.numel() == len(c.prediction)
        and bool((c.target == y[0]).all())
        and (c.prediction.ndim == 1 or has_unit_per_class(seen.module, c.prediction.shape[1]))
        for c in calls
        if c.prediction.ndim
    )
    if is_used and bool((y == y[0]).all()):
        yield f"all {len(y)} training samples have the target {float(y[0]):g}; is it read from the right place?"


@check("augmented-validation", "likely", at="data")
def augmented_validation(seen: Evidence) -> Lines:
    """Pictures of validation differ by over half of their deviation each time they are read, and classes do not."""
    dataset = seen.splits.dataset("validation") if seen.splits else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return
    read = []
    for seed in range(4):  # the first may be kept by the dataset
        with seeded(seed):
            read.append([*items(dataset, range(min(4, len(dataset))))])
    pairs = [s for group in read for s in group if isinstance(s, list | tuple) and len(s) == 2]
    are_pictures = all(isinstance(s[0], Tensor) and s[0].ndim == 3 and _is_class(s[1]) for s in pairs)
    if len(pairs) != sum(map(len, read)) or not are_pictures:
        return
    if any(int(a[1]) != int(b[1]) for group in read[1:] for a, b in zip(read[0], group, strict=True)):
        return
    changes = [relative_change(a[0], b[0]) for group in read[2:] for a, b in zip(read[1], group, strict=True)]
    if max(changes) > 0.5:
        yield (
            "pictures of validation are random, as if they were augmented as in training, so its metrics are those of "
            "other pictures each time; give validation a dataset without random transforms"
        )


def relative_change(one: Tensor, other: Tensor) -> float:
    """How far two pictures differ, relative to the deviation of their pixels."""
    if one.shape != other.shape:
        return math.inf
    one, other = one.double(), other.double()
    return float((one - other).square().mean().sqrt() / (one.std() + 1e-12))


def _is_class(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point()) or type(value) is int


@check("misaligned-batch", "certain", at="data")
def misaligned_batch(seen: Evidence) -> Lines:
    """Inputs in a batch of the loader have other labels than in the dataset, which no renaming of classes explains."""
    loader = seen.splits.train if seen.splits else None
    samples = seen.splits.samples("train") if seen.splits else []
    pairs = [
        s
        for s in samples
        if isinstance(s, list | tuple) and len(s) == 2 and _is_class(s[1]) and first_leaf(s) is not None
    ]
    dataset = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__len__") or not pairs or not len(pairs) == len(samples) == len(dataset):  # type: ignore[arg-type]
        return
    with seeded(0):
        batch = next(iter(loader))  # type: ignore[arg-type]
    if not isinstance(batch, list | tuple) or len(batch) < 2 or not all(isinstance(t, Tensor) for t in batch):
        return
    inputs, labels = _unpadded(batch)
    known: dict[bytes, set[int]] = {}
    for x, y in pairs:
        known.setdefault(digest(x), set()).add(int(y))
    rows = [(known.get(digest(x)), int(y)) for x, y in zip(inputs, labels, strict=False) if y.numel() == 1]
    found = [(right, y) for right, y in rows if right is not None]
    wrong = sum(y not in right for right, y in found)
    renamed: dict[int, set[int]] = {}
    for right, y in found:
        renamed.setdefault(min(right), set()).add(y)
    is_renamed = all(len(names) == 1 for names in renamed.values())
    if len(found) > 0.8 * len(labels) and wrong > 0.2 * len(found) and not is_renamed:
        yield (
            f"{wrong / len(found):.0%} of the samples of a batch have another label than in the dataset; correct "
            "collate_fn, which must order both alike"
        )


def _unpadded(batch: Sequence[Tensor]) -> tuple[Iterable[Tensor], Tensor]:
    """The rows of the first part of a batch, each as long as another part says, and the last part."""
    inputs, *lengths, labels = batch
    if inputs.ndim < 2:
        return inputs, labels
    fits = [t for t in lengths if t.shape == (len(inputs),) and 0 < int(t.min()) <= int(t.max()) == inputs.shape[1]]
    return [row[: int(n)] for row, n in zip(inputs, fits[0], strict=True)] if fits else inputs, labels


SHUFFLES = frozenset(("randperm", "permutation", "shuffle", "choice", "multinomial"))
SEEDS = frozenset(("manual_seed", "RandomState", "default_rng", "seed", "Random"))


@check("same-order", "likely", at="data")
def same_order(seen: Evidence) -> Lines:
    """A sampler that seeds its own generator yields the same random order again."""
    sampler: Any = getattr(seen.splits.train if seen.splits else None, "sampler", None)
    kind = type(sampler)
    code = getattr(kind.__dict__.get("__iter__"), "__code__", None)
    names = {*code.co_names} if code is not None else set()
    if hasattr(sampler, "set_epoch") or not (names & SHUFFLES and names & SEEDS):
        return
    orders = []
    for seed in (1, 2):
        with seeded(seed):
            orders.append([*islice(iter(sampler), MOST_INDICES)])
    if orders[0] == orders[1] and orders[0] != sorted(orders[0]):
        yield (
            f"{kind.__name__} seeds its generator each time, so all epochs have the same order; seed it once, or by "
            "the epoch (set_epoch)"
        )


@check("same-sample", "likely", at="data")
def same_sample(seen: Evidence) -> Lines:
    """All training samples, 16 or more, are the same one, of a data set that holds as many as it has."""
    splits = seen.splits
    found = keys_of(splits, "train") if splits else []
    if splits and len(found) >= 16 and len({key for key, *_ in found}) == 1 and holds_samples(splits.train.dataset):
        yield Line(
            f"all {len(found)} training samples that were read are the same one; does __getitem__ use its index?",
            sample=found[0][2],
        )


def holds_samples(dataset: Any) -> bool:
    """Whether an attribute has one entry for each sample; a data set of one graph, read many times, has none."""
    held = (value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, Sized))
    with suppress(TypeError, NotImplementedError):
        return any(len(value) == len(dataset) for value in held)
    return False


@check("sampler-weights", "likely", at="data")
def sampler_weights(seen: Evidence) -> Lines:
    """WeightedRandomSampler draws samples in proportion to the size of their class, which differs threefold or more."""
    weights = getattr(getattr(seen.splits.train if seen.splits else None, "sampler", None), "weights", None)
    labels = labels_of(seen).get("train")
    if isinstance(weights, Tensor) and labels is not None and len(weights) == len(labels) and int(labels.min()) >= 0:
        counts = labels.long().bincount().double()
        if is_proportional(weights.double(), counts[labels.long()]):
            yield (
                "samples are drawn in proportion to the size of their class, so rare classes become rarer; give each "
                "sample the inverse: 1 / counts[labels]"
            )


@check("class-weights", "likely", at="data")
def class_weights(seen: Evidence) -> Lines:
    """Weights of classes, whose sizes differ threefold, are proportional to these, or to 1 / size of other classes."""
    table, probe = seen.splits.table("train") if seen.splits else None, seen.probe
    if table is None or probe is None or "training_step" not in probe.batches or not _are_classes(table[1]):
        return
    counts = table[1].long().bincount().double()
    for call in probe.base("training_step").calls:
        weights: Any = call.options.get("weight")
        positive: Any = call.options.get("pos_weight")
        if isinstance(positive, Tensor) and positive.numel() == 1 and len(counts) == 2:
            weights = torch.stack([torch.ones_like(positive.flatten()[0]), positive.flatten()[0]])
        elif call.kind != "cross_entropy":
            weights = None
        if not isinstance(weights, Tensor) or weights.shape != counts.shape:
            continue
        given = weights.double().cpu()
        if is_proportional(given, counts):
            yield (
                f"the class weights of {call.kind} are the sizes of the classes, so frequent ones count most; use "
                "their inverse: 1 / counts"
            )
            return
        ordered = given.sort(descending=True).values
        for power in (1.0, 0.5):
            ideal = counts.sort().values ** -power
            if is_proportional(ordered, ideal) and not is_proportional(given, counts**-power):
                yield (
                    f"the class weights of {call.kind} are the inverse sizes of the classes, but in another order: "
                    f"that of class {int(counts.argmax())}, the most frequent, is "
                    f"{float(given[counts.argmax()] / given.min()):.3g} times the smallest; sort them by class"
                )
                return


@check("class-weights", "likely", at="data")
def positive_weights(seen: Evidence) -> Lines:
    """The pos_weight of binary cross-entropy is the number of positive targets over that of negative ones."""
    probe = seen.probe
    if seen.splits is None or probe is None or "training_step" not in probe.batches:
        return
    for call in probe.base("training_step").calls:
        given: Any = call.options.get("pos_weight")
        if not isinstance(given, Tensor) or not 0 < float(given.min()) < 1 / 3:
            continue
        targets = [targets_of(sample) for sample in seen.splits.samples("train")]
        if not targets or not all(isinstance(each, NUMBERS) for each in targets):
            return
        stacked = [torch.as_tensor(each).double() for each in targets]
        if any(each.shape != stacked[0].shape for each in stacked) or stacked[0].dim() < given.dim() - 1:
            return
        y = torch.stack(stacked)
        if not bool(((y == 0) | (y == 1)).all()):
            return
        positive, negative = (part.sum_to_size(given.shape) for part in (y, 1 - y))
        if torch.allclose(given.double().cpu(), positive / negative, rtol=0.05):
            yield (
                f"pos_weight is positive / negative, {float(given.min()):.2g} to {float(given.max()):.2g}, so rare "
                "targets count even less; use negative / positive"
            )
        return


def _are_classes(y: Tensor) -> bool:
    """Whether targets are numbers of classes, also 0.0 and 1.0."""
    is_binary = bool(((y == 0) | (y == 1)).all())
    return is_binary or (not y.is_floating_point() and int(y.min()) >= 0)


def is_proportional(one: Tensor, other: Tensor) -> bool:
    """Whether two positive vectors differ by a factor only, and vary threefold or more."""
    if not bool((one > 0).all()) or not bool((other > 0).all()) or float(other.max()) < 3 * float(other.min()):
        return False
    ratio = one / other
    return float(ratio.max()) < 1.01 * float(ratio.min())
