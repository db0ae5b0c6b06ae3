"""Positions of tokens that a validation decodes one at a time: for a trial only."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.calls import is_equal
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS
from boltcutter.diagnosis.probe import Probe, is_close
from boltcutter.diagnosis.source import own_classes
from boltcutter.diagnosis.targets import replaced
from boltcutter.structure import flatten

FORCING = re.compile(r"teacher_?forc|(^|_)tf_(ratio|prob)|forcing_(ratio|prob)", re.IGNORECASE)
FEWEST = 4  # positions, and calls in a row
Calls = dict[str, list[Tensor]]  # what each embedding gets, by its name


@check("cached-position", "likely", at="probe")
def positions_restart(seen: Evidence) -> Lines:
    """Tokens that a validation decodes one at a time, and that depend on those before, all have the position 0."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    parts = {name: part for name, part in probe.module.named_modules() if isinstance(part, nn.Embedding)}
    if len(parts) < 2:
        return
    trained = _given(probe, "training_step", parts)
    places = {name: max(map(_length, calls)) for name, calls in trained.items() if any(map(_length, calls))}
    validated = _given(probe, "validation_step", parts) if places else {}
    for name, length in places.items():
        start = _restart(validated.get(name, []))
        for other in validated.keys() - places.keys() if start is not None else ():
            is_of_tokens = any(ids.ndim == 2 and ids.shape[1] == length for ids in trained.get(other, []))
            tokens = validated[other]
            if not is_of_tokens or len(tokens) != len(validated[name]) or start is None:
                continue
            run = tokens[start : start + FEWEST]
            are_single = all(ids.ndim and (ids.ndim == 1 or ids.shape[1] == 1) for ids in run)
            is_varied = len({*torch.cat([ids.flatten() for ids in run]).tolist()}) > 1
            if are_single and is_varied and _keeps_tokens(probe, parts[other], tokens, start):
                yield (
                    f"{name} gets the positions 0 to {length - 1} of a sequence in training, but validation passes "
                    f"tokens to {other} one at a time, {tuple(run[0].shape)}, {FEWEST} times or more in a row, each "
                    "with position 0, while their outputs depend on the tokens before; add the number of tokens that "
                    "are kept to the position"
                )
                return


@check("forced-in-validation", "likely", at="probe")
def forced_in_validation(seen: Evidence) -> Lines:
    """A layer is called in validation with teacher forcing between 0 and 1, and does not read whether it trains."""
    probe, kind = seen.probe, "validation_step"
    if probe is None or kind not in probe.batches:
        return
    found: dict[str, str] = {}
    handles = [
        part.register_forward_pre_hook(partial(_keep_forcing, found, name), with_kwargs=True)
        for name, part in probe.module.named_modules()
        if any(FORCING.search(parameter) for parameter in _parameters(part))
    ]
    if not handles:
        return
    try:
        probe.run(kind, probe.batches[kind], training=False, record=False)
    finally:
        for handle in handles:
            handle.remove()
    for name, value in found.items():
        yield Line(
            f"validation calls {name or 'the module'} with {value}, so predictions are made from true values in part, "
            "which are unknown later; pass 0 in validation",
            subject=name,
        )


@check("forced-in-validation", "likely", at="probe")
def targets_in_validation(seen: Evidence) -> Lines:
    """A forward gets in validation what may be None, the targets of a series, on which later predictions depend."""
    probe, kind = seen.probe, "validation_step"
    if probe is None or kind not in probe.batches:
        return
    calls = [c for c in probe.base(kind).calls if c.kind in REGRESSIONS and c.target.ndim in (2, 3)]
    given = [*_optional(probe)] if calls else []
    for j, leaf in enumerate(flatten(probe.batches[kind])):
        call = next((c for c in calls if isinstance(leaf, Tensor) and is_equal(c.target, leaf)), None)
        name = next((n for n, t in given if isinstance(leaf, Tensor) and is_equal(t, leaf)), "")
        if call is None or not name or leaf.shape[1] < FEWEST or call.prediction.shape != leaf.shape:
            continue
        middle, new = leaf.shape[1] // 2, leaf.clone()
        new[:, middle] += leaf.std() + 1
        other = probe.run(kind, replaced(probe, kind, {j: new}), training=False, record=False)
        number = next(i for i, c in enumerate(probe.base(kind).calls) if c is call)
        if len(other.calls) != len(probe.base(kind).calls):
            continue
        one, two = call.prediction, other.calls[number].prediction
        differ = [not is_close(one[:, t], two[:, t]) for t in range(leaf.shape[1])] if one.shape == two.shape else []
        if any(differ) and not any(differ[: middle + 1]):
            yield (
                f"validation passes the targets as {name}, and each prediction depends on those of earlier times, so "
                "its error is that of one time ahead; leave them out in validation, where a forecast goes on by itself"
            )
            return


def _optional(probe: Probe) -> Iterator[tuple[str, Tensor]]:
    """Tensors that parts of the user's own get in validation for parameters that are None by default."""
    found: list[tuple[str, Tensor]] = []

    def keep(part: nn.Module, args: Any, kwargs: Any) -> None:
        with suppress(TypeError):
            signature = inspect.signature(part.forward)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if isinstance(value, Tensor) and signature.parameters[name].default is None:
                    found.append((name, value.detach()))

    own = [part for part in probe.module.modules() if own_classes(type(part))]
    handles = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in own]
    try:
        probe.run("validation_step", probe.batches["validation_step"], training=False, record=False)
    finally:
        for handle in handles:
            handle.remove()
    yield from found


def _parameters(part: nn.Module) -> Mapping[str, inspect.Parameter]:
    own = type(part).forward
    is_blind = isinstance(own, types.FunctionType) and "training" not in own.__code__.co_names
    return inspect.signature(own).parameters if is_blind and own_classes(type(part)) else {}


def _keep_forcing(found: dict[str, str], name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward hook that keeps the value of teacher forcing, if it is a share."""
    with suppress(TypeError):  # of a call that forward itself refuses
        given = inspect.signature(part.forward).bind(*args, **kwargs)
        given.apply_defaults()
        for parameter, value in given.arguments.items():
            if FORCING.search(parameter) and isinstance(value, float) and 0 < value < 1:
                found[name] = f"{parameter}={value:g}"


def _length(ids: Tensor) -> int:
    """How many positions there are, if each sequence has 0, 1, 2, … ; 0 if it has others."""
    line = torch.arange(ids.shape[-1] if ids.ndim else 0, device=ids.device)
    return len(line) if len(line) >= FEWEST and bool((ids == line).all()) else 0


def _restart(calls: list[Tensor]) -> int | None:
    """The first of several calls in a row that get the position 0 alone."""
    are_first = [bool((ids == 0).all()) and (ids.numel() == 1 or ids.shape[-1] == 1) for ids in calls]
    starts = (i for i in range(len(calls) - FEWEST + 1) if all(are_first[i : i + FEWEST]))
    return next(starts, None)


def _given(probe: Probe, kind: str, parts: dict[str, nn.Embedding]) -> Calls:
    """What embeddings get in a step; nothing if it fails."""
    found: Calls = {}

    def keep(name: str, part: nn.Module, args: Any) -> None:
        found.setdefault(name, []).extend(t.detach().clone() for t in tensors_of(args)[:1])

    hooks = [part.register_forward_pre_hook(partial(keep, name)) for name, part in parts.items()]
    return found if _runs(probe, kind, hooks) else {}


def _keeps_tokens(probe: Probe, part: nn.Embedding, tokens: list[Tensor], start: int) -> bool:
    """Whether outputs for a token depend on the token of the call before, where all other calls get the same."""
    change = start + 1
    altered = [*tokens]
    altered[change] = (tokens[change] + 1) % part.num_embeddings
    one, other = (_forced(probe, part, each, change + 1) for each in (tokens, altered))
    pairs = [*zip(one, other, strict=True)] if len(one) == len(other) else []
    return any(a.shape == b.shape and not is_close(a, b) for a, b in pairs)


def _forced(probe: Probe, part: nn.Embedding, tokens: list[Tensor], number: int) -> list[Tensor]:
    """Outputs of layers between one call of an embedding and the next, where each call gets given tokens."""
    count, found = 0, list[Tensor]()

    def give(embedding: nn.Module, args: Any) -> Any:
        nonlocal count
        count += 1
        fits = (
            count <= len(tokens) and args and isinstance(args[0], Tensor) and args[0].shape == tokens[count - 1].shape
        )
        return (tokens[count - 1], *args[1:]) if fits else None

    def keep(layer: nn.Module, args: Any, output: Any) -> None:
        if count == number + 1:
            found.extend(t.detach().clone() for t in tensors_of([output])[:1])

    hooks = [part.register_forward_pre_hook(give)]
    hooks += [layer.register_forward_hook(keep) for layer in probe.module.modules()]
    return found if _runs(probe, "validation_step", hooks) else []


def _runs(probe: Probe, kind: str, hooks: list[Any]) -> bool:
    """Whether a step ends without an error; the hooks are removed."""
    try:
        probe.run(kind, probe.batches[kind], training=False, record=False)
    except Exception:  # of the user's code
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return True
