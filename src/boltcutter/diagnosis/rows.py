"""Checks of the rows of a dataset: those that are never read, their number as an input, and unknown tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sized
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.loaders import items
from boltcutter.diagnosis.probe import seeded
from boltcutter.diagnosis.unread import files_of
from boltcutter.structure import flatten

UNREAD = 0.2  # share of rows
FEWEST = 32  # rows
MOST_COLUMNS = 500
MOSTLY = 0.5  # share of tokens
MOST_TOKENS = 20_000
KNOWN = 5  # other tokens
LIMITS = re.compile(r"len|size|num|count|max|limit|subset|total|samples|epoch|steps|indices|index|keys|order|windows")
MEASURES = frozenset(("len", "shape", "size", "numel", "int"))
COLLATED = 12  # samples
NUMBERS = (Tensor, np.ndarray, np.generic, int, float)
MOST_GROUPS = 64
RELATED = 0.99  # correlation
PLACES = 8  # of which rows are compared


@check("unread-samples", "likely", at="probe")
def unread_samples(seen: Evidence) -> Lines:
    """A dataset reads row i of its arrays, or of a list, for sample i, but has a fifth fewer, and no number says so."""
    for name in seen.splits.loaders if seen.splits else ():
        dataset = seen.splits.dataset(name)  # type: ignore[union-attr]
        is_own = not type(dataset).__module__.startswith(("torch.", "boltcutter.")) and hasattr(dataset, "__dict__")
        if not isinstance(dataset, Sized) or not is_own:
            continue
        count = len(dataset)
        held = {key: value for key, value in vars(dataset).items() if _is_array(value) or isinstance(value, list)}
        sizes = {len(value) for value in held.values() if len(value) >= count}
        if len(sizes) != 1 or count < 1 or (rows := sizes.pop()) < FEWEST or count > (1 - UNREAD) * rows:
            continue
        held = {key: value for key, value in held.items() if len(value) == rows}
        if _is_said(dataset, {*held}, count):
            continue
        places = [*range(0, count, max(1, count // PLACES)), count - 1]
        with suppress(Exception), seeded(0):  # of a dataset that reads otherwise
            if _reads_arrays(dataset, held, places) or _reads_a_list(dataset, held, places):
                yield Line(
                    f"the dataset of {name} has {rows} rows, but its length is {count}, so the others are never read; "
                    "return the number of rows from __len__",
                    subject=name,
                )


def _is_said(dataset: Any, held: set[str], count: int) -> bool:
    """Whether a number, an attribute or another name of the code tells how many samples a dataset is to have."""
    others = vars(dataset).keys() - held
    code = getattr(type(dataset).__len__, "__code__", None)
    if code is None or any(LIMITS.search(key) or key in code.co_names for key in others):
        return True
    is_number = any(each == count or isinstance(each, float) for each in code.co_consts)
    is_number |= len({each for each in code.co_consts if type(each) is int and each > 1}) > 1  # as of 4 // 5
    return is_number or not held | MEASURES >= {*code.co_names} or bool(code.co_freevars)


def _reads_arrays(dataset: Any, held: dict[str, Any], places: list[int]) -> bool:
    """Whether the sample of each place has the rows of all arrays of the same number."""
    arrays = [value for value in held.values() if _is_array(value)]
    if len(arrays) < 2 and not any(a.ndim > 1 and a[0].size > 1 for a in map(np.asarray, arrays)):
        return False
    samples, count = [*items(dataset, places)], len(cast(Sized, dataset))
    pairs = [*zip(places, samples, strict=True)]
    is_half = all(len(a) % count == 0 for a in arrays)  # of which a sample has two rows, as left and right pictures
    if is_half and all(any(_holds(sample, [a[i + count]]) for a in arrays) for i, sample in pairs):
        return False
    return all(_holds(sample, [a[i] for a in arrays]) for i, sample in pairs)


class _Reads(list[Any]):
    """A list that notes which of its items are read."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self.read: list[Any] = []

    def __getitem__(self, place: Any) -> Any:
        self.read.append(place)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        self.read.append(None)
        return super().__iter__()


def _reads_a_list(dataset: Any, held: dict[str, Any], places: list[int]) -> bool:
    """Whether a list is read at each place for its sample, and at no other."""
    for key, value in held.items():
        if not isinstance(value, list):
            continue
        other, kept = copy.copy(dataset), _Reads(value)
        setattr(other, key, kept)
        if all(_reads_only(other, kept, i) for i in places):
            return True
    return False


def _reads_only(dataset: Any, kept: _Reads, place: int) -> bool:
    kept.read.clear()
    next(iter(items(dataset, [place])))
    return {*kept.read} == {place}


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _holds(sample: Any, rows: list[Any]) -> bool:
    """Whether each row is a part of a sample."""
    leaves = [
        torch.as_tensor(leaf)
        for leaf in flatten(sample)
        if isinstance(leaf, Tensor | np.ndarray | np.generic | int | float)
    ]
    known = [torch.as_tensor(row) for row in rows]
    return all(
        any(a.numel() == b.numel() and torch.equal(a.flatten().to(b), b.flatten()) for b in leaves) for a in known
    )


@check("row-number", "likely", at="data")
def row_number(seen: Evidence) -> Lines:
    """A column has an own, equally spaced value for each row of all splits, in whose order the classes are sorted."""
    splits = seen.splits
    tables = {name: table for name in splits.loaders if (table := splits.table(name))} if splits else {}
    if len(tables) < 2 or any(t[1].is_floating_point() for t in tables.values()):
        return
    x, y = (torch.cat([table[i] for table in tables.values()]) for i in range(2))
    if len(x) < FEWEST or len(torch.unique(y)) > len(y) // 8:
        return
    for j in range(min(x.shape[1], MOST_COLUMNS) if x.shape[1] > 1 else 0):
        if len(torch.unique(x[:FEWEST, j])) < FEWEST:
            continue
        order = x[:, j].argsort()
        gaps = x[order, j].diff()
        smallest = float(gaps.min())
        if smallest <= 0 or not bool(((gaps / smallest).round() * smallest - gaps).abs().max() < 1e-3 * smallest):
            continue
        changes = int((y[order].diff() != 0).sum())
        by_chance = (1 - float((y.bincount() / len(y)).square().sum())) * (len(y) - 1)
        if float(gaps.max()) < 4 * smallest and changes < by_chance / 4:
            is_whole = bool((x[:, j] == x[:, j].round()).all()) and float(x[:, j].min()) >= 0
            yield Line(
                f"column {j} of the inputs is the number of the row, in whose order the classes are sorted, so it "
                "tells the class of these data, and of no others; leave it out",
                None if is_whole else "note",  # such as a temperature that was raised in steps
            )
            return


@check("mostly-unknown", "likely", at="probe")
def mostly_unknown(seen: Evidence) -> Lines:
    """Over half of the tokens that an embedding gets, without padding, are the number behind its padding_idx."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    layers = {n: m for n, m in seen.module.named_modules() if isinstance(m, nn.Embedding)}
    batch = probe.batches[kind]
    for name, t in probe.base(kind).tensors:
        layer = layers.get(name.removeprefix("the input of "))
        if layer is None or layer.padding_idx != 0 or t.ndim != 2 or t.numel() > MOST_TOKENS:
            continue
        real = t[t != 0]
        share = float((real == 1).float().mean()) if real.numel() >= FEWEST else 0.0
        is_given = any(p.numel() == t.numel() and torch.equal(p.flatten(), t.flatten()) for p in flatten(batch))
        if share > MOSTLY and is_given and len(torch.unique(real)) > KNOWN and layer.num_embeddings > 2 * KNOWN:
            is_named = bool(re.search(r"unk|oov|\.get\([^()]*, 1\)", files_of(seen), re.IGNORECASE))
            yield Line(
                f"{share:.0%} of the tokens that {name.removeprefix('the input of ')} gets are 1, as of words that the "
                "vocabulary does not have; build it from the same tokens as the texts, in case and form",
                None if is_named else "note",
            )
            return


@check("parts-misaligned", "certain", at="data")
def parts_misaligned(seen: Evidence) -> Lines:
    """What collates samples puts one part of the batch in another order of the samples than another part."""
    for name, loader in seen.splits.loaders.items() if seen.splits else ():
        dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        if not isinstance(dataset, Sized) or collate is None or len(dataset) < COLLATED:
            continue
        with suppress(Exception), seeded(0):  # of samples that are no trees of tensors
            samples = [*items(dataset, range(COLLATED))]
            leaves = [[torch.as_tensor(leaf) for leaf in flatten(s) if isinstance(leaf, NUMBERS)] for s in samples]
            orders = _orders(collate(samples), leaves)
            if order := _order_of_labels(samples, collate):
                orders.setdefault(-1, []).append(order)
            first = next(iter(orders.values()), [])
            other = next((each[0] for each in orders.values() if not any(order in first for order in each)), None)
            with seeded(1):
                again = _orders(collate(samples), leaves)
            if any(again.get(part) != found for part, found in orders.items() if part >= 0):
                continue  # the order is drawn, as of pairs of which some do not match
            if other is not None and len(set(other)) == len(set(first[0])) == COLLATED:
                row = next(i for i, pair in enumerate(zip(first[0], other, strict=True)) if pair[0] != pair[1])
                yield Line(
                    f"collate_fn of {name} gives parts of a batch in different orders: row {row} of one is sample "
                    f"{first[0][row]} of the list, that of another one is sample {other[row]}; sort the samples before "
                    "they are taken apart",
                    subject=name,
                )


def _orders(batch: Any, leaves: list[list[Tensor]]) -> dict[int, list[list[int]]]:
    """Of each part of the samples that a batch has: of which sample each row is, maybe in several orders."""
    parts = [t for t in flatten(batch) if isinstance(t, Tensor) and t.ndim and len(t) == COLLATED]
    orders: dict[int, list[list[int]]] = {}
    for part, order in filter(None, (_order_of(t, leaves) for t in parts)):
        orders.setdefault(part, []).append(order)
    return orders


def _order_of(rows: Tensor, leaves: list[list[Tensor]]) -> tuple[int, list[int]] | None:
    """The part of the samples that has the values of rows, also before padding, and of which sample each row is."""
    for j in range(min(len(parts) for parts in leaves)):
        owners = [[i for i, parts in enumerate(leaves) if _begins_with(row, parts[j])] for row in rows]
        if all(len(each) == 1 for each in owners):
            return j, [each[0] for each in owners]
    return None


def _order_of_labels(samples: list[Any], collate: Any) -> list[int]:
    """Of which sample the label of each row is: the row that changes if this sample gets another label; or empty."""
    owners: dict[int, int] = {}
    parts = [t for t in flatten(collate(samples)) if isinstance(t, Tensor)]
    for i, sample in enumerate(samples):
        if (
            not isinstance(sample, tuple)
            or not isinstance(sample[-1], NUMBERS)
            or torch.as_tensor(sample[-1]).numel() > 1
        ):
            return []
        other = next((each[-1] for each in samples if float(each[-1]) != float(sample[-1])), None)
        if other is None:
            return []
        new = collate([(*each[:-1], other) if each is sample else each for each in samples])
        pairs = zip(parts, (t for t in flatten(new) if isinstance(t, Tensor)), strict=True)
        changed = [
            [*(a != b).reshape(len(a), -1).any(1).nonzero()[:, 0].tolist()] for a, b in pairs if not torch.equal(a, b)
        ]
        if len(changed) != 1 or len(changed[0]) != 1:
            return []
        owners[changed[0][0]] = i
    return [owners[row] for row in range(len(samples))]


def _begins_with(row: Tensor, part: Tensor) -> bool:
    """Whether a row of a batch is a part of a sample, with padding behind it."""
    if row.ndim != part.ndim or any(a < b for a, b in zip(row.shape, part.shape, strict=True)):
        return False
    rest = row.clone()
    inner = tuple(slice(size) for size in part.shape)
    is_equal = torch.equal(row[inner].to(part), part)
    rest[inner] = 0
    return is_equal and (rest.numel() == part.numel() or len(torch.unique(rest[..., -1:])) <= 2)


@check("sampler-weights", "likely", at="data")
def weights_of_others(seen: Evidence) -> Lines:
    """WeightedRandomSampler has the inverse sizes of the classes as weights, but not those of its samples' own."""
    loader = seen.splits.train if seen.splits else None
    weights = getattr(getattr(loader, "sampler", None), "weights", None)
    table = seen.splits.table("train") if seen.splits else None
    samples = seen.splits.samples("train") if seen.splits else []
    if not isinstance(weights, Tensor) or len(weights) != len(samples):
        return
    labels = table[1] if table is not None else _last_integers(samples)
    if labels is None or labels.is_floating_point() or len(labels) != len(weights):
        return
    values, places, counts = torch.unique(weights.double(), return_inverse=True, return_counts=True)
    classes, own = torch.unique(labels, return_counts=True)
    if len(values) != len(classes) or len(values) < 2 or len(labels) < FEWEST * len(classes):
        return
    is_inverse = float(torch.corrcoef(torch.stack([values, 1 / counts.double()]))[0, 1]) > RELATED
    close = (counts.sort().values - own.sort().values).abs() <= 0.2 * own.sort().values + 2
    joint = torch.zeros(len(values), len(classes))
    joint.index_put_((places, torch.searchsorted(classes, labels)), torch.ones(len(labels)), accumulate=True)
    expected = joint.sum(1, keepdim=True) * joint.sum(0) / joint.sum()
    is_chance = bool(((joint - expected).abs() <= 4 * expected.sqrt() + 2).all())  # as of independent ones
    columns = [
        column for leaf in zip(*map(flatten, samples), strict=False) if isinstance(leaf[0], NUMBERS)
        for column in torch.stack([torch.as_tensor(v).flatten()[:MOST_GROUPS] for v in leaf]).double().unbind(1)
    ]  # fmt: skip
    if any(_is_function_of(places, column) for column in columns):
        return  # weights of other groups, as of a domain
    if is_inverse and bool(close.all()) and is_chance:
        yield (
            f"the {len(values)} weights of the sampler are the inverse sizes of the classes, but those of samples have "
            "nothing to do with their labels, as of another order or of the whole data; use the labels of these samples"
        )


def _is_function_of(places: Tensor, column: Tensor) -> bool:
    """Whether samples with the same value in a column, of which there are few, have the same weight."""
    values, groups = torch.unique(column, return_inverse=True)
    pairs = torch.unique(torch.stack([groups, places]), dim=1)
    return 1 < len(values) <= MOST_GROUPS and pairs.shape[1] == len(values)


def _last_integers(samples: list[Any]) -> Tensor | None:
    """The last part of the samples, if it is one integer of each."""
    last = [flatten(sample)[-1] for sample in samples if flatten(sample)]
    found = [torch.as_tensor(value) for value in last if isinstance(value, NUMBERS)]
    is_label = len(found) == len(samples) and all(t.numel() == 1 and not t.is_floating_point() for t in found)
    return torch.stack([t.reshape(()) for t in found]) if is_label else None
