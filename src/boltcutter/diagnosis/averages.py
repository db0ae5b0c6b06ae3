"""Checks of copies of a network, such as moving averages: for the trial of ``check --batch`` and ``audit``."""

from __future__ import annotations

import ast
import copy
import dis
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.called import restored
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, joined, sampled
from boltcutter.diagnosis.probe import Probe, seeded
from boltcutter.diagnosis.reruns import WRITES
from boltcutter.diagnosis.source import (
    callback_classes,
    codes,
    codes_of_users,
    depends_on_time,
    functions_of,
    is_function,
    own_classes,
    tree_of,
)
from boltcutter.diagnosis.statements import called_name
from boltcutter.internals import BatchNorm
from boltcutter.structure import tensors

AVERAGE = re.compile(r"(^|\.|_)(ema|momentum|average|averaged|key_encoder|encoder_k|slow)(_|\.|$)", re.IGNORECASE)

FOLLOWS = re.compile(AVERAGE.pattern + r"|(^|\.|_)(targets?|teacher)(_|\.|$)", re.IGNORECASE)
TARGET = re.compile(r"(^|\.|_)target(_|\.|$)", re.IGNORECASE)
# By which code changes weights.
CHANGES = frozenset(
    (
        *("load_state_dict", "copy_", "lerp_", "lerp", "mul_", "add_", "data", "update_parameters", "deepcopy"),
        *("_foreach_lerp_", "_foreach_mul_", "_foreach_copy_", "swap_tensors", "set_", "Parameter", "update"),
    )
)
BEGINS = ("on_validation_model_eval", "on_validation_start", "on_validation_epoch_start")
ENDS = ("on_validation_epoch_end", "on_validation_end", "on_validation_model_train", "on_train_epoch_start")
SHOWN = ("save", "experiment", "wandb", "add_scalar", "add_image", "log_metrics", "log_image", "log_table")
# Methods in which a copy may be used in place of what is trained.
OUTSIDE = re.compile("__init__|setup|valid|test|predict|fit_|train_start|train_end|restore|swap|checkpoint|load|reset")
# By which code knows the end of training, or a loss that is no number.
RESCUES = frozenset(("max_epochs", "max_steps", "estimated_stepping_batches", "isfinite", "isnan", "is_last_batch"))
EACH_BATCH = ("training_step", "on_train_batch_end", "on_before_zero_grad")
FEWEST_SHARES = 5  # steps
FASTER, MUCH = 1.5, 0.2
MOVES = re.compile(r"1(?:\.0)? - self\.(?:hparams\.)?(\w+)")  # what an average keeps of itself
WEIGHTS = re.compile(r"state_dict|parameters\(|lerp|\.mul_|copy_")
MUCH_LEFT = 0.5  # of the first weights
EXACT = 0.01  # of how far an average has moved
REPLACED = 0.02  # of what the original has moved, within which an average follows it at once

ROUNDING = 1e-5  # of what the original has moved, which an average moves by its computation


KEPT_ON_PURPOSE = re.compile(r"(^|[_.])(init(ial)?|pretrained|original|base|first|start|anchor)([_.]|$)", re.IGNORECASE)


@check("average-unchanged", "likely", at="trial")
def average_unchanged(seen: Evidence) -> Lines:
    """A frozen copy is used in validation only, or named as an average, and has not changed when its original has."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    used, held = (probe.base(kind).inputs.keys() for kind in ("training_step", "validation_step"))
    parts = {n: m for n, m in seen.module.named_modules() if n and any(True for _ in m.parameters())}
    for name, part in parts.items():
        is_only_held = any(n == name or n.startswith(f"{name}.") for n in held) and not any(
            n == name or n.startswith(f"{name}.") for n in used
        )
        is_target = bool(TARGET.search(name)) and not can_change(seen)  # it may be copied later
        if not (is_only_held or AVERAGE.search(name) or is_target):
            continue
        if is_only_held and KEPT_ON_PURPOSE.search(name):
            continue  # by which the way from the beginning is measured
        twin = next((n for n, m in parts.items() if n != name and _is_left_behind(seen, name, part, n, m)), None)
        if twin is not None:
            kind = "a target" if is_target else "an average"
            what = "is what validation uses, but" if is_only_held else f"is named as {kind}, but"
            yield Line(
                f"{name}, a copy of {twin}, {what} nothing changes it while {twin} is trained; update it after each "
                "step, or use the trained part",
                "note" if depends_on_time(seen.module) else None,
            )
            return


def _is_left_behind(seen: Evidence, name: str, part: nn.Module, other: str, twin: nn.Module) -> bool:
    """Whether two parts began with the same weights, of which only those of the second, trained one have changed."""
    one, two = dict(part.named_parameters()), dict(twin.named_parameters())
    if one.keys() != two.keys() or any(f"{each}.{n}" not in seen.start for each in (name, other) for n in one):
        return False
    if any(not torch.equal(seen.start[f"{name}.{n}"], seen.start[f"{other}.{n}"]) for n in one):
        return False
    moved, followed = (
        sum(float((seen.start[f"{each}.{n}"] - sampled(p)).double().norm()) for n, p in parameters.items())
        for each, parameters in ((other, two), (name, one))
    )
    return moved > 0 and any(id(p) in seen.owned for p in two.values()) and followed <= ROUNDING * moved


def can_change(seen: Evidence) -> bool:
    """Whether code of the module or of a callback can change weights later, other than by an optimizer."""
    found = [code for code in codes_of_users(seen.module, seen.trainer) if CHANGES & {*code.co_names}]
    # What has no condition, and was called for each batch, would have changed them.
    is_done = all(code.co_name in EACH_BATCH and not _has_condition(code) for code in found)
    return bool(found) and (not is_done or depends_on_time(seen.module))


def _has_condition(code: types.CodeType) -> bool:
    names = [each.opname for each in dis.get_instructions(code) if each.opname != "TO_BOOL"]  # of Python 3.13
    return any("_IF_" in name and before != "WITH_EXCEPT_START" for before, name in pairwise(names))


@check("average-statistics", "likely", at="trial")
def average_statistics(seen: Evidence) -> Lines:
    """Validation uses an average of the weights, whose running statistics have not changed when the original's have."""
    probe = seen.probe
    if probe is None or "validation_step" not in probe.batches:
        return
    if any("update_bn" in code.co_names for code in codes_of_users(seen.module, seen.trainer)):
        return
    used = probe.base("validation_step").inputs.keys()
    for name, part in seen.module.named_modules():
        means = [n for n, _ in part.named_buffers() if n.endswith("running_mean") and _is_kept(seen, f"{name}.{n}")]
        if name and means and any(n.startswith(f"{name}.") for n in used):
            yield from _stale_statistics(seen, name, part, means)
    for name, part in held_apart(seen.module):
        norms = [(n, m) for n, m in part.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        means = [f"{n}.running_mean".lstrip(".") for n, m in norms if not bool(m.running_mean.any())]  # type: ignore[union-attr]
        if means and _validates_with(probe, part):
            yield from _stale_statistics(seen, name, part, means)


def _validates_with(probe: Probe, part: nn.Module) -> bool:
    """Whether validation calls a network."""
    calls = list[bool]()
    handle = part.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        probe.run("validation_step", probe.batches["validation_step"], training=False, record=False)
    finally:
        handle.remove()
    return bool(calls)


def held_apart(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Networks that plain objects of the module hold, so that they are no parts of it."""
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
            continue
        if not type(value).__module__.startswith(("lightning", "pytorch_lightning", "torch.", "boltcutter")):
            yield from ((f"{name}.{n}", part) for n, part in vars(value).items() if isinstance(part, nn.Module))


def _stale_statistics(seen: Evidence, name: str, part: nn.Module, means: list[str]) -> Lines:
    """Whether a part follows another one, but for these running statistics."""
    if any(id(p) in seen.owned for p in part.parameters()):
        return
    for other, twin in seen.module.named_modules():
        stale = [n for n in means if f"{other}.{n}" in seen.buffers and not _is_kept(seen, f"{other}.{n}")]
        gap, moved = _gap(seen, name, part, other, twin) if stale else (0.0, 0.0)
        if 0 < gap < moved:
            yield Line(
                f"{name}, which validation uses, follows the weights of {other}, but not its running statistics "
                f"({some(stale)}), which stay as at the start; copy its buffers, too",
                subject="statistics",
            )
            return


def _is_kept(seen: Evidence, buffer: str) -> bool:
    return torch.equal(seen.buffers[buffer], seen.module.get_buffer(buffer)) if buffer in seen.buffers else False


@check("average-copies", "likely", at="trial")
def average_copies(seen: Evidence) -> Lines:
    """After eight steps, an average, by its name or in a callback, has followed its original to 98%, but not wholly."""
    if seen.probe is None:
        return
    for name, part, other, twin in _averages(seen):
        gap, moved = _gap(seen, name, part, other, twin)
        if moved > 0 and ROUNDING * moved < gap <= REPLACED * moved:
            yield (
                f"{name}, whose name says that it follows {other} slowly, is almost equal to it after each step; "
                "are the weights of old and new exchanged (average * decay + new * (1 - decay))?"
            )
            return


@check("average-copies", "likely", at="trial")
def average_speeds_up(seen: Evidence) -> Lines:
    """In each of eight steps, an average has moved by a greater share of its distance from the original than before."""
    for name, followed in seen.followed.items():
        shares = followed.shares
        if len(shares) < FEWEST_SHARES or not all(0 < a < b for a, b in pairwise(shares)):
            continue
        if shares[-1] > max(FASTER * shares[0], MUCH):
            yield (
                f"{name}, an average of {followed.other}, moves by {shares[0]:.0%} of its distance to it in a step, "
                f"and by {shares[-1]:.0%} {len(shares) - 1} steps later, so it follows ever faster; "
                "are the weights of old and new exchanged (average * decay + new * (1 - decay))?"
            )
            return


@check("average-copies", "likely", at="probe")
def copied_back(seen: Evidence) -> Lines:
    """A method sets a network that is trained to the weights of its target, which is not."""
    for place in functions_of(seen.module):
        names = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(place.tree)}
        if OUTSIDE.search(place.tree.name) or names & RESCUES:
            continue
        for node in (n for n in ast.walk(place.tree) if isinstance(n, ast.Call | ast.For)):
            for target, source in _copies(node):
                parts = [_part(place.owner, text) for text in (target, source)]
                if not FOLLOWS.search(source) or "slow" in source or FOLLOWS.search(target) or not all(parts):
                    continue
                trained = [any(p.requires_grad and id(p) in seen.owned for p in m.parameters()) for m in parts if m]
                if trained == [True, False] and not _moves(seen, source):
                    yield Line(
                        f"{place.name} (line {place.line + node.lineno - 1}) sets {target}, which is trained, to the "
                        f"weights of {source}, so what it has learned since is lost; exchange the two",
                        subject=place.name,
                    )
                    return


def _moves(seen: Evidence, name: str) -> bool:
    """Whether code lets a network follow another one by a share of the way, as an average that is copied at times."""
    texts = [ast.unparse(place.tree) for place in functions_of(seen.module)]
    return any(name.rpartition(".")[2] in text and re.search(r"lerp_|\.mul_\(|_foreach_lerp", text) for text in texts)


def _copies(node: ast.Call | ast.For) -> Iterator[tuple[str, str]]:
    """Which network gets the weights of which other one, as the code names them."""
    if isinstance(node, ast.Call) and called_name(node) == "load_state_dict" and node.args:
        source = node.args[0]
        if isinstance(source, ast.Call) and called_name(source) == "state_dict":
            yield _owner(node), _owner(source)
    if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Call):
        names = [ast.unparse(each) for each in node.target.elts]
        owners = [_owner(each) for each in node.iter.args if isinstance(each, ast.Call)]
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and called_name(n) in ("copy_", "lerp_")]
        if len(names) == len(owners) == 2 and called_name(node.iter) == "zip":
            written = {_owner(call).removesuffix(".data") for call in calls}
            yield from ((owners[i], owners[1 - i]) for i in (0, 1) if {names[i]} == written)


def _owner(call: ast.Call) -> str:
    """What a method is called of."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _part(owner: nn.Module, text: str) -> nn.Module | None:
    """The network that self.… names."""
    first, _, path = text.partition(".")
    found = owner._modules.get(path.split(".")[0]) if first == "self" else None
    with suppress(AttributeError):
        return owner.get_submodule(path) if found is not None else None
    return None


@check("equal-networks", "likely", at="trial")
def equal_networks(seen: Evidence) -> Lines:
    """After eight steps, in which both were trained, two networks of one class have exactly the same weights."""
    found: dict[Any, tuple[str, dict[str, nn.Parameter]]] = {}
    later = [code for code in codes_of_users(seen.module, seen.trainer) if code.co_name != "__init__"]
    if any({"load_state_dict", "copy_", "lerp_"} & {*code.co_names} for code in later):
        return  # which may make them equal from time to time, as an average of clients
    for name, part in seen.module.named_modules():
        own = dict(part.named_parameters())
        names = [f"{name}.{n}" for n in own]
        matrices = [n for n, p in zip(names, own.values(), strict=True) if p.ndim > 1]
        is_trained = all(id(p) in seen.owned for p in own.values()) and any(n in seen.got_nonzero for n in matrices)
        if not name or not is_trained or not all(n in seen.start for n in names):
            continue
        shapes = type(part), tuple((n, p.shape) for n, p in own.items())
        other, twins = found.setdefault(shapes, (name, own))
        is_apart = other != name and not any(own[n] is twins[n] for n in own)
        is_moved = any(not torch.equal(seen.start[n], sampled(seen.parameters[n])) for n in matrices)
        if is_apart and is_moved and all(torch.equal(own[n], twins[n]) for n in own):
            yield (
                f"{other} and {name} began with equal weights, and are still equal after {seen.step} steps, so that "
                "they are one network; initialize each by itself, and not by copy.deepcopy"
            )
            return


@check("average-per-epoch", "likely", at="probe")
def average_rarely(seen: Evidence) -> Lines:
    """Only hooks of validation move an average, in the whole training by less than half of the way to the weights."""
    trainer = seen.trainer
    often = 1 / trainer.val_check_interval if isinstance(trainer.val_check_interval, float) else 1.0
    count = often * max(0, trainer.max_epochs or 0) / (trainer.check_val_every_n_epoch or 1)
    for owner in (*trainer.callbacks, seen.module):  # type: ignore[attr-defined]
        own = [f for cls in reversed(own_classes(type(owner))) for f in vars(cls).values() if is_function(f)]
        texts = {f.__name__: ast.unparse(tree) for f in own if (tree := tree_of(f)) is not None}
        for name, text in texts.items():
            found = MOVES.search(text) if WEIGHTS.search(text) else None
            value = (
                getattr(owner, found[1], getattr(getattr(owner, "hparams", None), found[1], None)) if found else None
            )
            decay = value if isinstance(value, float) else 0.0
            callers = [n for n, t in texts.items() if re.search(rf"self\.{name}\(", t)] or [name]
            is_slow = 0 < decay < 1 and count > 0 and decay**count > MUCH_LEFT
            if is_slow and all(n.startswith(("on_validation", "on_sanity")) for n in callers):
                yield (
                    f"{type(owner).__name__}.{name} moves an average by {1 - decay:.2g} of the way, but only "
                    f"{callers[0]} calls it, {count:.0f} times in the training, so {decay**count:.0%} of the average "
                    "are the first weights; call it in on_train_batch_end"
                )
                return


@check("weights-replaced", "likely", at="trial")
def weights_replaced(seen: Evidence) -> Lines:
    """Hooks before a validation, or eval(), put other weights in place of the trained ones, and none restores them."""
    module, trainer = seen.module, seen.trainer
    owners: list[Any] = [c for c in trainer.callbacks if {*own_classes(type(c))} & {*callback_classes(trainer)}]  # type: ignore[attr-defined]
    owners = [each for each in (*owners, module) if _has_hooks(each, *BEGINS, "eval")]
    names = {
        name for each in owners for cls in own_classes(type(each)) for code in codes(cls) for name in code.co_names
    }
    writes = names & WRITES or any(name.startswith(SHOWN) for name in names)
    if seen.probe is None or "validation_step" not in seen.probe.batches or not names & CHANGES or writes:
        return
    modes, sources = {part: part.training for part in module.modules()}, list[str]()
    trained = [p for p in module.parameters() if p.requires_grad and id(p) in seen.owned]  # no average beside them
    with suppress(Exception), seeded(0), restored(seen), _kept_objects([each for each in owners if each is not module]):
        with torch.no_grad():  # as the validation of the trial may have replaced them already
            for p in module.parameters():
                p.add_(torch.randn_like(p), alpha=0.01) if p.is_floating_point() else None
        before = during = joined([sampled(p) for p in trained])
        for owner, call in ((module, module.eval), *_hooks(owners, BEGINS, seen)):
            call()
            last, during = during, joined([sampled(p) for p in trained])
            sources += [type(owner).__name__] * (not torch.equal(last, during))
        for part, mode in modes.items():  # as Lightning does, which does not call train()
            part.training = mode
        for _, call in _hooks(owners, ENDS, seen):
            call()
        after = joined([sampled(p) for p in trained])
        if not torch.equal(during, after) or torch.equal(before, after):
            sources.clear()
    if sources:
        yield (
            f"{sources[0]} puts other weights in place of those that are trained when a validation "
            "begins, and nothing restores them behind it, so training goes on with them; keep a copy, and restore "
            "it in on_validation_end"
        )


def _has_hooks(owner: Any, *names: str) -> bool:
    return any(name in vars(cls) for cls in own_classes(type(owner)) for name in names)


def _hooks(owners: list[Any], names: tuple[str, ...], seen: Evidence) -> list[tuple[Any, Callable[[], Any]]]:
    """Those that the user has written, with their owners; those of callbacks first, as Lightning calls them."""
    return [
        (owner, partial(getattr(owner, name), *(() if owner is seen.module else (seen.trainer, seen.module))))
        for name in names for owner in owners if _has_hooks(owner, name)
    ]  # fmt: skip


@contextmanager
def _kept_objects(objects: list[Any]) -> Iterator[None]:
    """Restore attributes of objects, and the tensors and containers that they hold."""
    held = [(each, vars(each).copy()) for each in objects]
    boxes = [(box, copy.copy(box)) for _, values in held for box in values.values() if isinstance(box, dict | list)]
    found = [*(v for _, values in held for v in values.values())]
    networks = [part for part in found if isinstance(part, nn.Module)]
    all_tensors = [*tensors(found), *(t for part in networks for t in (*part.parameters(), *part.buffers()))]
    copies = [(t, t.detach().clone()) for t in all_tensors]
    try:
        yield
    finally:
        for each, values in held:
            vars(each).clear()
            vars(each).update(values)
        for box, content in boxes:
            box.clear()
            box.extend(content) if isinstance(box, list) else box.update(content)
        with torch.no_grad():
            for tensor, value in copies:
                tensor.copy_(value)


@dataclass
class Followed:
    """How an average has moved, step by step.

    Args:
        other: Name of the original.
        values: A sample of the average's weights, shape (V,).
        shares: Of its distance from the original, by which it has moved in each step.
    """

    other: str
    values: Tensor
    shares: list[float] = field(default_factory=list)


def follow(seen: Evidence) -> None:
    """Note how averages have moved since the last call."""
    for name, part, other, twin in _averages(seen):
        is_within = any(name.startswith(f"{whole}.") for whole in seen.followed)
        if is_within or _gap(seen, name, part, other, twin)[1] == 0:
            continue
        one, two = (torch.cat([sampled(p).flatten().double() for p in m.parameters()]) for m in (part, twin))
        last = seen.followed.get(name)
        if last is not None and last.other == other and float((way := two - last.values).square().sum()) > 0:
            moved = one - last.values
            share = float((moved * way).sum() / way.square().sum())
            is_straight = float((moved - share * way).norm()) <= EXACT * float(moved.norm())
            last.shares.append(share if is_straight else math.nan)  # which is in no order
            last.values = one
        elif last is None:
            seen.followed[name] = Followed(other, one)


def _averages(seen: Evidence) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Networks that are averages by their name, or that callbacks hold, each with each part of its class."""
    parts = {n: m for n, m in seen.module.named_modules() if n and any(True for _ in m.parameters())}
    callbacks: list[Any] = seen.trainer.callbacks  # type: ignore[attr-defined]
    held = [
        (f"{type(each).__name__}.{n}", part)
        for each in callbacks if own_classes(type(each)) and not type(each).__module__.startswith("boltcutter.")
        for n, part in vars(each).items() if isinstance(part, nn.Module)
    ]  # fmt: skip
    for name, part in [*((n, m) for n, m in parts.items() if FOLLOWS.search(n)), *held]:
        twins = ((n, twin) for n, twin in parts.items() if type(twin) is type(part) and n != name)
        yield from ((name, part, n, twin) for n, twin in twins if not FOLLOWS.search(n))


def _gap(seen: Evidence, name: str, part: nn.Module, other: str, twin: nn.Module) -> tuple[float, float]:
    """How far a part is from its original, and how far that has moved; zeros if it is no copy of it."""
    one, two = dict(part.named_parameters()), dict(twin.named_parameters())
    if one.keys() != two.keys() or any(one[n].shape != two[n].shape for n in one):
        return 0.0, 0.0
    if any(f"{other}.{n}" not in seen.start for n in two) or not any(id(p) in seen.owned for p in two.values()):
        return 0.0, 0.0
    gap = sum(float((sampled(one[n]) - sampled(two[n])).double().norm()) for n in one)
    return gap, sum(float((sampled(p) - seen.start[f"{other}.{n}"]).double().norm()) for n, p in two.items())
