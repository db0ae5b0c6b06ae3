"""Replays of a validation whose samples are divided into batches in other ways: for a trial only."""

from __future__ import annotations

import ast
import inspect
import io
import math
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import IterableDataset

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, is_metric, num_rows
from boltcutter.diagnosis.inputs import NOT_ADDITIVE
from boltcutter.diagnosis.loaders import items
from boltcutter.diagnosis.probe import Probe, Trace, copy_batch, kept, seeded, without_effects
from boltcutter.diagnosis.reruns import WRITES
from boltcutter.diagnosis.samples import SEEDS
from boltcutter.diagnosis.source import codes_of, codes_of_users, functions_of

MOST = 48  # samples
CLEAR = 0.02  # relative difference
ROUNDING = 1e-4  # relative difference of two values
CONVEX = re.compile(r"(^|[/_\-. ])(rmse|root_mean_squared?_error|ppl|perplexity)($|[/_\-. 0-9@])", re.IGNORECASE)
LOSSES = re.compile(r"loss|nll|err|mse|mae|acc|f1|score", re.IGNORECASE)
TOTAL = re.compile(r"sum|total|per_batch|count|num|cumul|running|energy|regret|return|cost", re.IGNORECASE)
SUMMED = re.compile(r"loss|nll|elbo|kl|energy|sum|total|per_batch|count|num", re.IGNORECASE)
HOOKS = re.compile(r"valid|epoch|save|export|write|report|log|best|plot")
FIRST = re.compile(r"init|first|ref|base|start|old|orig|anchor|before")  # values that later ones are compared with
KEPT = re.compile(
    r"best|max|min|ema|smooth|running|moving|avg|count|total|num|n_|seen|epoch|step|time|patience|since|roll|window|ewm|cum"
    r"|preq|history|stream|lifetime|so_far|all_"
)


@check("averaged-metric", "likely", at="trial")
def depends_on_batches(seen: Evidence) -> Lines:
    """What the end of a validation logs differs if its samples are divided otherwise, as its last batch is smaller."""
    loader = seen.splits.loaders.get("validation") if seen.splits else None
    size, samples = getattr(loader, "batch_size", None), _samples(seen, loader)
    dataset = getattr(loader, "dataset", ())
    if seen.probe is None or not isinstance(size, int) or size < 2 or not samples or len(dataset) <= size:
        return
    last = len(dataset) % size * (not getattr(loader, "drop_last", False))
    count = len(samples)
    ways = ([count], [count // 2] * 2, [count // 3 * 2, count // 3])
    whole = halves = uneven = again = dict[str, float]()
    with suppress(Exception), _validating(seen) as validate:  # of code that takes batches of its own size only
        whole, halves, uneven = (validate(_batches(seen, loader, samples, sizes)) for sizes in ways)
        again = validate(_batches(seen, loader, samples, ways[0]), seed=1)
    for name in whole.keys() & halves.keys() & uneven.keys():
        one, two, three = (values[name] for values in (whole, halves, uneven))
        if name not in again or not is_same(one, again[name]):
            continue  # it depends on random numbers, or on the validation before it
        if is_same(one, two) and not is_same(one, three) and last:
            yield Line(
                f"{name} is a mean of the batches of a validation, in which each counts alike, but the last one has "
                f"{last} samples, and the others {size}; weigh each by its number of samples, or update a metric of "
                "torchmetrics",
                "note" if "loss" in name else None,  # by MeanMetric, as templates do
                subject=name,
            )
            return
        is_count = SUMMED.search(name) or one.is_integer()
        if is_same(one, 2 * two) and one and last and not is_count:
            yield Line(
                f"{name} is divided by the number of batches times a fixed size, but the last one has {last} samples, "
                f"and the others {size}; divide by the number of samples",
                subject=name,
            )
            return
        if is_same(two, 2 * one) and three > 1.5 * one > 0 and LOSSES.search(name) and not TOTAL.search(name):
            yield Line(
                f"{name} of {count} validation samples is {one:.4g} in one batch, and {two:.4g} in two, as means of "
                "batches are added up, and not divided by their number; divide by it, or weigh each by its samples",
                subject=name,
            )
            return
        is_convex = bool(CONVEX.search(name))
        if not is_same(one, two) and _draws_samples(seen.probe):
            continue
        if not is_same(one, two) and (NOT_ADDITIVE.search(name) or is_convex):
            yield Line(
                f"{name} is {two:.4g} as a mean of two halves of {count} validation samples, and {one:.4g} of all of "
                "them; collect predictions, or update a metric of torchmetrics, and compute it once at the end",
                "note" if is_convex and abs(one - two) < CLEAR * abs(one) else None,
                subject=name,
            )
            return


def _draws_samples(probe: Probe) -> bool:
    """Whether a validation may draw samples for each batch, such as negatives, that are the same each time."""
    code = inspect.unwrap(type(probe.module).validation_step).__code__
    return bool(SEEDS & {*code.co_names}) or probe.draws_by_itself("validation_step")


@check("metric-not-reset", "likely", at="trial")
def keeps_samples(seen: Evidence) -> Lines:
    """What the end of a validation logs depends on the samples of the validation before it."""
    loader = seen.splits.loaders.get("validation") if seen.splits else None
    samples = _samples(seen, loader)
    others = codes_of_users(seen.module, seen.trainer) - codes_of(seen.module)  # of callbacks, which are not called
    read = {name for code in others for name in code.co_names}
    if seen.probe is None or not samples:
        return
    half = len(samples) // 2
    alone = both = first = second = dict[str, float]()
    with suppress(Exception):  # of code that takes batches of its own size only
        parts = [_batches(seen, loader, part, [half]) for part in (samples[:half], samples[half:])]
        with _validating(seen) as validate:
            alone = validate(parts[1])
        with _validating(seen) as validate:
            both = validate([*parts[0], *parts[1]])
        with _validating(seen) as validate:
            first, sizes = validate(parts[0]), _sizes(seen)
            for hook in (seen.module.on_train_epoch_end, seen.module.on_train_epoch_start):
                hook()
            second = validate(parts[1])
            grown = {name.rpartition(".")[2] for name, n in _sizes(seen).items() if n > sizes.get(name, n)}
            if not grown or grown & read:
                return  # a state that adapts, and no samples, or one that a callback empties
    for name in alone.keys() & both.keys() & first.keys() & second.keys():
        if KEPT.search(name.lower()) or is_same(alone[name], second[name]) or is_same(first[name], second[name]):
            continue
        if not is_same(both[name], second[name]):
            continue
        yield Line(
            f"{name} of a validation depends on the samples of the one before it ({second[name]:.4g}, alone "
            f"{alone[name]:.4g}), as what it collects is never emptied; clear it when a validation begins",
            subject=name,
        )
        return


@check("cached-value", "likely", at="trial")
def cached_value(seen: Evidence) -> Lines:
    """A validation computes an attribute by trained weights if it is None, and no code makes it None again."""
    probe, loader = seen.probe, seen.splits.loaders.get("validation") if seen.splits else None
    names = _cached(seen) if probe is not None else []
    samples = _samples(seen, loader) if names else []
    for name in names if samples else ():
        values = list[Tensor]()
        with suppress(Exception):  # of the user's code
            values = [_computed(seen, name, _batches(seen, loader, samples, [len(samples)]), i) for i in (0, 0, 1)]
        if len(values) < 3 or not all(isinstance(v, Tensor) and v.shape == values[0].shape for v in values):
            continue
        if torch.equal(values[0], values[1]) and not torch.allclose(values[0], values[2]):
            yield Line(
                f"a validation computes {name} once, by the weights of that time, and no code makes it None again, so "
                "later ones compare new weights with old values; set it to None when a validation begins",
                subject=name,
            )


def _computed(seen: Evidence, name: str, batches: Sequence[tuple[Any, int]], seed: int) -> Any:
    """The attribute that a validation computes, with other weights if there is a seed; None if training does."""
    assert seen.probe is not None
    batch = copy_batch(seen.probe.batches["training_step"])
    takes_index = is_param_in_hook_signature(seen.module.training_step, "batch_idx", min_args=2)
    trained = [p for p in seen.module.parameters() if id(p) in seen.owned and p.requires_grad and p.numel() > 1]
    with _validating(seen) as validate, seeded(seed):
        for p in trained if seed else ():
            p.add_(torch.randn_like(p), alpha=float(p.std()))
        setattr(seen.module, name, None)
        if seen.module.automatic_optimization:  # otherwise it would change the weights
            seen.module.training_step(batch, *[0][:takes_index])
        if getattr(seen.module, name) is not None:
            return None
        validate(batches)
        return getattr(seen.module, name)


def _cached(seen: Evidence) -> list[str]:
    """Attributes of the module that one method computes if they are None, and that no other code assigns."""
    found, assigned = set[str](), Counter[str]()
    for place in functions_of(seen.module, seen.trainer.callbacks):  # type: ignore[attr-defined]
        for node in ast.walk(place.tree) if place.tree.name != "__init__" else ():
            if isinstance(node, ast.If) and place.owner is seen.module:
                name = ast.unparse(node.test).removesuffix(" is None").removeprefix("self.")
                found |= {name} & {t.attr for inner in node.body for t in _assigned(inner)}
            assigned.update(target.attr for target in _assigned(node))
    found = {name for name in found if assigned[name] == 1 and not FIRST.search(name)}
    return sorted(name for name in found if vars(seen.module).get(name) is not None)


def _assigned(node: ast.AST) -> list[ast.Attribute]:
    """Attributes that a statement assigns, or deletes."""
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    return [target for target in targets if isinstance(target, ast.Attribute)]


def _sizes(seen: Evidence) -> dict[str, float]:
    """How much each attribute of the module and its parts has collected: items of a container, counts in a tensor."""
    found: dict[str, float] = {}
    parts: list[tuple[str, Any]] = [*seen.module.named_modules()]
    parts += [(f"{n}.{k}", v) for n, part in parts for k, v in vars(part).items() if hasattr(v, "__dict__")]
    for name, part in parts:
        for key, value in {**vars(part), **getattr(part, "_buffers", {})}.items():
            if isinstance(value, list | dict | set | deque):
                found[f"{name}.{key}"] = len(value)
            elif isinstance(value, Tensor | np.ndarray | int | float) and not isinstance(value, bool):
                t = torch.as_tensor(value)
                is_count = not t.is_complex() and bool((t == t.round()).all())
                found[f"{name}.{key}"] = float(t.double().abs().sum()) if is_count else 0.0
    return found


def is_same(a: float, b: float) -> bool:
    """Whether two values are equal but for rounding."""
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-6)


def replay(seen: Evidence) -> dict[str, float]:
    """What a validation with its first batch alone logs by its end; empty if it fails, or a hook may write."""
    if seen.probe is None or "validation_step" not in seen.probe.batches or _may_write(seen):
        return {}
    batch = copy_batch(seen.probe.batches["validation_step"])
    found = dict[str, float]()
    with suppress(Exception), _validating(seen) as validate:  # of the user's code
        found = validate([(batch, num_rows(batch))])
    return found


def _may_write(seen: Evidence) -> bool:
    return any(WRITES & {*code.co_names} for code in codes_of(seen.module) if HOOKS.search(code.co_name))


def _samples(seen: Evidence, loader: Any) -> list[Any]:
    """Samples of a loader, evenly spread, of a number that six divides; empty if there are few, or no indices.

    Also if a hook of the module may write something, as it is called again and again.
    """
    if _may_write(seen):
        return []
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or len(dataset) < MOST // 2:
        return []
    count = min(MOST, len(dataset)) // 6 * 6
    step = len(dataset) // count
    with seeded(0):
        return [*items(dataset, range(0, count * step, step))]


def _batches(seen: Evidence, loader: Any, samples: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, int]]:
    """Batches of some sizes, on the device, and these."""
    trainer, found, start = seen.trainer, list[tuple[Any, int]](), 0
    for size in sizes:
        with seeded(0):
            batch = loader.collate_fn([*samples[start : start + size]])
        found.append((trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch)), size))
        start += size
    return found


@contextmanager
def _validating(seen: Evidence) -> Iterator[Any]:
    """A function that validates with some batches, and returns what is logged by the end; all is restored behind it."""
    probe, module = seen.probe, seen.module
    assert probe is not None
    silent = redirect_stdout(io.StringIO())  # of hooks that print what they have computed
    with kept(module), without_effects(seen.trainer, module, Trace()), seeded(0), torch.no_grad(), silent:
        for part in module.modules():
            part.training = False
        yield partial(_validate, probe)


def _validate(probe: Probe, batches: Sequence[tuple[Any, int]], seed: int = 0) -> dict[str, float]:
    module, end = probe.module, dict[str, Any]()
    sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
    is_last, size = False, 0
    takes_index = is_param_in_hook_signature(module.validation_step, "batch_idx", min_args=2)

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if is_metric(value) or is_last:
            end[name] = value
        elif options.get("reduce_fx", "mean") == "mean" and options.get("on_epoch") is not False:
            number = float(value) if isinstance(value, float | int) or value.numel() == 1 else math.nan
            sums[name].append((number, options.get("batch_size") or size))

    def log_dict(values: Any, *args: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, **options)

    vars(module).update(log=log, log_dict=log_dict)
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(seed)
    with probe.trainer.precision_plugin.val_step_context():
        module.on_validation_start()
        module.on_validation_epoch_start()
        for i, (batch, size) in enumerate(batches):
            if num_rows(batch) not in (0, size):
                raise ValueError(size)  # what collates samples takes one of them, or packs several
            module.on_validation_batch_start(batch, i)
            output = module.validation_step(batch, *[i][:takes_index])
            module.on_validation_batch_end(output, batch, i)
        is_last = True
        module.on_validation_epoch_end()
        module.on_validation_end()
    whole = {n: each for n, each in sums.items() if len(each) == len(batches)}  # not of the first batch only
    found = {n: sum(v * w for v, w in each) / max(1, sum(w for _, w in each)) for n, each in whole.items()}
    for name, value in end.items():
        if is_metric(metric := value):
            value = metric.compute()
            metric.reset()  # as Lightning does
        if isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = float(value)
    return {name: value for name, value in found.items() if math.isfinite(value)}
