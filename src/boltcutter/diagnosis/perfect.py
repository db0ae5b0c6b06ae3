"""Probes that put perfect outputs in the place of a layer's, and look at what validation makes of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.calls import CLASSES, has_values, is_equal, is_function
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.epochs import replay
from boltcutter.diagnosis.evidence import Evidence, is_metric, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS, Loss
from boltcutter.diagnosis.probe import Probe, Trace
from boltcutter.diagnosis.source import says

FEWEST = 8  # samples
MOST = 8  # losses of a step
SMOOTHED = re.compile("median|medfilt|viterbi|majority", re.IGNORECASE)  # decisions
TRIED = 3  # layers that return the same values
PLAIN = re.compile(r"Accuracy|Error")  # metrics that are 1, or 0, for perfect predictions of any classes
OUTPUT = "the output of "
FAR = 0.25  # deviations of the targets, or share of an error
NO_BETTER = 0.9  # of an error, though others are 0
SURE = 20.0  # logits
BEST = 0.995
FEW = 0.05  # share of places
SCORES = re.compile(
    r"(^|[/_\-. ])(acc|accuracy|f1|auc|auroc|m?iou|dice|jaccard|precision|recall|top[0-9]*|hit[0-9]*|correct|kappa|mcc)"
    r"($|[/_\-. 0-9@])",
    re.IGNORECASE,
)
ERRORS = re.compile(r"(^|[/_\-. ])(mae|mse|rmse|mape|smape|l1|error)($|[/_\-. 0-9@])", re.IGNORECASE)
COSTS = re.compile(
    r"loss|err|entropy|diff|miss|drop|std|gap|dist|(precision|recall|hit).*(@|_at_|_k|_)[0-9k]", re.IGNORECASE
)
OTHERS = re.compile(r"base|naive|chance|random|majority|persist|teacher|corrupt|shuffl|adv|attack|robust|gap")


@check("other-units", "likely", at="probe")
def other_units(seen: Evidence) -> Lines:
    """Outputs without any error in training are far from targets in validation, or its errors of them are not 0."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    raw = [t.flatten() for t in tensors_of(probe.batches["validation_step"]) if t.is_floating_point()]
    base = probe.base("validation_step")
    trace = _trained(probe)
    pairs = [*_compared(trace)] if trace else []
    for prediction, target in pairs:
        if any(is_equal(t, target) and not has_values(p, prediction) for p, t in pairs):
            continue  # of several networks, all of which would have to be perfect
        layers = _layers_of(trace, prediction)  # type: ignore[arg-type]
        sources = [t for t in raw if t.numel() == target.numel() >= FEWEST and is_function(t, target.flatten())]
        if not layers or not sources:
            continue
        perfect = _validated_with(probe, layers, target)
        before = [a for pair in _compared(base) for a in pair]
        of_raw = [
            (a.flatten().double(), t.double())
            for t in sources
            for pair in _compared(perfect)
            for a, b in (pair, pair[::-1])
            if has_values(b, t)
            and not any(has_values(a, c) for c in before if not has_values(c, t))  # which the layer has changed
        ]
        errors = [float((a - t).square().mean().sqrt() / (t.std() + 1e-12)) for a, t in of_raw]
        is_mean = any(_is_multiple(a, t) for a, t in of_raw)  # as that of a log-normal value
        if errors and min(errors) > FAR and not is_mean:
            a, t = of_raw[0]
            yield (
                f"outputs that have no error in training are far from the targets in validation ({errors[0]:.3g} of "
                f"their deviation): those are scaled back to {float(a.min()):.3g} to {float(a.max()):.3g}, for targets "
                f"of {float(t.min()):.3g} to {float(t.max()):.3g}; invert exactly what training does to targets"
            )
            return
        values = [*_logged(base, perfect, re.compile(""))]
        others = [t for t in raw if t.numel() == target.numel() and not any(t is each for each in sources)]
        if any(has_values(b, t) for _, b in _compared(perfect) for t in others):
            continue  # it is compared with another part, as clean pictures
        is_perfect = any(best == 0 != own for _, own, best in values)  # as the loss of validation
        for name, own, best in _logged(base, perfect, ERRORS):
            is_unlike = not errors or max(errors) < 1e-3 or best > NO_BETTER * own
            if is_perfect and best > FAR * own > 0 and own != best and is_unlike:
                yield (
                    f"validation logs {name} = {best:.4g} for outputs that are the targets, and {own:.4g} for its own; "
                    "an error of perfect predictions is 0: correct how it is computed or scaled back"
                )
                return


@check("averaged-metric", "likely", at="probe")
def imperfect_scores(seen: Evidence) -> Lines:
    """What validation logs as accuracy or overlap is not 1 if its logits are those of the labels of training."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    if says(seen.module, SMOOTHED):
        return
    base, trace = probe.base("validation_step"), _trained(probe)
    calls = [c for c in trace.calls if c.target is not None and c.target.numel()] if trace else []
    for call in calls if len(calls) <= MOST else ():
        if trace is None or (perfect := _perfect_logits(call.kind, call)) is None:
            return
        if any(is_equal(c.target, call.target) and not has_values(c.prediction, call.prediction) for c in calls):
            continue  # of several networks, all of which would have to be perfect
        layers, target = _layers_of(trace, call.prediction), call.target
        is_label = _is_of_batch(target, tensors_of(probe.batches["validation_step"]), several=len(calls) > 1)
        if not layers or not is_label or float(target.float().std()) == 0:
            return  # training has labels of its own, as of a mask that it draws
        for name, own, best in _logged(base, _validated_with(probe, layers, perfect), SCORES):
            if best < BEST and own != best and not COSTS.search(name):
                yield Line(
                    f"validation logs {name} = {best:.4g} for logits that are those of the labels in training; a score "
                    "of perfect predictions is 1: look for another dimension, threshold, order of labels, or padding "
                    "in it",
                    subject=name,
                )
                return


def _is_of_batch(target: Tensor, batch: Sequence[Tensor], *, several: bool) -> bool:
    """Whether labels are the only ones of their shape in a batch; where losses have several, a part or column of it."""
    if several:
        columns = [column for t in batch if t.ndim == 2 and t.shape[1] <= MOST for column in t.unbind(1)]
        return any(t.shape == target.shape and has_values(t, target) for t in (*batch, *columns))
    parts = [t for t in batch if t.shape == target.shape]
    labels = [t for t in parts if not t.is_floating_point() or bool(((t == 0) | (t == 1)).all())]
    return len(labels) == 1 and has_values(labels[0], target)


@check("averaged-metric", "likely", at="probe")
def padding_in_scores(seen: Evidence) -> Lines:
    """A score of validation is not 1 for the labels of a loss that leaves padding out, and other classes on padding."""
    probe = seen.probe
    found = _padded(probe) if probe and {"training_step", "validation_step"} <= probe.batches.keys() else None
    if probe is None or found is None:
        return
    layer, labels, is_content, count = found
    share = float(is_content.float().mean())
    logged = []
    for classes in (labels.clamp(0, count - 1), torch.where(is_content, labels, (labels + 1) % count)):
        logits = (2 * nn.functional.one_hot(classes.long(), count) - 1) * SURE
        handle = probe.module.get_submodule(layer).register_forward_hook(partial(_replace, logits))
        try:
            logged.append(replay(seen))
        finally:
            handle.remove()
    perfect, other = logged
    for name in perfect.keys() & other.keys():
        is_score = SCORES.search(name) and not COSTS.search(name) and not OTHERS.search(name.lower())
        is_share = math.isclose(other[name], share, abs_tol=1e-5)
        if is_score and other[name] < BEST and (perfect[name] >= BEST or is_share):
            yield Line(
                f"{name} of a validation is {other[name]:.4g} for logits that are right wherever the loss of training "
                f"reads them, which are {share:.0%} of the places, and wrong on padding, which the loss leaves out; "
                "leave padding out of the score, too",
                subject=name,
            )
            return


def _padded(probe: Probe) -> tuple[str, Tensor, Tensor, int] | None:
    """The layer of logits (N, T, C), labels (N, T), where the loss depends on the logits (N, T), and C.

    None if it depends on all, or what is left out is no padding: behind or before all others of a row, in rows of
    different lengths, and with the same values in all parts of the batch.
    """
    if probe.size("validation_step") < FEWEST:
        return None
    outputs: list[tuple[str, Tensor]] = []
    gradients: list[Tensor | None] = []

    def keep(name: str, part: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and output.requires_grad:
            outputs.append((name, output))

    def differentiate(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.requires_grad and outputs:
            gradients.extend(torch.autograd.grad(loss, [t for _, t in outputs], allow_unused=True))

    batch = probe.batches["validation_step"]
    handles = [
        part.register_forward_hook(partial(keep, name))
        for name, part in probe.module.named_modules()
        if not is_metric(part)
    ]
    try:
        trace = probe.run("training_step", batch, training=False, record=False, then=differentiate)
    except Exception:  # of the user's code, which may not take the batch
        return None
    finally:
        for handle in handles:
            handle.remove()
    calls = [c for c in trace.calls if c.target is not None and c.kind in CLASSES and not c.target.is_floating_point()]
    for (name, output), gradient in [*zip(outputs, gradients, strict=False)][::-1] if len(calls) == 1 else ():
        if gradient is None:
            continue
        is_content = gradient.ne(0).any(-1)
        labels = _labels_of(calls[0], output.detach(), is_content, tensors_of(batch))
        if labels is not None:
            return (name, labels, is_content, output.shape[-1]) if _is_padded(batch, labels, is_content) else None
    return None


def _labels_of(call: Loss, output: Tensor, is_content: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The labels (N, T) of logits (N, T, C) that a loss function gets in any order, or of which it gets the content."""
    p: Tensor = call.prediction
    t: Tensor = call.target
    moved = output.movedim(-1, 1)
    if (p.shape == moved.shape and torch.equal(p, moved)) or (p.ndim == 2 and has_values(p, output)):
        return t.reshape(is_content.shape) if t.numel() == is_content.numel() else None
    if p.ndim != 2 or not has_values(p, output[is_content]):
        return None
    fits = (part for part in parts if part.shape == is_content.shape and has_values(part[is_content], t))
    return next(fits, None)


def _is_padded(batch: Any, labels: Tensor, is_content: Tensor) -> bool:
    steps = is_content.int().diff(dim=1)
    is_at_end = bool((steps <= 0).all()) or bool((steps >= 0).all())
    share, lengths = float(is_content.float().mean()), is_content.sum(1)
    if not is_at_end or not FEW < 1 - share < 1 - FEW or int(lengths.min()) == int(lengths.max()):
        return False
    parts = [labels, *(t for t in tensors_of(batch) if t.shape[:2] == is_content.shape)]
    return all(bool((t[~is_content] == t[~is_content][0]).all()) for t in parts)


def _replace(logits: Tensor, part: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook that returns other logits of the same shape."""
    return logits.to(output) if isinstance(output, Tensor) and output.shape == logits.shape else None


def _is_multiple(a: Tensor, b: Tensor) -> bool:
    """Whether values are the same multiple of others, of which all are positive."""
    ratio = a / b if bool((b > 0).all()) and bool((a > 0).all()) else a.new_zeros(2)
    return bool(ratio.any()) and float(ratio.std()) < 1e-4 * float(ratio.mean()) < 3e-4


def _perfect_logits(kind: str, call: Loss) -> Tensor | None:
    """Logits of which the loss is least; None if targets are no labels."""
    p: Tensor = call.prediction
    t: Tensor = call.target
    if kind in CLASSES and not t.is_floating_point() and p.ndim == t.ndim + 1:
        valid = (t >= 0) & (t < p.shape[1]) & (t != call.options.get("ignore_index", -100))
        one_hot = nn.functional.one_hot(t.where(valid, 0).long(), p.shape[1]).movedim(-1, 1)
        return (2 * one_hot - 1).to(p) * SURE
    if kind == "binary_cross_entropy_with_logits" and p.shape == t.shape and bool(((t == 0) | (t == 1)).all()):
        return (2 * t - 1).to(p) * SURE
    return None


def _trained(probe: Probe) -> Trace | None:
    """A training step with the batch of validation, in evaluation mode; None if it does not take it."""
    if probe.size("validation_step") < FEWEST:
        return None
    results: list[tuple[str, Tensor]] = []

    def keep(part: nn.Module, given: Any, output: Any) -> None:
        results.extend((OUTPUT, t.detach()) for t in tensors_of(output))

    handle = probe.module.register_forward_hook(keep)
    try:
        trace = probe.run("training_step", probe.batches["validation_step"], training=False)
        trace.tensors += results  # those of the module itself, whose name is empty
    except Exception:  # of the user's code, which may not take the batch
        return None
    finally:
        handle.remove()
    return trace


def _compared(trace: Trace) -> Iterator[tuple[Tensor, Tensor]]:
    """What regressions compared, or differences, in both orders."""
    for a, b in [*((c.prediction, c.target) for c in trace.calls if c.kind in REGRESSIONS), *trace.differences]:
        yield a, b
        yield b, a


def _layers_of(trace: Trace, prediction: Tensor) -> list[str]:
    """The last layers that returned predictions, by their names, the last one first."""
    prefix = "the output of "
    names = (
        n.removeprefix(prefix) for n, t in reversed(trace.tensors) if n.startswith(prefix) and has_values(t, prediction)
    )
    return [*islice(dict.fromkeys(names), TRIED)]


def _validated_with(probe: Probe, layers: Sequence[str], output: Tensor) -> Trace:
    """A validation step in which the first layer that returns one tensor returns given values; else an empty one."""
    for layer in layers:
        calls: list[bool] = []
        inputs: list[list[Tensor]] = []

        def hook(part: nn.Module, given: Any, result: Any, calls: list[bool] = calls, inputs: Any = inputs) -> Any:
            inputs.append([t.detach().clone() for t in tensors_of(given)])
            # Of another call, as for mirrored pictures, other values are perfect.
            is_first = all(map(is_equal, inputs[0], inputs[-1]))
            calls.append(isinstance(result, Tensor) and result.numel() == output.numel() and is_first)
            return output.reshape(result.shape).to(result) if calls[-1] else None

        handle = probe.module.get_submodule(layer).register_forward_hook(hook)
        try:
            trace = probe.run("validation_step", probe.batches["validation_step"], training=False, record=False)
        except Exception:  # of the user's code, which may need values of its own
            calls.append(False)
        finally:
            handle.remove()
        if calls and all(calls):
            return trace
    return Trace()


def _logged(base: Trace, perfect: Trace, names: re.Pattern[str]) -> Iterator[tuple[str, float, float]]:
    """Values of some names that are logged: with the own outputs, and with perfect ones."""
    for name in base.logged.keys() & perfect.logged.keys():
        own, best = base.logged[name], perfect.logged[name]
        if not names.search(name) or OTHERS.search(name.lower()):
            continue
        if is_metric(own) and is_metric(best):
            if not PLAIN.search(type(own).__name__):
                continue
            own, best = base.of_batch.get(name), perfect.of_batch.get(name)
        are_numbers = all(isinstance(v, float | int) or (isinstance(v, Tensor) and v.numel() == 1) for v in (own, best))
        if are_numbers and math.isfinite(float(own)) and math.isfinite(float(best)):
            yield name, float(own), float(best)
