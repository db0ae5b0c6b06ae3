"""A probe of normalizing flows: whether the log-determinant of a layer's Jacobian enters the loss with its sign."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.signs import sign_of
from boltcutter.diagnosis.source import own_classes
from boltcutter.structure import map_tensors, take_rows

MOST_VALUES = 64  # of a sample, as its Jacobian is computed
SAMPLES = 4
SHIFT = 0.1  # deviation by which weights are changed: many flows begin as the identity, whose determinant is 1


class Step(NamedTuple):
    """One call of a layer that returns a value and the logarithm of a determinant.

    Args:
        name: Name of the layer.
        layer: The layer.
        given: Its arguments, of which the first is the value, shape (N, …).
        options: Its keyword arguments.
        log_det: The logarithm, shape (N,) or (N, 1).
    """

    name: str
    layer: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]
    log_det: Tensor


@check("log-determinant", "likely", at="probe")
def log_determinant(seen: Evidence) -> Lines:
    """A layer returns plus or minus the log-determinant of its Jacobian, and the likelihood falls as that grows."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    steps: list[Step] = []
    own = [(n, p) for n, p in probe.module.named_modules() if p is not probe.module and own_classes(type(p))]
    hooks = [part.register_forward_hook(partial(_keep, steps, name), with_kwargs=True) for name, part in own]
    wrong: list[Step] = []
    try:
        probe.run(
            "training_step",
            probe.batches["training_step"],
            training=True,
            record=False,
            then=lambda loss: wrong.extend(_wrong_steps(steps, loss, sign_of(seen))),
        )
    finally:
        for hook in hooks:
            hook.remove()
    for step in wrong[:1]:
        yield Line(
            f"what {step.name} returns as the logarithm of a determinant enters the loss with the wrong sign, so the "
            "likelihood falls where the density grows; change the sign",
            subject=type(step.layer).__name__,
        )


def _keep(
    steps: list[Step], name: str, layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], output: Any
) -> None:
    """A forward hook that keeps the calls that return a value of the input's shape, and one number for each sample."""
    first = given[0] if given else None
    if not isinstance(output, tuple) or not isinstance(first, Tensor) or layer in (s.layer for s in steps):
        return
    is_small = first.ndim > 1 and first.is_floating_point() and 0 < first[:1].numel() <= MOST_VALUES
    found = _values(output)
    is_pair = len(found) == 2 and found[0].shape == first.shape and found[1].requires_grad
    if is_small and is_pair and found[1].shape in ((len(first),), (len(first), 1)):
        steps.append(Step(name, layer, given, options, found[1]))


def _values(output: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in output if isinstance(t, Tensor) and t.is_floating_point()]


def _wrong_steps(steps: list[Step], loss: Any, sign: float) -> list[Step]:
    """Those whose log-determinant the optimizer makes smaller."""
    if not steps or not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        return []
    gradients = torch.autograd.grad(loss, [s.log_det for s in steps], allow_unused=True, retain_graph=True)
    found = []
    for step, gradient in zip(steps, gradients, strict=True):
        signs = set((sign * gradient).sign().flatten().tolist()) if gradient is not None else set()
        if len(signs) == 1 and signs.pop() * _sign_of_determinant(step) > 0:
            found.append(step)
    return found


def _sign_of_determinant(step: Step) -> float:
    """1 if a layer returns the log-determinant of its Jacobian, -1 if that of the inverse one; 0: neither, or unknown.

    The layer is called again, in evaluation mode, with other weights and a few samples.
    """
    layer, count = step.layer, len(step.given[0])
    few = take_rows((step.given, step.options), range(min(SAMPLES, count)), count)
    (value, *given), options = map_tensors(few, Tensor.detach)
    modes = {part: part.training for part in layer.modules()}
    weights = {n: p + SHIFT * torch.randn_like(p) for n, p in layer.named_parameters() if p.is_floating_point()}
    layer.eval()
    try:
        with torch.enable_grad():
            result, log_det = _values(functional_call(layer, weights, (value.requires_grad_(), *given), options))
            columns = result.flatten(1).unbind(1)
            rows = [torch.autograd.grad(c.sum(), value, retain_graph=True)[0].flatten(1) for c in columns]
        exact = torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet
    except Exception:  # of the user's code, which may only take whole batches
        return 0.0
    finally:
        for part, mode in modes.items():
            part.training = mode
    if not bool((exact.abs() > 0.01).any()):
        return 0.0
    log_det = log_det.detach().flatten()
    return next((s for s in (1.0, -1.0) if torch.allclose(s * log_det, exact, rtol=0.001, atol=0.001)), 0.0)
