"""Checks of the data of a run, by samples of its splits after their transforms: for ``audit``."""

from __future__ import annotations

import copy
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from boltcutter.diagnosis.calls import LossCalls, Remark
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.cuts import Cuts, wrap_line
from boltcutter.diagnosis.data import Scale, compare_scales, has_unit_per_class
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.loaders import Splits, digest, first_leaf, items
from boltcutter.diagnosis.overlaps import has_groups, keys_of
from boltcutter.diagnosis.probe import seeded
from boltcutter.diagnosis.source import codes, functions_beside, own_classes, says
from boltcutter.structure import flatten, take_rows

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
MOST = 0.6  # share of samples
LEFT = 0.01  # share of a split
LABELS = re.compile(r"label|target|(^|\.)y$|class", re.IGNORECASE)
AUGMENTED = re.compile(r"augment|transform|jitter|flip|crop|rotate|perturb", re.IGNORECASE)
CIRCLE = re.compile(r"(^|_)(hue|hsv|angle|checksum|crc|hash)(_|$)", re.IGNORECASE)  # whose values wrap on purpose
BALANCED = re.compile(r"balanc|bootstrap|episod|resampl", re.IGNORECASE)
MANY_DRAWS = 1000
FEWEST_OF_CLASS = 8  # samples
MAX_BOXES = 100  # of a sample
MOST_INDICES = 256  # of a sampler
LEVELS = 16  # samples whose parts are compared
ROUNDED = 1e-9  # share of the variance
SHUFFLES = frozenset(("randperm", "permutation", "shuffle", "choice", "multinomial"))
SEEDS = frozenset(("manual_seed", "RandomState", "default_rng", "seed", "Random"))


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
                    "note" if has_groups(seen) else None,  # each of which may be standardized by itself
                    subject=name,
                )
                break


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
    for step in (n for n in range(2, len(flat) // FEWEST_OF_CLASS + 1) if len(flat) % n == 0):
        if float(flat.reshape(-1, step, flat.shape[1]).mean(0).abs().max()) < 1e-3:  # such as the stocks of each day
            return True
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
    with seeded(0):  # two numbers may be a place by chance
        found = [_picture_and_mask(each) is not None for each in items(dataset, range(min(4 * DRAWS, len(dataset))))]
    if sum(found) < MOST * len(found):
        return
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
    owner = type(dataset.dataset if isinstance(dataset, Subset) else dataset)
    beside = {name for function in functions_beside(owner) for name in function.__code__.co_names}
    if "get_worker_info" in _names_of(owner) | beside:
        return  # whose seed it takes
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


@check("cached-augmentation", "likely", at="probe")
def cached_augmentation(seen: Evidence) -> Lines:
    """Reading a sample draws random numbers, for what is named as an augmentation, but no more if it is read again."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    whole = dataset.dataset if isinstance(dataset, Subset) else dataset
    count = len(dataset) if isinstance(dataset, Sized) and hasattr(type(dataset), "__getitem__") else 0
    names = _names_of(type(whole))
    if count < 2 * DRAWS or not any(map(AUGMENTED.search, names)) or SEEDS & names:
        return
    found = list[tuple[bool, bool]]()
    with suppress(Exception), seeded(0):
        found = [(_draws(dataset, i), _draws(dataset, i)) for i in range(1, count, count // DRAWS)]
    if sum(first and not second for first, second in found) > len(found) / 2 and not any(again for _, again in found):
        yield (
            "samples of training are augmented at random when they are read first, and kept, so each is the same in "
            "all epochs; keep what it is made of, and augment it in __getitem__"
        )


def _names_of(kind: type) -> set[str]:
    return {name for cls in own_classes(kind) for code in codes(cls) for name in (code.co_name, *code.co_names)}


def _draws(dataset: Any, index: int) -> bool:
    """Whether reading a sample draws numbers of a global generator."""
    states = []
    for _ in range(2):
        states.append((torch.get_rng_state().tolist(), [*np.random.get_state()[1]], random.getstate()))  # type: ignore[index]
        if len(states) == 1:
            dataset[index]
    return states[0] != states[1]


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
        if 1 - float(correlation[best]) ** 2 < ROUNDED:  # a state a moment before is almost the target
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
        owner = type(dataset.dataset if isinstance(dataset, Subset) else dataset)
        is_circle = any(map(CIRCLE.search, _names_of(owner)))
        yield Line(f"in the dataset, {lines[0]}", "note" if is_circle else None, subject="dataset")


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
                "note" if is_meant else None,
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
    if any(LABELS.search(name) for name in seen.probe.base("training_step").unread):
        return
    calls = seen.probe.base("training_step").calls
    if any(bool((c.target != y[0]).any()) for c in calls):
        return  # other samples are made in the step
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
    """Inputs in batches of the loader have labels of other samples of the same batch, by no renaming of classes."""
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
    known: dict[bytes, set[int]] = {}
    for x, y in pairs:
        known.setdefault(digest(x), set()).add(int(y))
    shares = []
    for seed in range(3):
        with seeded(seed):
            batch = next(iter(loader))  # type: ignore[arg-type]
        if not isinstance(batch, list | tuple) or len(batch) < 2 or not all(isinstance(t, Tensor) for t in batch):
            return
        found = [_share_of_misaligned([x, *batch[1:]], known) for x in batch[:-1]]
        shares.append(min((share for share in found if share is not None), default=0.0))
    if min(shares) > 0.2:
        yield (
            f"{shares[0]:.0%} of the samples of a batch have another label than in the dataset; correct collate_fn, "
            "which must order both alike"
        )


def _share_of_misaligned(batch: Sequence[Tensor], known: dict[bytes, set[int]]) -> float | None:
    """Share of rows with the label of another one in the batch; 0 if labels are renamed, or others, as those of pairs.

    It is None if most rows are no inputs of the dataset.

    Args:
        batch: Its first part is the rows, and the last one their labels.
        known: Labels of inputs by their hash.
    """
    inputs, labels = _unpadded(batch)
    rows = [(known.get(digest(x)), int(y)) for x, y in zip(inputs, labels, strict=False) if y.numel() == 1]
    found = [(right, y) for right, y in rows if right is not None]
    renamed: dict[int, set[int]] = {}
    for right, y in found:
        renamed.setdefault(min(right), set()).add(y)
    unsure = len(labels) - sum(len(right) == 1 for right, _ in found)
    others = (Counter(y for _, y in found) - Counter(min(right) for right, _ in found)).total()
    if len(found) <= 0.8 * len(labels):
        return None
    if all(len(names) == 1 for names in renamed.values()) or others > unsure:
        return 0.0
    return sum(y not in right for right, y in found) / len(found)


def _unpadded(batch: Sequence[Tensor]) -> tuple[Iterable[Tensor], Tensor]:
    """The rows of the first part of a batch, each as long as another part says, and the last part."""
    inputs, *lengths, labels = batch
    if inputs.ndim < 2:
        return inputs, labels
    fits = [t for t in lengths if t.shape == (len(inputs),) and 0 < int(t.min()) <= int(t.max()) == inputs.shape[1]]
    return [row[: int(n)] for row, n in zip(inputs, fits[0], strict=True)] if fits else inputs, labels


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
