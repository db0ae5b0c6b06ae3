"""The first difference between two traces of the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boltcutter.replay.step_trace import FILE

Entry = dict[str, Any]
# What a step does, in its order; kinds of one stage are in the order of the trace.
STAGES: tuple[tuple[str, ...], ...] = (
    ("samples",),
    ("input",),
    ("initial weight", "initial buffer"),
    ("module input", "module"),
    ("loss",),
    ("gradient",),
    ("weight gradient",),
    ("option",),
    ("used gradient",),
    ("weight",),
    ("state",),
    ("buffer",),
    ("average",),
)
STAGE = {kind: number for number, kinds in enumerate(STAGES) for kind in kinds}
INDEPENDENT = 3  # stages of which none follows from another one


@dataclass
class Place:
    """Where two steps differ.

    Args:
        kind: ``samples``, ``input``, ``initial weight``, ``module``, ``gradient``, …: what differs.
        name: Of the field, module, parameter or option.
        text: The same in words.
        index: Of the sample, where it is one.
        size: Largest absolute difference of the values; None where they have no size.
        rank: Of which rank.
        batch: Number of the batch in the step.
        order: Of what a step does: number of the stage, and of what differs in it.
    """

    kind: str
    name: str
    text: str
    index: Any = None
    size: float | None = None
    rank: int = 0
    batch: int = 0
    order: tuple[int, int] = (0, 0)


def read_traces(folder: Path, step: int, ranks: int) -> list[list[Entry]]:
    """The trace of a step of each rank; empty for a rank that has none."""
    paths = [folder / FILE.format(rank, step) for rank in range(ranks)]
    return [torch.load(path, weights_only=True) if path.is_file() else [] for path in paths]


def first_places(one: Sequence[Sequence[Entry]], other: Sequence[Sequence[Entry]]) -> list[Place]:
    """Where the traces of all ranks of two steps differ first; several if none of them follows from another one.

    Args:
        one: Entries of each rank.
        other: Those of the other run.
    """
    found = [
        (stage, number, place)
        for rank, pair in enumerate(zip(one, other, strict=False))
        for stage, number, place in _differences(*pair, rank)
    ]
    if not found:
        return []
    found.sort(key=lambda each: each[:2])
    first = found[0][0]
    stages = {first}
    if first < INDEPENDENT:  # samples explain inputs, but neither explains initial weights
        stages |= {INDEPENDENT - 1} if first < INDEPENDENT - 1 else set()
    return [
        next(place for stage, _, place in found if stage == each) for each in sorted(stages & {f[0] for f in found})
    ]


def _differences(one: Sequence[Entry], other: Sequence[Entry], rank: int) -> list[tuple[int, int, Place]]:
    found: list[tuple[int, int, Place]] = []
    batches = [max((entry["batch"] for entry in entries), default=0) + 1 for entries in (one, other)]
    if batches[0] != batches[1]:
        text = f"the step has {batches[0]} batches in A, {batches[1]} in B"
        found.append((0, -1, Place("samples", "batches", text, rank=rank)))
    for number, kinds in enumerate(STAGES):
        pair = [[entry for entry in entries if entry["kind"] in kinds] for entries in (one, other)]
        for at, (here, there) in enumerate(_paired(*pair)):
            if here is None or there is None:
                side = pair[0] if there is None else pair[1]
                if (here or there or {}).get("kind") == "option" and _is_repeated(here or there or {}, side):
                    continue  # more groups of equal options
                place = _only(here or there or {}, "A" if there is None else "B")
            elif here["digest"] != there["digest"]:
                place = _describe(here, there)
            else:
                continue
            place.rank, place.order = rank, (number, at)
            found.append((number, at, place))
            break
    return found


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.get(name, 0) for name in ("batch", "kind", "name", "call", "number"))


def _paired(one: list[Entry], other: list[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    """Entries of the same name; where names were changed, those of the same place and shape."""
    here, there = ({_key(entry): entry for entry in entries} for entries in (one, other))
    if here.keys() != there.keys():
        shapes = [[(e["kind"], e["batch"], e.get("shape"), e.get("type")) for e in entries] for entries in (one, other)]
        if shapes[0] == shapes[1]:
            return [*zip(one, other, strict=True)]
    pairs: list[tuple[Entry | None, Entry | None]] = []
    waiting = [*there]
    for key, entry in here.items():
        if key in there:
            before = waiting[: waiting.index(key)]
            pairs += [(None, there[each]) for each in before if each not in here]
            waiting = [*waiting[len(before) + 1 :], *(each for each in before if each in here)]
        pairs.append((entry, there.get(key)))
    return pairs + [(None, there[each]) for each in waiting if each not in here]


def _is_repeated(option: Entry, entries: Sequence[Entry]) -> bool:
    """Whether an earlier group of the optimizer has an equal option."""
    name, digest = option["name"].partition(", group ")[0], option["digest"]
    same = (each for each in entries if each["name"].partition(", group ")[0] == name and each["digest"] == digest)
    return next(same) is not option


def _only(entry: Entry, side: str) -> Place:
    name, kind = entry["name"], entry["kind"]
    shown = f"{name} ({entry['type']})" if entry.get("type") else name
    return Place(kind, name, f"{kind} {shown} is only in {side}", batch=entry["batch"])


def _describe(here: Entry, there: Entry) -> Place:
    kind, name, batch = here["kind"], here["name"], here["batch"]
    renamed = f" ({there['name']} in B)" if there["name"] != name else ""
    of = f" of batch {batch + 1} of the step" if batch else ""
    if kind == "samples":
        return Place(kind, name, f"{_samples(here['indices'], there['indices'])}{of}", _first(here, there), batch=batch)
    if kind == "option":
        return Place(kind, name, f"optimizer: {name} is {here['digest']} in A, {there['digest']} in B")
    size, form = _size(here, there), ""
    for key in ("shape", "dtype"):
        if here[key] != there[key]:
            form = f": {key} {here[key]} in A, {there[key]} in B"
    if kind == "input":
        index, text = _input(here, there)
        return Place(kind, name, f"{text}{form}{of}", index, size, batch=batch)
    by = form or (f", by at most {size:.3g}" if size is not None else "")
    types = " in A, ".join(dict.fromkeys((here.get("type", ""), there.get("type", ""))))
    types += " in B" if here.get("type") != there.get("type") else ""
    shown = f"{name} ({types}){renamed}" if types else f"{name}{renamed}"
    words = {
        "initial weight": f"weight {shown} differs before the step",
        "initial buffer": f"buffer {shown} differs before the step",
        "module input": f"the input of module {shown} differs, although the batch and all outputs before are equal",
        "module": f"the output of module {shown} differs, and its input is equal",
        "loss": "the loss differs, although the outputs of all modules are equal",
        "gradient": f"the gradient of the output of module {shown} differs, and the loss is equal",
        "weight gradient": f"the gradient of {shown} differs, and those of all outputs are equal",
        "used gradient": f"the gradient of {shown} with which the optimizer makes its step differs, as after clipping",
        "weight": f"the update of {shown} differs, and its gradient is equal",
        "state": f"the optimizer's state {shown} differs after the step",
        "buffer": f"buffer {shown} differs after the step",
        "average": f"the average of {shown} differs after the step",
    }
    return Place(kind, name, f"{words[kind]}{by}{of}", size=size, batch=batch)


def _first(here: Entry, there: Entry) -> Any:
    pairs = zip(here["indices"], there["indices"], strict=False)
    return next((other for one, other in pairs if one != other), None)


def _samples(one: list[Any], other: list[Any]) -> str:
    if len(one) != len(other):
        return f"the batch has {len(one)} samples in A, {len(other)} in B"
    at = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    same = ", the same samples in another order" if sorted(map(str, one)) == sorted(map(str, other)) else ""
    return f"sample {at} of the batch has index {one[at]} in A, {other[at]} in B{same}"


def _input(here: Entry, there: Entry) -> tuple[Any, str]:
    """The index of the first sample whose values differ, and the difference in words."""
    one, other, size, name = here["values"], there["values"], here.get("size") or 0, here["name"]
    if here["shape"] != there["shape"] or not here["shape"] or here["shape"][0] != size or one.numel() % (size or 1):
        return None, f"{name} of the batch differs"
    different = ((one != other) & ~((one != one) & (other != other))).reshape(size, -1)
    if not bool(different.any()):
        return None, f"{name} of the batch differs, behind its first {one.numel()} numbers"
    rows = different.any(1).nonzero().reshape(-1).tolist()
    row, at = rows[0], int(different[rows[0]].nonzero()[0])
    values = [each.reshape(size, -1)[row, at].item() for each in (one, other)]
    indices = here.get("indices") or []
    index = indices[row] if row < len(indices) else None
    sample = f"sample {index}" if index is not None else f"sample {row} of the batch"
    more = f"; {len(rows)} of {size} samples differ" if len(rows) > 1 else ""
    equal = ", although the indices are equal" if indices else ""
    return (
        index,
        f"{name} of {sample} is {_shown(values[0])} in A, {_shown(values[1])} in B at position {at}{equal}{more}",
    )


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _size(here: Entry, there: Entry) -> float | None:
    one, other = here["values"], there["values"]
    if one.shape != other.shape or one.is_complex() or not one.numel():
        return None
    found = (one.double() - other.double()).abs().nan_to_num(0)
    return float(found.max())
