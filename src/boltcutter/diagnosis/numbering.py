"""Checks of the numbers that splits give to words and classes: for ``audit``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.loaders import NUMBERS, Splits
from boltcutter.structure import flatten, inputs_of

FEWEST_OF_CLASS = 8  # samples
SPECIAL = 4
MOST_NUMBERS = 200_000  # of which the order of the first appearances is looked at
FEWEST_MOVED = 3  # words or classes
KNOWN = 0.9  # share of numbers that are in training
FREE = 8  # numbers that no word has, such as that of padding
NUMBERED = re.compile(r"class|vocab|itos|label|categor|idx|id2|words|tokens", re.IGNORECASE)  # lists of names


@check("numbered-apart", "likely", at="data")
def numbered_apart(seen: Evidence) -> Lines:
    """Numbers first appear in the order 0, 1, 2, … in validation, and in training as well, though none are sorted."""
    rows = {name: seen.splits.samples(name) if seen.splits else [] for name in ("train", "validation")}
    if not all(rows.values()) or any(numbers_differ(seen)):  # which names the table
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


@check("numbers-differ", "likely", at="data")
def numbers_differ(seen: Evidence) -> Lines:
    """Datasets of training and validation number most of the words or classes that both know differently."""
    if seen.splits is None:
        return
    one, two = (_numberings(seen.splits.dataset(name)) for name in ("train", "validation"))
    for name in one.keys() & two.keys():
        both = sorted(one[name].keys() & two[name].keys(), key=str)
        moved = [key for key in both if one[name][key] != two[name][key]]
        if len(moved) >= FEWEST_MOVED and len(moved) > len(both) / 2 and _are_read(seen.splits, len(one[name])):
            yield Line(
                f"{name} of the validation dataset is made anew: {moved[0]!r} has number {two[name][moved[0]]} there, "
                f"and {one[name][moved[0]]} in training, and so {len(moved)} of {len(both)} differ; make it of the "
                "training data, and pass it to both",
                subject=name,
            )


def _are_read(splits: Splits, count: int) -> bool:
    """Whether samples of training have almost all numbers below a count, and none above it, or are texts as yet."""
    rows = [[v for v in map(_integers, flatten(sample)) if v is not None] for sample in splits.samples("train")]
    found = [torch.cat(column) for column in zip(*rows, strict=False)]
    levels = [len(torch.unique(v)) for v in found if v.numel() and int(v.max()) < count + FREE]
    return not found or any(level > KNOWN * count - FREE for level in levels)


def _integers(value: Any) -> Tensor | None:
    """A leaf of a sample as integers, flattened; None if it has none."""
    is_number = isinstance(value, Tensor | int) or getattr(getattr(value, "dtype", None), "kind", None) in ("i", "u")
    t = torch.as_tensor(value) if is_number else None
    return None if t is None or t.is_floating_point() or t.is_complex() else t.flatten().long()


def _numberings(dataset: Any, name: str = "", *, depth: int = 2) -> dict[str, dict[Any, int]]:
    """Dictionaries and encoders of a dataset that number words or classes from 0 on, by their names."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: dict[str, dict[Any, int]] = {}
    for key, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        each, path = value, f"{name}.{key}".lstrip(".")
        if key == "classes_" and hasattr(value, "tolist"):
            each = {one: i for i, one in enumerate(value.tolist())}
        if isinstance(each, list) and NUMBERED.search(key) and all(isinstance(one, str) for one in each):
            each = {one: i for i, one in enumerate(each)} if len({*each}) == len(each) else None
        if isinstance(each, dict):
            numbers = [n for n in each.values() if isinstance(n, int | np.integer) and not isinstance(n, bool)]
            if FEWEST_MOVED <= len({*numbers}) == len(each) and min(numbers) >= 0 and max(numbers) < len(each) + FREE:
                found[path] = each
        elif depth > 1 and not isinstance(value, Tensor | np.ndarray | nn.Module | type):
            found |= _numberings(value, path, depth=depth - 1)
    return found
