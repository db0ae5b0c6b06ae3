"""Layers that get values of another scale in a validation than in training: for a trial only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.epochs import replay
from boltcutter.diagnosis.evidence import Evidence, is_metric
from boltcutter.diagnosis.probe import Probe

FEWEST = 8  # calls, rows, or different values
MOST = 1000  # calls of a layer that are kept
MOST_VALUES = 100_000  # of one of them
FAR = 5.0  # half-spans of the range in training
NEAR = 2.0
MANY = 0.9  # share of rows
LEVEL = 0.05  # of the deviation in training


Key = tuple[str, int, int]  # name of a layer, which argument, and how many it gets


class Given(NamedTuple):
    """What a layer gets: the name, which argument, how many arguments it has, and the values (N, F)."""

    name: str
    place: int
    number: int
    rows: Tensor


@check("validation-scale", "likely", at="probe")
def validation_scale(seen: Evidence) -> Lines:
    """In validation, a layer gets step numbers where training has shares of them, or rows not yet standardized."""
    for key, before, after in _layers(seen):
        if text := _counted(before, after, is_alone=key[2] == 1) or _raw(seen, key, before, after):
            yield f"{key[0] or 'forward'} gets {text}"
            return


def _counted(before: Tensor, after: list[Tensor], *, is_alone: bool) -> str:
    """The line on a value from 0 to 1 in training that is a whole number in validation, up or down with each call."""
    if is_alone and before.shape[1] == 1 and min(map(len, after)) < FEWEST:
        return ""  # a function at some values
    for column, calls in zip(before.T, zip(*(rows.T for rows in after), strict=True), strict=True):
        low, high = float(column.min()), float(column.max())
        if low < 0 or high > 1 or len({*column.tolist()}) < FEWEST:
            continue
        numbers = [float(values[0]) if bool((values == values[0]).all()) else 0.5 for values in calls]
        run = _equal_steps([n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1]])
        if len(run) >= FEWEST and max(run) > FAR:
            return (
                f"values from {low:.3g} to {high:.3g} in training, but {run[0]:g}, {run[1]:g}, …, "
                f"{run[-1]:g} in the calls of a validation, as if numbers of steps were not divided by how many there "
                "are; scale both alike"
            )
    return ""


def _raw(seen: Evidence, key: Key, before: Tensor, after: list[Tensor]) -> str:
    """The line on values far out of the range of training, and of other calls, that the module has the scale of."""
    if len(before) < 2 * FEWEST or before.shape[1] < 2 or not any(_is_like(rows, before) for rows in after):
        return ""
    for i, rows in enumerate(after):
        if not _is_far(rows, before):
            continue
        if not any(_is_like(each, before, spread=True) for each in _scaled(seen.module, rows)):
            continue
        again = _changed(seen, key)
        if i < len(again) and again[i].shape == rows.shape and torch.equal(again[i], rows):
            return (
                f"values from {float(before.min()):.3g} to {float(before.max()):.3g} in training and of "
                f"the batch of validation, but there also from {float(rows.min()):.3g} to {float(rows.max()):.3g}, "
                "which are in that range if they are scaled by what the module itself holds, such as a mean and a "
                "deviation; scale all that the layer gets"
            )
    return ""


def _layers(seen: Evidence) -> Iterator[tuple[Key, Tensor, list[Tensor]]]:
    """Values (N, F) that do not depend on weights and that a layer gets in training, and in calls of a validation."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    given = _trained(probe)
    if not given:
        return
    found: list[Given] = []
    hooks = _listen(probe.module, found)
    try:
        is_replayed = bool(replay(seen))
        if not is_replayed:
            found.clear()
            probe.run("validation_step", probe.batches["validation_step"], training=False, record=False)
    except Exception:  # of the user's code
        return
    finally:
        for hook in hooks:
            hook.remove()
    for key, before in given.items():
        after = [each.rows for each in found if each[:3] == key and each.rows.shape[1] == before.shape[1]]
        if after and len(before) > 1:
            yield key, before, after


def _trained(probe: Probe) -> dict[Key, Tensor]:
    """What each layer gets in training, of all its calls."""
    found: list[Given] = []
    hooks = _listen(probe.module, found)
    try:
        probe.run("training_step", probe.batches["training_step"], training=False, record=False)
    except Exception:  # of the user's code
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    calls: dict[Key, list[Tensor]] = {}
    for each in found:
        calls.setdefault(each[:3], []).append(each.rows)
    same = {k: v for k, v in calls.items() if len({t.shape[1] for t in v}) == 1}
    return {key: torch.cat(rows) for key, rows in same.items()}


def _listen(module: nn.Module, found: list[Given]) -> list[Any]:
    """Hooks before all layers, which keep rows of numbers that have no gradient."""
    counts: dict[tuple[str, int], int] = {}

    def keep(name: str, part: nn.Module, args: Any) -> None:
        for place, value in enumerate(args):
            is_short = isinstance(value, Tensor) and value.ndim in (1, 2) and 0 < value.numel() <= MOST_VALUES
            if not is_short or not value.is_floating_point() or value.requires_grad:
                continue
            counts[name, place] = counts.get((name, place), 0) + 1
            rows = value.detach().clone().float()
            if counts[name, place] <= MOST and bool(rows.isfinite().all()):
                found.append(Given(name, place, len(args), rows if rows.ndim == 2 else rows[:, None]))

    parts = [(name, part) for name, part in module.named_modules() if not is_metric(part)]
    return [part.register_forward_pre_hook(partial(keep, name)) for name, part in parts]


def _changed(seen: Evidence, key: Key) -> list[Tensor]:
    """What a layer gets in a validation in which its outputs are others."""
    found: list[Given] = []

    def change(part: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5 + 0.5 if isinstance(output, Tensor) and output.is_floating_point() else None

    module = seen.module
    hooks = [*_listen(module, found), module.get_submodule(key[0]).register_forward_hook(change)]
    try:
        if not replay(seen) and seen.probe is not None:
            found.clear()
            seen.probe.run("validation_step", seen.probe.batches["validation_step"], training=False, record=False)
    except Exception:  # of the user's code
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return [each.rows for each in found if each[:3] == key]


def _distance(rows: Tensor, before: Tensor) -> Tensor:
    """How far values are from the middle of each column in training, in half of its range, shape (N, F)."""
    low, high = before.min(0).values, before.max(0).values
    half = ((high - low) / 2).clamp(min=1e-6)
    return (rows - (high + low) / 2).abs() / half


def _is_far(rows: Tensor, before: Tensor) -> bool:
    is_moving = before.std(0) > 0
    return len(rows) >= FEWEST and float((_distance(rows, before)[:, is_moving] > FAR).any(1).float().mean()) > 0.5


def _is_like(rows: Tensor, before: Tensor, *, spread: bool = False) -> bool:
    """Whether most rows are in the range of training; and, if ``spread``, not all close together."""
    if len(rows) < FEWEST or not bool(rows.isfinite().all()):
        return False
    is_moving = before.std(0) > 0
    is_wide = not spread or bool((rows.std(0) > LEVEL * before.std(0))[is_moving].all())
    return is_wide and float((_distance(rows, before)[:, is_moving] < NEAR).all(1).float().mean()) > MANY


def _scaled(module: nn.Module, rows: Tensor) -> Iterator[Tensor]:
    """Values that are scaled by two vectors of the module, as mean and deviation, or as the least and largest."""
    values = [v for part in module.modules() for v in (*vars(part).values(), *part.buffers(recurse=False))]
    values += [v for each in values if hasattr(each, "__dict__") and not callable(each) for v in vars(each).values()]
    arrays = [torch.from_numpy(v) if _is_numeric(v) else v for v in values if isinstance(v, Tensor) or _is_numeric(v)]
    vectors = [t.detach().float().cpu().flatten() for t in arrays if t.numel() == rows.shape[1]]
    rows = rows.cpu()
    for a in (torch.zeros(rows.shape[1]), *vectors):
        for b in vectors:
            if bool((b > 0).all()):
                yield (rows - a) / b
            if bool((b > a).all()):
                yield (rows - a) / (b - a)
                yield 2 * (rows - a) / (b - a) - 1


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fi"


def _equal_steps(numbers: list[float]) -> list[float]:
    """The longest run of whole numbers with equal steps."""
    best: list[float] = []
    run: list[float] = []
    for one, other in pairwise(numbers):
        is_whole = one == round(one) and other == round(other) and one != other
        if is_whole and len(run) > 1 and other - one == run[-1] - run[-2]:
            run.append(other)
        else:
            run = [one, other] if is_whole else []
        best = max(best, run, key=len)
    return best
