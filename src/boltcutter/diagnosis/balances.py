"""Probes of what weighs the terms of a loss: learned weights that nothing holds, and ramps of whole numbers."""

from __future__ import annotations

import ast
import dis
import inspect
import math
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.probe import Probe, Trace, kept
from boltcutter.diagnosis.source import callback_classes, is_function, members, own_classes, says, tree_of
from boltcutter.structure import flatten, with_tensors

MOST_VALUES = 16  # of a parameter that weighs terms
FAR = 30.0  # by which they are moved
GONE = 0.01  # of a loss
SAME = 1e-3  # relative
LATE = 1000  # times as long
RATES = (0.5, 1.0, 2.0)  # of exp(-s / 2), exp(-s) and exp(-2 s)
POLICIES = re.compile(r"log_prob|advantage|polic(y|ies)|(^|_)actor", re.IGNORECASE)
CYCLES = re.compile(r"cycl|restart|period", re.IGNORECASE)  # which begin again on purpose
TIMES = frozenset(("current_epoch", "global_step", "epoch", "step", "total_batch_idx"))
WEIGHTS = re.compile(
    r"(^|_)(beta|kl|klw|weight|alpha|lam|lambda|ramp|warm|warm_?up|anneal\w*|coef\w*|factor|scale)(_|$)"
)
COUNTED = re.compile(r"(float[(])?self[.](trainer[.])?global_step[)]?")
OF_BATCHES = re.compile(r"max_epochs|num_training_batches|stepping_batches|(per|each)_epoch|len[(]|(n|num)_batches")
BATCHES, WARM = frozenset(("batch_idx", "batch_index")), re.compile("warm", re.IGNORECASE)
CRITIC = re.compile(r"(^|_)(critic|disc|discriminator|d|net_?d|d_net)(_|[.]|$)", re.IGNORECASE)
CRITIC_STEPS = re.compile(
    r"_?(n|num|k)_?(critic|disc|discriminator)(_(steps|iters|iterations|updates))?|(critic|disc|discriminator|d)_"
    r"(steps|iters|iterations|updates)(_per_g\w*)?",
    re.IGNORECASE,
)
BEGINS, ENDS = re.compile(r"start|initial|init|begin"), ("end", "final", "stop", "min", "max")
BOUNDS = frozenset(("min", "minimum", "clip", "clamp"))


@check("learned-weight", "likely", at="probe")
def learned_weight(seen: Evidence) -> Lines:
    """Learned weights of terms make the loss fall to 0, or by exp(-s), for any targets, and nothing holds them."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches or not probe.module.automatic_optimization:
        return
    if any(g.get("maximize") for o in seen.optimizers for g in o.param_groups) or says(seen.module, POLICIES):
        return
    weights = [(n, p) for n, p in _beside_layers(seen.module) if id(p) in seen.owned and not p._backward_hooks]
    directions = _directions(probe, [p for _, p in weights]) if weights else []
    moved = [(n, p, d) for (n, p), d in zip(weights, directions, strict=False) if d]
    if not moved:
        return
    shift = [(p, d) for _, p, d in moved]
    owners = {f"the output of {n.rpartition('.')[0]}" for n, _, _ in moved}
    for turn in (0, 1, 3):  # also with the targets of other samples
        batch = _rolled(probe, turn)
        first, other = (_run(probe, batch, shift, far) for far in (0.0, 1.0))
        if not _are_same(first, other, owners):
            return  # they are part of the model
        losses = [_loss(t) for t in (first, other, *(_run(probe, batch, shift, far) for far in (2.0, FAR)))]
        if not _falls_for_ever(losses):
            return
    name = moved[0][0]
    yield Line(
        f"the loss falls from {losses[0]:.3g} to {losses[3]:.3g} as {name} alone moves by {FAR:g}, whatever the "
        "predictions are, so it learns to leave terms out; a learned weight needs a term that holds it: "
        "exp(-s) * loss + s",
        subject=name,
    )


def _beside_layers(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Small parameters of the user's own classes, which are no bias."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ParameterList | nn.ParameterDict) or own_classes(type(part)):
            for each, p in part._parameters.items():
                if p is not None and p.requires_grad and p.numel() <= MOST_VALUES and "bias" not in each:
                    yield f"{name}.{each}".removeprefix("."), p


def _directions(probe: Probe, weights: list[nn.Parameter]) -> list[float]:
    """For each parameter, 1 if descent makes all of its values larger, -1 if smaller, and 0 if neither."""
    found: list[float] = []

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            for g in torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True):
                is_one_sided = g is not None and bool(g.any()) and bool((g >= 0).all() | (g <= 0).all())
                found.append(-float(g.sum().sign()) if is_one_sided and g is not None else 0.0)

    kind = "training_step"
    probe.run(kind, probe.batches[kind], training=True, record=False, then=differentiate)
    return found


def _rolled(probe: Probe, turn: int) -> Any:
    """The batch, with all parts but the first of another sample."""
    batch = probe.batches["training_step"]
    tensors = [t for t in flatten(batch) if isinstance(t, Tensor)]
    return with_tensors(batch, [t.roll(turn, 0) if i and t.ndim else t for i, t in enumerate(tensors)])


def _run(probe: Probe, batch: Any, shift: Sequence[tuple[nn.Parameter, float]], far: float) -> Trace:
    before = [p.detach().clone() for p, _ in shift]
    try:
        for p, direction in shift:
            p.data.add_(direction * far)
        return probe.run("training_step", batch, training=True)
    finally:
        for (p, _), value in zip(shift, before, strict=True):
            p.data.copy_(value)


def _loss(trace: Trace) -> float:
    loss = trace.output.get("loss") if isinstance(trace.output, dict) else trace.output
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan


def _are_same(one: Trace, other: Trace, owners: set[str]) -> bool:
    """Whether layers compute the same, and loss functions get the same."""
    pairs = zip(one.tensors, other.tensors, strict=False)
    layers = [(a, b) for (name, a), (_, b) in pairs if name not in owners]
    calls = [(a.prediction, b.prediction) for a, b in zip(one.calls, other.calls, strict=False)]
    is_as_long = len(one.tensors) == len(other.tensors) and len(one.calls) == len(other.calls)
    return is_as_long and all(a.shape == b.shape and torch.equal(a, b) for a, b in (*layers, *calls))


def _falls_for_ever(losses: Sequence[float]) -> bool:
    """Whether losses, at 0, 1, 2 and far, fall to 0, or like an exponential function."""
    start, one, two, end = losses
    if not all(map(math.isfinite, losses)) or not start > one > two > end:
        return False
    if start > 0 and abs(end) <= GONE * start:
        return True
    shares = [(each - end) / (start - end) for each in (one, two)]
    return any(
        math.isclose(shares[0], math.exp(-rate), rel_tol=SAME)
        and math.isclose(shares[1], math.exp(-2 * rate), rel_tol=SAME)
        for rate in RATES
    )


@check("whole-ramp", "likely", at="probe")
def whole_ramp(seen: Evidence) -> Lines:
    """A weight is a time divided by another one by //, up to 1, and the loss is the same at the first and last step."""
    probe, kind = seen.probe, "training_step"
    epochs, steps = seen.trainer.max_epochs, seen.total_steps
    if probe is None or kind not in probe.batches or not epochs or epochs < 2 or not math.isfinite(steps):
        return
    for function in _functions(seen.module):
        tree = tree_of(function)
        node = next((n for n in ast.walk(tree) if _is_ramp(n, tree)), None) if tree is not None else None
        if node is None:
            continue
        losses = []
        for epoch, step in ((0, 0), (epochs - 1, int(steps) - 1), (LATE * epochs, LATE * int(steps))):
            with _at(seen.trainer, epoch, step):
                losses.append(_loss(probe.run(kind, probe.batches[kind], training=True, record=False)))
        if losses[0] == losses[1] != losses[2]:
            line = function.__code__.co_firstlineno + node.lineno - 1  # type: ignore[attr-defined]
            text = " ".join(ast.unparse(node).split())[:80]
            yield Line(
                f"`{text}` ({function.__qualname__}, line {line}) is 0 in the whole training of {epochs} epochs, as "
                "it is a whole number, so the ramp never begins; divide by /, without // or int()",
                subject=f"{function.__qualname__}:{line}",
            )
            return


@check("ramp-restarts", "likely", at="probe")
def ramp_restarts(seen: Evidence) -> Lines:
    """A ramp up to 1, or to the end of a warm-up, counts the batches of an epoch, and nothing there counts epochs."""
    if seen.probe is None or seen.trainer.max_epochs in (0, 1) or seen.total_steps <= seen.trainer.num_training_batches:
        return
    own = [f for cls in callback_classes(seen.trainer) for f in vars(cls).values() if is_function(f)]
    for function in (*_functions(seen.module), *own):
        names = {*inspect.signature(function).parameters} & BATCHES
        code = function.__code__
        if not names or TIMES & {*code.co_names} or any("epoch" in n for n in (*code.co_names, *code.co_varnames)):
            continue
        tree, texts = tree_of(function), [*code.co_varnames, function.__doc__ or ""]
        counted = {*names}
        for node in _that_count(tree) if tree is not None else ():
            if isinstance(node, ast.Assign) and _mentions(node.value, counted) and not isinstance(node.value, ast.Call):
                counted |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            if text := _restarting(node, counted, sets_rates="param_groups" in code.co_names):
                line = code.co_firstlineno + node.lineno - 1  # type: ignore[attr-defined]
                yield Line(
                    f"`{text}` ({function.__qualname__}, line {line}) begins again in each epoch, as "
                    f"{min(names)} does; use self.trainer.global_step",
                    "note" if any(map(CYCLES.search, (function.__qualname__, *code.co_names, *texts))) else None,
                    subject=f"{function.__qualname__}:{line}",
                )
                return


@check("ramp-too-fast", "likely", at="trial")
def counts_all_optimizers(seen: Evidence) -> Lines:
    """global_step, which counts the steps of several optimizers, is divided by a number of batches."""
    counts = [steps.count for steps in seen.steps.values() if steps.count]
    several = round(sum(counts) / max(counts)) if counts else 1
    if seen.probe is None or seen.module.automatic_optimization or several < 2:
        return
    for function in _functions(seen.module):
        tree = tree_of(function)
        if tree is None or "global_step" not in function.__code__.co_names:
            continue
        text = ast.unparse(tree)
        if re.search(rf"[*/] {several}\b|\b{several} \*|len\(self\.optimizers", text):
            continue  # it knows of them
        values = {t.id: ast.unparse(n.value) for n in _assignments(tree) for t in n.targets if isinstance(t, ast.Name)}
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)):
            left, total = ast.unparse(node.left), ast.unparse(node.right)
            if COUNTED.fullmatch(values.get(left, left)) and OF_BATCHES.search(values.get(total, total)):
                line = function.__code__.co_firstlineno + node.lineno - 1
                yield Line(
                    f"`{ast.unparse(node)[:80]}` ({function.__qualname__}, line {line}) reaches 1 after 1/{several} of "
                    f"training, as global_step counts the steps of {several} optimizers; count batches",
                    subject=function.__qualname__,
                )
                return


def _assignments(tree: ast.AST) -> list[ast.Assign]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]


def _restarting(node: ast.AST, counted: set[str], *, sets_rates: bool) -> str:
    """A node that is min(1, count / …), count / … where count < …, or, of rates, count < warm-up; else empty."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_bound = any(
            isinstance(v, ast.Constant) and v.value == 1 for v in (*node.args, *(k.value for k in node.keywords))
        )
        ratios = [v for each in node.args for v in ast.walk(each) if isinstance(v, ast.BinOp)]
        is_ramp = any(isinstance(v.op, ast.Div) and _mentions(v.left, counted) for v in ratios)
        return ast.unparse(node)[:80] if name in BOUNDS and is_bound and is_ramp else ""
    if (
        sets_rates
        and isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and isinstance(node.ops[0], ast.Lt | ast.LtE)
    ):
        limit = ast.unparse(node.comparators[0])
        return ast.unparse(node)[:80] if _mentions(node.left, counted) and WARM.search(limit) else ""
    if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare):
        sides = {ast.unparse(each) for each in (node.test.left, *node.test.comparators)}
        ratios = [v for v in ast.walk(node) if isinstance(v, ast.BinOp) and isinstance(v.op, ast.Div)]
        is_ramp = any(_mentions(v.left, counted) and ast.unparse(v.right) in sides for v in ratios)
        return ast.unparse(node)[:80] if is_ramp and _mentions(node.test, counted) else ""
    return ""


def _that_count(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code, without those that only tell something: arguments of logs and prints."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        called = child.func if isinstance(child, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if not name.startswith(("log", "print", "set_", "update")):
            yield from _that_count(child)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def _functions(module: nn.Module) -> Iterator[types.FunctionType]:
    for part in module.modules():
        for _, value in members(type(part)):
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield function


def _is_ramp(node: ast.AST, tree: ast.FunctionDef) -> bool:
    """Whether a node is min(1, time // time), or a whole number of times that has the name of a weight."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(k.value for k in node.keywords)]
        is_bound = any(isinstance(v, ast.Constant) and v.value == 1 for v in values)
        has_fractions = any(isinstance(v, ast.Constant) and type(v.value) is float for v in values)
        is_weight = has_fractions or bool(WEIGHTS.search(tree.name)) or _is_assigned(node, tree)
        if name in BOUNDS and is_bound and is_weight and any(_is_whole(v) for v in values):
            return True
    return isinstance(node, ast.expr) and _is_whole(node) and _is_assigned(node, tree)


def _is_assigned(value: ast.expr, tree: ast.FunctionDef) -> bool:
    """Whether a value is assigned to a name of a weight."""
    targets = [t for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value is value for t in n.targets]
    return any(WEIGHTS.search(ast.unparse(t).rpartition(".")[2]) for t in targets)


def _is_whole(node: ast.expr) -> bool:
    """Whether an expression is a time divided by //, or by int(… / …)."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("int", "float") and len(node.args) == 1:
        inner = node.args[0]
        is_cut = (
            getattr(node.func, "id", "") == "int" and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div)
        )
        return _is_whole(inner) or (is_cut and _is_time(inner.left))  # type: ignore[attr-defined]
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and _is_time(node.left)


def _is_time(node: ast.expr) -> bool:
    names = (n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in ast.walk(node))
    return any(name in TIMES for name in names)


@contextmanager
def _at(trainer: Any, epoch: int, step: int) -> Iterator[None]:
    """Tell the module that it is in another epoch, and at another step."""
    epochs = trainer.fit_loop.epoch_progress.current
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    before = epochs.completed, steps.completed
    try:
        epochs.completed, steps.completed = epoch, step
        yield
    finally:
        epochs.completed, steps.completed = before


@check("ramp-direction", "likely", at="probe")
def ramp_away(seen: Evidence) -> Lines:
    """A method begins at the value of an attribute named as its start, and ends farther from that named as its end."""
    given = {**dict(getattr(seen.module, "hparams", {})), **vars(seen.module)}
    numbers = {n: float(v) for n, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    pairs = [(n, _end_of(n, numbers)) for n in numbers if BEGINS.search(n) and _end_of(n, numbers)]
    steps, epochs = seen.total_steps, seen.trainer.max_epochs or 0
    for function in _functions(seen.module) if pairs and math.isfinite(steps) and epochs > 1 else ():
        used = {*function.__code__.co_names, *function.__code__.co_consts}
        own = [(a, b) for a, b in pairs if {a, b} <= used]
        if len(own) != 1 or function.__code__.co_argcount != 1 or not _only_returns(function):
            continue
        (begin, end), values = own[0], list[float]()
        with suppress(Exception), torch.no_grad():  # of the user's code
            for share in range(9):
                with _at(seen.trainer, (epochs - 1) * share // 8, (int(steps) - 1) * share // 8), kept(seen.module):
                    values.append(float(function(seen.module)))
        if len(values) == 9 and math.isclose(values[0], numbers[begin], rel_tol=SAME):
            before, *others, after = (abs(v - numbers[end]) for v in values)
            if after > 1.05 * before > 0 and min(others) >= before:
                yield Line(
                    f"{function.__qualname__} goes from {begin}, {values[0]:.3g}, to {values[-1]:.3g} in the training, "
                    f"away from {end}, {numbers[end]:.3g}; exchange the two in its formula",
                    subject=function.__qualname__,
                )


def _only_returns(function: types.FunctionType) -> bool:
    """Whether a function is no hook, and sets nothing but its own variables, so that it may be called."""
    writes = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR")
    is_hook = hasattr(L.LightningModule, function.__name__) or function.__name__ == "__init__"
    return not is_hook and not any(step.opname in writes for step in dis.get_instructions(function))


def _end_of(name: str, numbers: dict[str, float]) -> str:
    """The name of the number that a begin has at its end."""
    begin = BEGINS.search(name)
    ends = [name[: begin.start()] + end + name[begin.end() :] for end in ENDS] if begin else []
    return next((end for end in ends if end in numbers and numbers[end] != numbers[name]), "")


@check("critic-steps", "likely", at="trial")
def critic_steps(seen: Evidence) -> Lines:
    """A number of steps of a critic for each of the generator is above 1, but the generator has made more steps."""
    given = {**dict(getattr(seen.module, "hparams", {})), **vars(seen.module)}
    given |= {n: v for cls in own_classes(type(seen.module)) for n, v in vars(cls).items()}
    numbers = {n: v for n, v in given.items() if isinstance(v, int) and v > 1 and CRITIC_STEPS.fullmatch(n)}
    lists = [(n, part) for n, part in seen.module.named_modules() if isinstance(part, nn.ModuleList)]
    several = {len(part) for n, part in lists if CRITIC.search(n)}
    numbers = {n: v for n, v in numbers.items() if v not in several}  # how many critics there are
    counts = {True: 0, False: 0}
    for optimizer in seen.optimizers if numbers else ():
        names = [seen.names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        is_critic = all(CRITIC.search(name) for name in names)
        counts[is_critic] = max(counts[is_critic], seen.steps[id(optimizer)].count)
    if 0 < counts[True] < counts[False]:
        name, value = min(numbers.items())
        yield (
            f"{name} is {value}, but in {counts[False]} steps of the generator the critic has made {counts[True]}; "
            f"step the critic in each batch, and the generator after each {value} of these steps"
        )
