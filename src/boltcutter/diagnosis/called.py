"""Probes that call the user's own functions again: scores of predictions, and returns of rewards."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor, nn

from boltcutter.diagnosis.calls import is_equal
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, is_metric
from boltcutter.diagnosis.graph import MOVES, REGRESSIONS, name_of
from boltcutter.diagnosis.probe import Trace, is_close, kept, seeded, without_effects
from boltcutter.diagnosis.reruns import WRITES
from boltcutter.diagnosis.signs import sign_of
from boltcutter.diagnosis.source import (
    functions_of,
    is_function,
    namespaces_of,
    own_classes,
    tree_of,
)

NAMES = "dice|iou|miou|jaccard|tversky|ssim|psnr|f1"
SCORES = re.compile(rf"(^|_)({NAMES})(_|$)|(?<![a-z])(Dice|IoU|Iou|Jaccard|Tversky|SSIM|Ssim|PSNR|F1)(?![a-z])")
OVERLAPS = re.compile("iou(?!s)|overlap", re.IGNORECASE)
REWARDS = re.compile(r"^(rews?|rewards?)(_|$)")
RETURNS = re.compile(r"discount|returns?($|_)|reward_to_go|rewards_to_go|rtg|(^|_)gae($|_)", re.IGNORECASE)
REVERSES = re.compile(r"revers|\[::-1\]|flip|, -1\):|insert\(0|appendleft|\[-|rms|running|- 1 - \w|- \w+ - 1")
GAINS = re.compile(r"(^|[^a-z])rew(ard)?s?([^a-z]|$)|(^|\W)r(\W|$)")
DISCOUNTED = re.compile(r"gamma|discount|\b0?\.[5-9]")
DISCOUNT = re.compile(r"gamma|discount")
SHOWS = frozenset(("print", "plot", "show", "savefig", "imshow", "log", "info", "open", "log_dict"))
MOST_CALLS = 16
BETTER = 0.02  # by which a perfect prediction has a higher score
EXACT = 1e-3
LINEAR = ("Convolution", "Addmm", "Mm", "Bmm")  # operations of a last layer
HIGH = 0.8  # an overlap of perfect predictions
FEWEST = 4  # rewards
SURE = 20.0  # a logit


class Call(NamedTuple):
    """A call of a function of the user's own, or of a layer.

    Args:
        name: Of the function.
        function: As it was called, without the recording.
        args: Its arguments.
        kwargs: Those by name.
        result: What it returned.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def recorded(module: nn.Module, pattern: re.Pattern[str]) -> Iterator[list[Call]]:
    """Record the calls of functions in the user's files, of methods and of layers, by their names."""
    found: list[Call] = []
    undo: list[Callable[[], Any]] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if len(found) < MOST_CALLS:
                found.append(Call(name, function, args, kwargs, result))
            return result

        return call

    def hook(name: str, part: nn.Module, args: Any, result: Any) -> None:
        if len(found) < MOST_CALLS:
            found.append(Call(name, part.forward, args, {}, result))

    for names in namespaces_of(module):
        for name, value in [*names.items()]:
            if pattern.search(name) and isinstance(value, types.FunctionType):
                names[name] = wrap(name, value)
                undo.append(partial(names.__setitem__, name, value))
    for cls in own_classes(type(module)):
        for name, value in vars(cls).items():
            is_method = is_function(value) or isinstance(value, staticmethod)
            if is_method and pattern.search(name) and name not in vars(module):
                vars(module)[name] = wrap(name, getattr(module, name))
                undo.append(partial(vars(module).pop, name, None))
    for name, part in module.named_modules():
        is_named = pattern.search(name.rpartition(".")[2]) or pattern.search(type(part).__name__)
        if name and is_named and not is_metric(part) and own_classes(type(part)):
            undo.append(part.register_forward_hook(partial(hook, type(part).__name__)).remove)
    try:
        yield found
    finally:
        for each in reversed(undo):
            each()


@contextmanager
def restored(seen: Evidence) -> Iterator[None]:
    """Restore what a function of the user's changes of the module, which logs nothing."""
    with kept(seen.module), without_effects(seen.trainer, seen.module, Trace()):
        yield


@check("loss-maximized", "likely", at="probe")
def score_minimized(seen: Evidence) -> Lines:
    """The loss falls as an overlap of predictions and targets falls, as Dice, which is higher for perfect ones."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    if any(not p.requires_grad for p in seen.module.parameters()):
        return  # an attack on a frozen network lowers its scores
    gradients: list[Any] = []

    def differentiate(loss: Any) -> None:
        results = [c.result for c in calls]
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            kept = [r if isinstance(r, Tensor) and r.requires_grad else None for r in results]
            chosen = [r for r in kept if r is not None]
            each = iter(torch.autograd.grad(loss, chosen, allow_unused=True, retain_graph=True) if chosen else ())
            gradients.extend(next(each) if r is not None else None for r in kept)

    with recorded(seen.module, SCORES) as calls:
        if not _has_names(seen.module, SCORES):
            return
        probe.run("training_step", probe.batches["training_step"], training=True, record=False, then=differentiate)
    for call, gradient in zip(calls, gradients, strict=False):
        if gradient is None or not bool((sign_of(seen) * gradient > 0).all()):
            continue
        others = [c.target for c in probe.base("training_step").calls]
        if others and not any(
            is_equal(t.flatten(), call.args[1].flatten().to(t)) for t in others if len(call.args) > 1
        ):
            continue  # the overlap with something that is to be avoided
        with suppress(Exception), torch.no_grad(), seeded(0), restored(seen):  # of one that takes no other values
            if _rates_perfect_higher(call):
                yield Line(
                    f"{call.name} is higher for perfect predictions, but the loss falls as it falls, so overlap is "
                    "unlearned; subtract it: 1 - score",
                    subject=call.name,
                )
                return


@check("overlap-of-logits", "likely", at="probe")
def overlap_of_logits(seen: Evidence) -> Lines:
    """A Dice or IoU, which is perfect if targets of 0 and 1 are the predictions, gets what a linear layer returns."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not _has_names(seen.module, SCORES):
        return
    with recorded(seen.module, SCORES) as calls:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False)
    for call in calls:
        pair = call.args[:2]
        if len(pair) < 2 or not all(isinstance(t, Tensor) and t.is_floating_point() for t in pair):
            continue
        p, t = (pair[0], pair[1]) if pair[0].requires_grad else (pair[1], pair[0])
        is_binary = p.shape == t.shape and bool(((t == 0) | (t == 1)).all()) and bool((t == 1).any())
        is_outside = float(p.min()) < 0 or float(p.max()) > 1 or _is_linear(p)
        if not is_binary or not p.requires_grad or not is_outside:
            continue
        with suppress(Exception), torch.no_grad(), seeded(0), restored(seen):  # of one that takes no other values
            both = (t, (2 * t - 1) * SURE)
            each = [(v, *pair[1:]) if p is pair[0] else (pair[0], v) for v in both]
            exact, sure = (call.function(*a, *call.args[2:], **call.kwargs).float().mean() for a in each)
            is_perfect = min(abs(float(exact)), abs(1 - float(exact))) < EXACT
            if is_perfect and abs(float(exact - sure)) > 0.5:
                yield Line(
                    f"{call.name} is {float(exact):.3g} for predictions that are the targets, 0 and 1, but gets what a "
                    f"layer returns, now {float(p.min()):.3g} to {float(p.max()):.3g}, without bounds; apply sigmoid "
                    "first",
                    subject=call.name,
                )
                return


def _is_linear(t: Tensor) -> bool:
    """Whether a linear layer or a convolution has computed values, which later were only moved."""
    node = t.grad_fn
    while node is not None and node.name() in MOVES:
        node = node.next_functions[0][0]
    return name_of(node) in LINEAR


@check("box-formats", "likely", at="probe")
def box_formats(seen: Evidence) -> Lines:
    """An overlap gets predicted boxes as centers and sizes, and true ones as corners, or the reverse."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not _has_names(seen.module, OVERLAPS):
        return
    with recorded(seen.module, OVERLAPS) as calls:
        losses = probe.run(kind, probe.batches[kind], training=True).calls
    pairs = [
        (c.prediction.detach(), c.target) for c in losses if isinstance(c.target, Tensor) and c.kind in REGRESSIONS
    ]
    for call in calls:
        boxes = [t.detach() for t in call.args[:2] if isinstance(t, Tensor) and t.ndim == 2 and t.shape[1] == 4]
        for p, t in pairs if len(boxes) == 2 and boxes[0].shape == boxes[1].shape else ():
            if p.shape != t.shape or p.shape != boxes[0].shape:
                continue
            for one, two in (boxes, boxes[::-1]):
                is_plain = is_close(one, p) and is_close(two, _corners(t)) and not is_close(two, t)
                if is_plain or (is_close(one, _corners(p)) and is_close(two, t) and not is_close(one, p)):
                    yield Line(
                        f"{call.name} compares boxes of corners with boxes of centers and sizes, of which only the "
                        f"{'true' if is_plain else 'predicted'} ones are converted; convert both",
                        subject=call.name,
                    )
                    return


def _corners(boxes: Tensor) -> Tensor:
    """Corners of boxes (N, 4), of centers and sizes."""
    centers, sizes = boxes[:, :2], boxes[:, 2:]
    return torch.cat([centers - sizes / 2, centers + sizes / 2], 1)


def _has_names(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    own = (name for cls in own_classes(type(module)) for name in vars(cls))
    parts = (name for n, m in module.named_modules() for name in (n.rpartition(".")[2], type(m).__name__))
    return any(pattern.search(name) for names in (*namespaces_of(module), own, parts) for name in names)


def _rates_perfect_higher(call: Call) -> bool:
    """Whether a function of predictions and targets returns more for predictions that are the targets."""
    if len(call.args) < 2 or not all(isinstance(t, Tensor) for t in call.args[:2]):
        return False
    p, t = call.args[:2]
    if not p.is_floating_point() or t.requires_grad or not t.numel():
        return False
    if p.shape != t.shape and not t.is_floating_point() and p.ndim == t.ndim + 1:
        perfect = nn.functional.one_hot(t.long(), p.shape[1]).movedim(-1, 1).to(p)
    elif p.shape == t.shape:
        perfect = t.to(p)
    else:
        return False
    if float(p.min()) < 0 or float(p.max()) > 1:  # logits
        perfect = (2 * perfect - 1) * SURE
    own, best = (call.function(each, *call.args[1:], **call.kwargs) for each in (p.detach(), perfect))
    top = float(best.float().mean())
    is_highest = "psnr" in call.name.lower() or HIGH < top < 1 + EXACT or 100 * HIGH < top < 100 + EXACT  # no loss
    return is_highest and float(best.float().mean() - own.float().mean()) > BETTER


@check("returns-of-past", "likely", at="probe")
def returns_of_past(seen: Evidence) -> Lines:
    """A function of rewards, by its name one of returns, adds those before a step, or returns them in reverse."""
    yield from islice(chain(_called_returns(seen), _looped_returns(seen)), 1)


def _called_returns(seen: Evidence) -> Lines:
    """Functions of rewards, by what they return for others."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not _has_names(seen.module, RETURNS):
        return
    with recorded(seen.module, RETURNS) as calls:
        probe.run("training_step", probe.batches["training_step"], training=True, record=False)
    with seeded(0), restored(seen):
        calls += _tried(seen.module)
    for call in calls:
        with suppress(Exception), seeded(0), restored(seen):  # of a function that takes no other values
            if problem := _problem_of_returns(call):
                yield Line(f"{call.name} returns {problem}", subject=call.name)


def _looped_returns(seen: Evidence) -> Lines:
    """Loops over rewards in their order that keep ``r + gamma * total`` of each step, where nothing is reversed."""
    datasets = [seen.splits.dataset("train")] if seen.splits else []
    places = [*functions_of(seen.module, datasets)]
    read = {node.attr for place in places for node in ast.walk(place.tree) if isinstance(node, ast.Attribute)}
    for place in places:
        text, name = ast.unparse(place.tree), place.tree.name
        if name not in read and not hasattr(LightningModule, name) and not name.startswith("__"):
            continue
        for node in ast.walk(place.tree) if not REVERSES.search(text) else ():
            if not isinstance(node, ast.For) or not re.search(r"\brew(ard)?s?\b|_rew(ard)?s?\b", ast.unparse(node)):
                continue
            totals = [part.targets[0] for part in node.body if isinstance(part, ast.Assign) and _adds_up(part)]
            kept = rf"append\({ast.unparse(totals[0])}\)|\] = {ast.unparse(totals[0])}\b" if totals else ""
            is_named = any(RETURNS.search(word) for word in re.findall(r"\w+", text) if word != "return")
            returned = [ast.unparse(n) for n in ast.walk(place.tree) if isinstance(n, ast.Return)]
            is_spread = bool(returned) and all(re.search("std|var|max", each) for each in returned)
            if kept and re.search(kept, text) and is_named and not is_spread:
                line = place.line + node.lineno - 1
                yield (
                    f"{place.name} (line {line}) adds up discounted rewards from the first one on, so that each return "
                    "is of the rewards before its step; begin with the last reward"
                )


def _adds_up(assign: ast.Assign) -> bool:
    """Whether a statement is ``total = r + gamma * total``."""
    value, name = assign.value, ast.unparse(assign.targets[0])
    terms = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else []
    if terms and all(isinstance(term, ast.BinOp) for term in terms):
        return False  # a mean
    texts = [ast.unparse(term) for term in terms]
    if not any(GAINS.search(text) for text in texts):
        return False
    return sum(bool(re.search(rf"\b{re.escape(name)}\b", text) and DISCOUNTED.search(text)) for text in texts) == 1


def _tried(module: nn.Module) -> Iterator[Call]:
    """Calls, on rewards, of functions that may have made the data; of none that may write or show something."""
    for names in namespaces_of(module):
        for name, function in [*names.items()]:
            if not RETURNS.search(name) or not is_function(function) or tree_of(function) is None:
                continue
            if not _is_used(names, name):
                continue
            needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
            if not needed or not REWARDS.match(needed[0]) or not all(map(DISCOUNT.match, needed[1:])):
                continue
            if (WRITES | SHOWS) & {*function.__code__.co_names}:
                continue
            for rewards in ([1.0, 0.0, 2.0, 1.0, 3.0, 0.5], torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0, 0.5])):
                args = (rewards, *(0.9 for _ in needed[1:]))
                with suppress(Exception):  # of one that takes other kinds
                    yield Call(name, function, args, {}, function(*copy.deepcopy(args)))


def _is_used(names: dict[str, Any], name: str) -> bool:
    """Whether a file names a function more than once, where it defines or imports it."""
    with suppress(OSError, TypeError):
        return len(re.findall(rf"\b{name}\b", inspect.getsource(sys.modules[names["__name__"]]))) > 1
    return True  # of an interpreter or notebook


def _problem_of_returns(call: Call) -> str:
    """What is wrong if the last return depends on the first reward; else empty."""
    names = [*inspect.signature(call.function).parameters]
    if not names or not REWARDS.match(names[0]):
        return ""  # such as the value of a portfolio
    args = copy.deepcopy([a.detach() if isinstance(a, Tensor) else a for a in call.args])
    rewards, own = args[0] if args else None, _numbers(call.result)
    first = _numbers(rewards)
    if first is None or own is None or first.shape != own.shape:
        return ""
    for dim in range(first.ndim):  # of the dimension of samples, none depends on another
        if first.shape[dim] >= FEWEST and (problem := _problem_along(call, args, rewards, own, dim)):
            return problem
    return ""


def _problem_along(call: Call, args: list[Any], rewards: Any, own: Tensor, dim: int) -> str:
    """What is wrong if returns depend on rewards in the reverse order of a dimension; else empty."""

    def returns(place: int) -> Tensor | None:
        changed: Any = copy.deepcopy(rewards)
        index = (slice(None), place) if dim else place
        if dim and isinstance(changed, list | tuple):
            changed = [_with_more(row, place) for row in changed]
        elif isinstance(changed, tuple):
            changed = tuple(v + (i == place % len(changed)) for i, v in enumerate(changed))
        else:
            changed[index] = changed[index] + 1.0
        return _numbers(call.function(changed, *args[1:], **call.kwargs))

    early, late = returns(0), returns(own.shape[dim] - 1)
    if early is None or late is None or torch.equal(early.select(dim, -1), own.select(dim, -1)):
        return ""
    if torch.equal(late.select(dim, 0), own.select(dim, 0)):
        return (
            "sums of the rewards up to each step, not of those that follow it, which are what an action leads to; go "
            "through the rewards in reverse"
        )
    is_reversed = torch.equal(early.select(dim, 0), own.select(dim, 0))
    return is_reversed * "sums of later rewards in reverse order, that of the last step first; reverse them: out[::-1]"


def _with_more(row: Any, place: int) -> Any:
    """A row of rewards, of which one is larger by 1."""
    row = row.clone() if isinstance(row, Tensor) else copy.copy(row)
    row[place] = row[place] + 1.0
    return row


def _numbers(value: Any) -> Tensor | None:
    """Numbers (T,), or those of samples, of a list, an array or a tensor; None if it is something else."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) and v.ndim == 1 for v in value):
        return torch.stack([*value]).detach().double() if len({v.shape for v in value}) == 1 else None
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) or _is_number(v) for v in value):
        return torch.tensor([float(v) for v in value], dtype=torch.float64)
    with suppress(TypeError, ValueError, RuntimeError):
        t = torch.as_tensor(value)
        return t.detach().double() if t.ndim in (1, 2) and not t.is_complex() else None
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
