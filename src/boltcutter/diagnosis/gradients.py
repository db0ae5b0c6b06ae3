"""Checks of gradients and weights: what backward and step did, against what they should do."""

from __future__ import annotations

import ast
import math
import re
from functools import partial

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.fx import GraphModule
from torch.optim import Adam, Adamax, AdamW, NAdam, RAdam

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import WITH_WEIGHTS, Evidence, Update, sampled
from boltcutter.diagnosis.source import (
    codes_of_users,
    depends_on_time,
    functions_of,
    is_installed,
    is_mentioned,
    is_only_in_branches,
)
from boltcutter.internals import foreach_norm

EARLY = 8  # optimizer steps, all of which are looked at
NO_EFFECT = 1e-4  # relative change of the weights in the whole training that cannot matter
MANY_LOST = 3  # batches before one step
SPARE = re.compile(r".\.(fc|head|classifier|last_linear|lm_head|pooler)\.")  # of a network within the module
LARGE_OF_ADAM = 0.3  # its rate is by how much it changes each weight at first
HUGE = 2.0  # change of a matrix in one step, relative to its size, and to 1 / sqrt(fan-in)
ONE = torch.ones(1)
ENOUGH, MOSTLY = 6, 0.7  # looks, and their share
COUNTS = re.compile(r" % |len\(|step|frame|start|warm|count|size|batch_idx|epoch")
COLLAPSED = 0.02  # size of the weights, relative to the start


def _name(update: Update) -> str:
    return type(update.optimizer).__name__


@check("cleared-before-step", "certain", at="step")
def cleared_before_step(seen: Evidence) -> Lines:
    """At three looks, gradients were not 0 after the last backward pass, but all were after the step."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    if update.had_gradient and not update.nonzero:
        steps.emptied += 1
        if steps.emptied >= 3:
            yield (
                f"all gradients of {_name(update)} are cleared between backward and step, so it trains nothing; call "
                "zero_grad before backward"
            )


@check("not-cleared", "certain", at="step")
def not_cleared(seen: Evidence) -> Lines:
    """At three looks, gradients were 0 at no backward pass between two steps."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    if not update.cleared and update.nonzero and update.number > 1:
        steps.uncleared += 1
        if steps.uncleared >= 3:
            yield (
                f"gradients of {_name(update)} are never cleared, so each step uses the sum of all earlier ones; call "
                "optimizer.zero_grad()"
            )


@check("gradients-lost", "certain", at="step")
def gradients_lost(seen: Evidence) -> Lines:
    """Gradients were cleared before a step, at two looks or thrice: of a whole step, or all that some weights get."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    steps.lost += bool(update.lost)
    # That of a single bias may be exactly 0, as its terms cancel out.
    dropped = {n for n in update.dropped if n not in seen.parameters or seen.parameters[n].ndim > 1}
    steps.dropped += bool(dropped)
    if update.lost and (steps.lost >= 2 or update.lost >= MANY_LOST):
        yield (
            f"{_name(update)} makes a step after {update.lost + 1} batches, but has the gradient of the last one "
            "only, as zero_grad is called for each; call it after the step"
        )
    if dropped and steps.dropped >= 2:
        yield Line(
            f"the gradients of {some(sorted(dropped))} are cleared between two backward passes, before "
            f"{_name(update)} makes a step, and these have none then, so only the last loss is trained; call zero_grad "
            "once, before the first pass",
            "likely",
            subject="within a step",
        )
    steps.missed += update.missed
    if update.missed and steps.missed >= 3:
        yield Line(
            f"{_name(update)} (optimizer {seen.optimizers.index(update.optimizer)}) makes its steps without a "
            "gradient, as it gets one behind its step, which is cleared before the next one; are the optimizers in the "
            "order in which configure_optimizers returns them?",
            "likely",
            subject="behind a step",
        )


@check("mostly-zero", "likely", at="step")
def mostly_zero(seen: Evidence) -> Lines:
    """At over 70% of the looks, which are six or more, all gradients of an optimizer were exactly 0."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    is_idle = bool(update.with_gradient) and not update.had_gradient and not update.nonzero
    steps.looks += 1
    steps.idle += is_idle
    has_any = bool(seen.got_nonzero & {*update.parameters})  # else nothing is trained
    if steps.looks >= ENOUGH and steps.idle > MOSTLY * steps.looks and has_any:
        yield Line(
            f"all gradients of {_name(update)} were exactly 0 at {steps.idle} of {steps.looks} steps that were looked "
            "at, so these train nothing: the samples are beyond the margin of the loss, or masked; choose harder ones",
            "note" if depends_on_time(seen.module) else None,
            subject=f"{seen.optimizers.index(update.optimizer)}",
        )


@check("foreign-gradient", "likely", at="step")
def foreign_gradient(seen: Evidence) -> Lines:
    """At three looks, a step follows the loss of another optimizer, too, or undoes what that has taught its weights."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    steps.mixed += bool(update.of_others)
    steps.opposed += bool(update.against)
    number = seen.optimizers.index(update.optimizer)
    if update.of_others and steps.mixed >= 3:
        yield (
            f"{_name(update)} (optimizer {number}) also follows the gradient of the loss of {update.of_others}, as of "
            "a discriminator; detach() what that loss gets, or call zero_grad() before the own backward pass"
        )
    if update.against and steps.opposed >= 3:
        yield (
            f"{some(sorted(seen.shared & update.nonzero))} is in {update.against}, and in optimizer {number}, whose "
            "step undoes its, as that of a generator that also trains the discriminator; give each optimizer "
            "the parameters of its network only"
        )


@check("frozen-changes", "certain", at="step")
def frozen_changes(seen: Evidence) -> Lines:
    """An optimizer changes a parameter that does not require a gradient."""
    assert seen.update is not None
    update = seen.update
    changed = [n for n, moved in (update.moved or {}).items() if moved and not update.parameters[n].requires_grad]
    if changed:
        yield (
            f"{some(changed)} is frozen (requires_grad=False), but {_name(update)} changes it, by momentum or weight "
            "decay of an old gradient; set its grad to None, or give the optimizer only what is trained"
        )


@check("nonfinite-gradient", "certain", at="step")
def nonfinite_weights(seen: Evidence) -> Lines:
    """Steps of an optimizer have made weights NaN or infinite, which were finite at the start."""
    assert seen.update is not None
    update = seen.update
    lost = [n for n, moved in (update.moved or {}).items() if not math.isfinite(moved)]
    names = [n for n in lost if n in seen.start and bool(seen.start[n].isfinite().all())]
    if names:
        yield (
            f"{some(names)} is NaN or infinite by step {update.number} of {_name(update)}, after a gradient that is "
            "not finite, and nothing is learned from then on; add a small number within sqrt, log and divisions, or "
            "lower the rate"
        )


@check("huge-update", "likely", at="step")
def huge_update(seen: Evidence) -> Lines:
    """At three looks, the median matrix changed by twice its size, or twice 1 / sqrt(fan-in); or Adam's rate is 0.3."""
    assert seen.update is not None
    update, steps = seen.update, seen.steps[id(seen.update.optimizer)]
    jumps, names = [], []
    for name, moved in (update.moved or {}).items():
        p = update.parameters[name]
        if p.ndim > 1 and p.numel() and p.requires_grad:
            count = min(p.numel(), 512)
            scale = max(update.size[name] / math.sqrt(count), (p.numel() / len(p)) ** -0.5)
            jumps.append(moved / math.sqrt(count) / scale)
            names.append(name)
    middle = sorted(jumps)[len(jumps) // 2] if jumps else 0.0
    # Adam's first step is the rate; later ones are not smaller, but the weights are then as large.
    is_adam = isinstance(update.optimizer, Adam | AdamW | NAdam | RAdam | Adamax) and update.rate >= LARGE_OF_ADAM
    if middle > HUGE or (is_adam and any(_is_of_layer(seen, name) for name in names)):
        steps.jumps.append(middle)
        if len(steps.jumps) >= 3:
            yield (
                f"{_name(update)} changes the weights by {max(steps.jumps):.1f} times their size in a step, so it "
                f"forgets what was learned; lower the learning rate ({update.rate:g}), or clip gradients"
            )


def _is_of_layer(seen: Evidence, name: str) -> bool:
    """Whether a parameter is that of a layer, and no embedding or picture, which may move far in a step."""
    return name in seen.parameters and isinstance(seen.module.get_submodule(name.rpartition(".")[0]), WITH_WEIGHTS)


def _rises(seen: Evidence, ratios: list[tuple[float, float]]) -> bool:
    """Whether the learning rate may still be low on purpose."""
    return ratios[-1][1] > 2 * min(rate for _, rate in ratios) or bool(
        seen.trainer.lr_scheduler_configs and (seen.probe is not None or not seen.ended)
    )


@check("no-update", "certain", at="summary")
def no_update(seen: Evidence) -> Lines:
    """With gradients and a rate above 0, no sampled weight changed at any look."""
    for optimizer in seen.optimizers:
        ratios = seen.steps[id(optimizer)].ratios
        if len(ratios) >= 4 and not max(ratio for ratio, _ in ratios) and not _rises(seen, ratios):
            yield Line(
                f"{type(optimizer).__name__} does not change the weights, although they have gradients and the "
                f"learning rate is {ratios[-1][1]:g}; raise it",
                subject=str(seen.optimizers.index(optimizer)),
            )


@check("tiny-update", "likely", at="summary")
def tiny_update(seen: Evidence) -> Lines:
    """The largest change per step, times the steps of the training, is below 1/10,000 of the weights."""
    for optimizer in seen.optimizers:
        ratios = seen.steps[id(optimizer)].ratios
        if len(ratios) < 4 or _rises(seen, ratios):
            continue
        largest, total = max(ratio for ratio, _ in ratios), max(seen.total_steps, 1000)  # a short trial is no training
        if 0 < largest * total < NO_EFFECT:
            yield (
                f"{type(optimizer).__name__} changes the weights by {largest:.0e} of their size per step, which is "
                f"nothing in the whole training; raise the learning rate ({ratios[-1][1]:g}), or the limit of the "
                "gradient norm"
            )


@check("barely-trained", "likely", at="summary")
def barely_trained(seen: Evidence) -> Lines:
    """A matrix changes by under 1/10,000 of its size in the whole training, others at the same rate by more."""
    if seen.looks < 4 or len(seen.largest) < 3 or seen.sharded:
        return
    total = min(max(seen.total_steps, 1000), 1e9)
    ratios = sorted(seen.largest.values())
    rates = {id(p): float(g.get("lr", 0)) for o in seen.optimizers for g in o.param_groups for p in g["params"]}
    most = max(rates.values(), default=0.0)
    looked = [steps.ratios for steps in seen.steps.values() if steps.ratios]
    if any(len(ratios) > 1 and ratios[-1][1] > ratios[-2][1] for ratios in looked):
        return  # in a warm-up, behind layers that begin with zeros
    slow = [
        name
        for name, ratio in seen.largest.items()
        if 0 < ratio * total < NO_EFFECT and name in seen.got_nonzero
        and rates.get(id(seen.parameters[name]), 0.0) >= 0.1 * most > 0
    ]  # fmt: skip
    if slow and len(slow) < len(ratios) and ratios[-1] * total > 100 * NO_EFFECT:
        yield (
            f"{some(slow)} changes by at most {max(seen.largest[n] for n in slow):.0e} of its size in a step, which is "
            "nothing in the whole training: its gradient vanishes; use ReLU or residual connections, normalization, or "
            "Adam"
        )


@check("rounded-away", "likely", at="summary")
def rounded_away(seen: Evidence) -> Lines:
    """With weights in half precision, over 80% of those with a gradient do not change in a step."""
    for optimizer in seen.optimizers:
        steps = seen.steps[id(optimizer)]
        stuck = sorted(steps.stuck)
        if len(stuck) >= 4 and stuck[len(stuck) // 2] > 0.8 and not _rises(seen, steps.ratios):
            yield (
                f"{stuck[len(stuck) // 2]:.0%} of the weights do not change in a step, because the update is below the "
                "precision of their dtype; keep the weights in float32 (precision=bf16-mixed)"
            )


@check("collapse", "likely", at="summary")
def collapse(seen: Evidence) -> Lines:
    """The matrices have shrunk to less than 2% of their initial size."""
    names = [n for n in seen.trained if n in seen.start and seen.parameters[n].ndim > 1]
    if len(names) < 2:
        return
    each = ([seen.start[n] for n in names], [sampled(seen.parameters[n]) for n in names])
    first, last = (float(torch.stack([norm.float() for norm in foreach_norm(part)]).norm()) for part in each)
    if last < COLLAPSED * first:
        yield f"the weights have shrunk to {last / first:.1%} of their initial size; lower weight decay or penalties"


def never_trained(seen: Evidence) -> list[str]:
    """Parameters without a gradient at any look, that nothing else has changed either."""
    changed = {n for n, p in seen.parameters.items() if p._version != seen.versions.get(n)}
    left = [n for n in seen.trained if seen.parameters[n].numel()]
    never = [n for n in left if n not in seen.got_gradient and n not in changed]
    return never if seen.step >= 3 and len(never) < len(seen.trained) and not seen.sharded else []


def computed_in_each_step(seen: Evidence, names: list[str]) -> list[str]:
    """Those of which the layer was computed at each look with hooks, of which there were enough."""
    count = seen.looks_with_hooks
    return [n for n in names if seen.ran_without_gradient[n] == count >= max(1, min(seen.step, EARLY) - 3)]


@check("unused-parameter", "likely", at="summary")
def unused_parameter(seen: Evidence) -> Lines:
    """A parameter never got a gradient, and no code but __init__ mentions it."""
    unused = [n for n in never_trained(seen) if not is_mentioned(seen.module, n, seen.trainer)]
    if unused:
        yield Line(
            f"{some(unused)} is never used: no method but __init__ mentions it; use it in forward, or remove it",
            "note" if all(SPARE.search(n) or _is_spare(seen, n) for n in unused) else None,
        )


@check("cut-gradient", "likely", at="summary")
def cut_gradient(seen: Evidence) -> Lines:
    """A layer is computed in each step, but its parameters never get a gradient, and no code depends on time."""
    never = [n for n in never_trained(seen) if is_mentioned(seen.module, n, seen.trainer)]
    if cut := [n for n in computed_in_each_step(seen, never) if not TEACHER.search(n)]:
        timed = depends_on_time(seen.module) or any(isinstance(c, BaseFinetuning) for c in callbacks(seen))
        yield Line(
            f"{some(cut)} is computed in each step, but never gets a gradient: nothing uses it, or detach(), "
            "no_grad(), .data, .item() or NumPy cuts the graph behind it; remove that, or freeze the layer",
            "note" if timed or all(map(partial(_is_meant, seen), cut)) else None,
        )


def _is_meant(seen: Evidence, name: str) -> bool:
    """Whether a parameter without a gradient has none on purpose: it is spare, or in a branch that is not taken."""
    owner, _, key = name.rpartition(".")
    return (
        _is_spare(seen, name) or _is_of_last(seen, name) or is_only_in_branches(seen.module.get_submodule(owner), key)
    )


def _is_spare(seen: Evidence, name: str) -> bool:
    """Whether a parameter is of a network, of a package or generated, that is trained otherwise, or of its old head."""
    parts = {name[: i.start()]: seen.module.get_submodule(name[: i.start()]) for i in re.finditer(r"\.", name)}
    whole = [
        owner for owner, part in parts.items()
        if is_installed(part) or isinstance(part, GraphModule) or SPARE.match(f".{name[len(owner):]}")
    ]  # fmt: skip
    return any(n.startswith(f"{owner}.") for owner in whole for n in seen.got_gradient)


def _is_of_last(seen: Evidence, name: str) -> bool:
    """Whether a parameter is of the last of equal layers, whose output no next one gets, and others got gradients."""
    parts = name.split(".")
    for i in [i for i, part in enumerate(parts) if re.fullmatch("[0-9]+", part)]:
        twins = [n.split(".") for n in seen.parameters if n != name]
        twins = [n for n in twins if n[:i] == parts[:i] and n[i + 1 :] == parts[i + 1 :] and len(n) == len(parts)]
        if twins and all(int(n[i]) < int(parts[i]) and ".".join(n) in seen.got_gradient for n in twins):
            return True
    return False


@check("no-gradient", "note", at="summary")
def no_gradient(seen: Evidence) -> Lines:
    """A parameter never got a gradient."""
    if seen.ended and (never := never_trained(seen)):
        yield f"{some(never)} got no gradient at {seen.looks} of {seen.step} steps that were looked at"


@check("zero-gradient", "note", at="summary")
def zero_gradient(seen: Evidence) -> Lines:
    """The gradient of a parameter was exactly 0 at all looks."""
    if seen.ended and (zero := always_zero(seen)):
        yield f"the gradient of {some(zero)} was exactly 0 at all {seen.looks} steps that were looked at"


@check("stuck-at-zero", "likely", at="summary")
def stuck_at_zero(seen: Evidence) -> Lines:
    """Two matrices in a row were 0 everywhere at the start, and their gradients exactly 0 at all looks."""
    zero = [n for n in always_zero(seen) if seen.parameters[n].ndim > 1 and not seen.start.get(n, ONE).any()]
    names = [n for n in zero if not seen.parameters[n].detach().any()]
    stuck = [n for n in names if any(_are_multiplied(seen, n, other) for other in names)]
    if stuck:
        yield (
            f"{some(stuck)} began at 0, and get no gradient, as each is multiplied by the other; initialize one of "
            "them at random"
        )


@check("rounded-gradient", "likely", at="summary")
def rounded_gradient(seen: Evidence) -> Lines:
    """The gradient of a parameter was exactly 0 at all looks, and the graph has an operation such as round."""
    if seen.rounding and (zero := always_zero(seen)):
        yield (
            f"{some(zero)} gets no gradient through {', '.join(sorted(seen.rounding))}, whose derivative is 0; use a "
            "straight-through estimator: x + (x.round() - x).detach()"
        )


def _are_multiplied(seen: Evidence, one: str, other: str) -> bool:
    """Whether two matrices are of one layer, or of two neighbours with fitting shapes, such as those of LoRA."""
    owners = [name.rpartition(".")[0] for name in (one, other)]
    a, b = (seen.parameters[name].shape for name in (one, other))
    are_beside = owners[0].rpartition(".")[0] == owners[1].rpartition(".")[0] and (a[0] == b[1] or b[0] == a[1])
    return one != other and (owners[0] == owners[1] or are_beside)


def always_zero(seen: Evidence) -> list[str]:
    """Parameters whose gradient was 0 at all looks, of which there were enough."""
    zero = [n for n in seen.trained if n in seen.got_gradient and n not in seen.got_nonzero]
    enough = seen.step >= 3 and not any(steps.emptied for steps in seen.steps.values())
    return zero if enough and len(zero) < len(seen.trained) else []


TEACHER = re.compile(
    r"(^|\.)((teacher|ema|frozen|ref|reference)(_(model|net|network|encoder|policy|backbone))?"
    r"|(target|key|momentum)_(model|net|network|encoder)|encoder_k)\."
)


CLEAR = re.compile(r"(teacher|ema|frozen|momentum)(_|$)|(ref|reference)_(model|policy)$")
SETS = frozenset(("load_state_dict", "copy_", "lerp_", "mul_", "update_parameters", "soft_update"))


@check("teacher-trained", "likely", at="summary")
def teacher_trained(seen: Evidence) -> Lines:
    """A part that is named teacher, ema, target_network or alike gets gradients, in the optimizer of other parts."""
    for optimizer in seen.optimizers if seen.step >= 3 else ():
        names = [seen.names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        named = [n for n in names if TEACHER.search(n) and n in seen.got_nonzero and _is_target(seen, n)]
        if named and any(n in seen.got_nonzero and not TEACHER.search(n) for n in names):
            yield (
                f"{some(named)} is trained together with the rest, though its name says that it is a target; set "
                "requires_grad_(False), and compute it within no_grad()"
            )
            return


def _is_target(seen: Evidence, name: str) -> bool:
    """Whether a part with such a name is a target by more than it: others' names mean data, as of drugs and targets.

    It has a twin of the same shapes, and code sets weights; or its name is clear, and no code cuts its gradient, as of
    a teacher that has a loss of its own.
    """
    part = name[: TEACHER.search(name).end() - 1]  # type: ignore[union-attr]
    key = part.rpartition(".")[2]
    if not CLEAR.match(key):
        shapes = [p.shape for p in seen.module.get_submodule(part).parameters()]
        others = [m for n, m in seen.module.named_modules() if not f"{n}.".startswith(f"{part}.") and n]
        has_twin = any([p.shape for p in other.parameters()] == shapes for other in others)
        return has_twin and any(SETS & {*code.co_names} for code in codes_of_users(seen.module, seen.trainer))
    return not any(_is_cut(place.tree, key) for place in functions_of(seen.module))


def _is_cut(tree: ast.AST, key: str) -> bool:
    """Whether what a part returns is detached."""
    pairs = list[tuple[ast.expr, ast.expr]]()
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and len(n.targets) == 1):
        target, value = node.targets[0], node.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
        pairs += zip(target.elts, value.elts, strict=True) if both else [(target, value)]  # type: ignore[attr-defined]
    made = [ast.unparse(target) for target, value in pairs if f".{key}(" in ast.unparse(value)]
    cut = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "detach"]
    return any((text := ast.unparse(value)) in made or f".{key}(" in text for value in cut)


@check("skipped-steps", "likely", at="summary")
def skipped_steps(seen: Evidence) -> Lines:
    """training_step returned None for over 20% of the batches that were looked at, and for five or more of them."""
    known = seen.module.automatic_optimization and seen.forward_passes >= 5
    if known and 0.2 < seen.without_loss / seen.forward_passes < 1:
        yield Line(
            f"training_step returned None for {seen.without_loss} of {seen.forward_passes} batches that were "
            "looked at, which are not trained on; find out why",
            "note" if _skips_by_count(seen) else None,
        )


def _skips_by_count(seen: Evidence) -> bool:
    """Whether training_step returns nothing if a number of steps, or the size of a buffer, says so."""
    steps = [place.tree for place in functions_of(seen.module) if place.tree.name == "training_step"]
    for node in (n for tree in steps for n in ast.walk(tree) if isinstance(n, ast.If)):
        is_left = any(isinstance(n, ast.Return) and _is_none(n.value) for n in node.body)
        if is_left and COUNTS.search(ast.unparse(node.test)):
            return True
    return False


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def callbacks(seen: Evidence) -> list[object]:
    """The callbacks of the trainer."""
    return list(seen.trainer.callbacks)  # type: ignore[attr-defined]
