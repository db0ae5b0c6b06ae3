"""Probes of flows and diffusion: the sign of a log-determinant, and the sizes of signal and noise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS, name_of, nodes_behind, saved
from boltcutter.diagnosis.signs import sign_of
from boltcutter.diagnosis.source import own_classes, says
from boltcutter.structure import map_tensors, take_rows

MOST_VALUES = 64  # of a sample, as its Jacobian is computed
SAMPLES = 4
FEWEST = 8  # samples
EXACT = 1e-3
SUB_VP = re.compile(r"sub_?-?vp|sde|marginal_prob", re.IGNORECASE)  # in which 1 - a ** 2 is meant
MANY, MANY_NODES = 24, 5000  # samples, and operations
MOST_COLUMNS = 512
MOST_MIXTURES = 16  # and layers
UNRELATED = 0.4  # correlation, of at least as many
SHIFT = 0.1  # deviation by which weights are changed: many flows begin as the identity, whose determinant is 1


class Step(NamedTuple):
    """One call of a layer that returns a value and the logarithm of a determinant.

    Args:
        name: Name of the layer.
        layer: The layer.
        given: Its arguments, of which the first is the value, shape (N, …).
        options: Its keyword arguments.
        log_det: The logarithm, shape (N,) or (N, 1).
        value: That it returns, shape (N, …).
    """

    name: str
    layer: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]
    log_det: Tensor
    value: Tensor


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
    unused: list[Step] = []
    shares: list[tuple[str, float]] = []  # of what the density of the last values should count

    def look(loss: Any) -> None:
        wrong.extend(_wrong_steps(steps, loss, sign_of(seen), unused))
        shares.extend(_share_of_base(steps, loss))

    try:
        probe.run(
            "training_step",
            probe.batches["training_step"],
            training=True,
            record=False,
            then=look,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for step in [step for step in unused if _sign_of_determinant(step)][:1]:
        yield Line(
            f"what {step.name} returns as the logarithm of a determinant does not enter the loss, though that of "
            "another layer does; add up those of all layers: log_det = log_det + …",
            subject=type(step.layer).__name__,
        )
        return
    for step in [step for step in steps if not wrong and abs(_sign_of_determinant(step)) not in (0.0, 1.0)][:1]:
        yield Line(
            f"what {step.name} returns as the logarithm of a determinant is {abs(_sign_of_determinant(step)):.3g} of "
            "it, as a mean over dimensions of a sample is, or a sum without its places; sum the logarithms of the "
            "factors of all values of a sample",
            subject=type(step.layer).__name__,
        )
    if shares and not wrong:
        name, share = shares[0]
        yield Line(
            f"beside the log-determinants of {name}, the log-density of its last values counts {share:.3g} of what it "
            "should, as a mean over dimensions does, and not a sum; add up the log-densities of all values of a sample",
            subject="base",
        )
        return
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
        steps.append(Step(name, layer, given, options, found[1], found[0]))


def _values(output: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in output if isinstance(t, Tensor) and t.is_floating_point()]


def _wrong_steps(steps: list[Step], loss: Any, sign: float, unused: list[Step] | None = None) -> list[Step]:
    """Those whose log-determinant the optimizer makes smaller; those whose it does not reach are added to a list."""
    if not steps or not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        return []
    gradients = torch.autograd.grad(loss, [s.log_det for s in steps], allow_unused=True, retain_graph=True)
    found = []
    if unused is not None and any(gradient is not None for gradient in gradients):
        unused += [step for step, gradient in zip(steps, gradients, strict=True) if gradient is None]
    for step, gradient in zip(steps, gradients, strict=True):
        signs = set((sign * gradient).sign().flatten().tolist()) if gradient is not None else set()
        if len(signs) == 1 and signs.pop() * _sign_of_determinant(step) > 0:
            found.append(step)
    return found


def _share_of_base(steps: list[Step], loss: Any) -> Iterator[tuple[str, float]]:
    """The share that the last values have in the loss, of what they should, if it is 1 by their number; or nothing.

    The loss of a normal density with a log-determinant is ``x ** 2 / 2 - log_det`` of each sample, whose derivatives
    are ``x`` and -1.
    """
    if not steps or not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        return
    last = steps[-1]
    by_value, by_log_det = torch.autograd.grad(loss, [last.value, last.log_det], allow_unused=True, retain_graph=True)
    if by_value is None or by_log_det is None or not bool((by_log_det != 0).all()):
        return
    ratio = -by_value / by_log_det.reshape(-1, *[1] * (by_value.ndim - 1)) / last.value.detach()
    share = float(ratio.median())
    known = last.value.detach().abs() > SHIFT
    sizes = [float(size) for size in (last.value[0].numel(), *last.value.shape[1:]) if size > 1]
    is_alike = bool(known.any()) and float((ratio - share)[known].abs().max()) < EXACT * abs(share)
    if is_alike and any(abs(share * size - 1) < EXACT for size in sizes) and _has_mean(loss.grad_fn, last.value.ndim):
        yield last.name.rpartition(".")[0] or last.name, share


def _has_mean(node: Any, ndim: int) -> bool:
    """Whether a graph takes a mean over dimensions of each sample, which leaves the samples."""
    return any(name_of(n) == "Mean" and len(saved(n, "self_sym_sizes") or ()) == ndim and saved(n, "dim") for n in
               islice(nodes_behind(node), MANY_NODES))  # fmt: skip


def _sign_of_determinant(step: Step) -> float:
    """1 if a layer returns the log-determinant of its Jacobian, -1 if that of the inverse one; 0: neither, or unknown.

    Between 0 and 1 if it returns a mean over dimensions, or leaves one of them out.

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
    sizes = [float(size) for size in (value[0].numel(), *value.shape[1:]) if size > 1]
    factors = (1.0, -1.0, *sizes, *(-size for size in sizes))
    return next((1 / s for s in factors if torch.allclose(s * log_det, exact, rtol=0.001, atol=0.001)), 0.0)


class Mixture(NamedTuple):
    """What a layer gets: the batch times one factor, and noise times another one, of each sample.

    Args:
        signal: Factor of the batch, shape (N,).
        noise: Factor of the noise, shape (N,).
        rows: Of which samples both are known, shape (N,).
        is_certain: Whether there are more values than factors, or the squares of both sum to 1.
    """

    signal: Tensor
    noise: Tensor
    rows: Tensor
    is_certain: bool


def mixtures(seen: Evidence) -> Iterator[Mixture]:
    """Sums of the batch and of the noise that a network is trained to predict, which layers get."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    base, parts = probe.base("training_step"), tensors_of(probe.batches["training_step"])
    noises = [c.target for c in base.calls if c.kind in REGRESSIONS and c.target.ndim > 1]
    noises += [b for pair in base.differences for b in pair if b.ndim > 1]
    given = [t for name, t in base.tensors if name.startswith("the input of ") and t.is_floating_point()]
    clean = [p for p in parts if p.is_floating_point() and p.ndim > 1 and len(p) >= FEWEST]
    clean += [2 * p - 1 for p in clean if float(p.min()) >= 0 and float(p.max()) <= 1]  # scaled by a step
    for x in clean:
        for noise in (n for n in noises if n.shape == x.shape and not torch.equal(n, x)):
            for t in given:
                mixed = t[:, : x.shape[1]] if t.ndim == x.ndim == 2 and t.shape[1] > x.shape[1] else t
                found = _factors(mixed, x, noise) if mixed.shape == x.shape else None
                if found is not None:
                    yield found


def _factors(mixed: Tensor, x: Tensor, noise: Tensor) -> Mixture | None:
    """The two factors of each sample, which differ between samples; None if it is no such sum."""
    sides = torch.stack([x.flatten(1), noise.flatten(1)], 2).double()  # (N, values, 2)
    whole = mixed.flatten(1).double()[..., None]
    if sides.shape[1] < 2 or not bool(sides.isfinite().all() & whole.isfinite().all()):
        return None
    found = torch.linalg.lstsq(sides, whole).solution
    left = (sides @ found - whole).flatten(1).norm(dim=1) / (whole.flatten(1).norm(dim=1) + 1e-12)
    a, b = found[:, 0, 0], found[:, 1, 0]
    rows = (left < EXACT) & (a > 0.05) & (a < 0.95) & (b > 0.05) & (b < 0.95)
    is_sum = int(rows.sum()) >= FEWEST and float((left < EXACT).float().mean()) > 0.9
    if not is_sum or float(a[rows].max() - a[rows].min()) < 0.1:
        return None
    return Mixture(a, b, rows, sides.shape[1] > 2 or float((a**2 + b**2 - 1)[rows].abs().median()) < EXACT)


@check("deviation", "likely", at="probe")
def noise_by_variance(seen: Evidence) -> Lines:
    """A layer gets a * x + (1 - a ** 2) * noise, or a ** 2 and its square root, so the variance of the sum is not 1."""
    for a, b, rows, _ in mixtures(seen) if not says(seen.module, SUB_VP) else ():
        a, b = a[rows], b[rows]
        is_noise = float((b - (1 - a**2)).abs().median()) < EXACT
        if is_noise or float((a - (1 - b**2)).abs().median()) < EXACT:
            yield (
                f"a layer gets a sum of the batch and of noise, in which the {'noise' if is_noise else 'batch'} is "
                "multiplied by the square of what it should be, so the variance of the sum is not 1; multiply by the "
                "square roots: alpha.sqrt() * x + (1 - alpha).sqrt() * noise"
            )
            return


@check("other-time", "likely", at="probe")
def other_time(seen: Evidence) -> Lines:
    """A layer gets drawn times that have nothing to do with the share of noise in what it gets."""
    for _, noise, rows, is_certain in islice(mixtures(seen), MOST_MIXTURES):
        probe, count = seen.probe, len(noise)
        parts = [t.flatten() for t in tensors_of(probe.batches["training_step"])]  # type: ignore[union-attr]
        given = probe.base("training_step").tensors  # type: ignore[union-attr]
        times = [t.flatten().double() for n, t in given if n.startswith("the input of ") and t.numel() == count]
        times = [
            t for t in times if len(torch.unique(t)) > FEWEST and not any(torch.equal(t, p.double()) for p in parts)
        ]
        wide = [t for n, t in given if n.startswith("the input of ") and t.ndim == 2 and len(t) == count]
        columns = [t for t in wide if t.is_floating_point() and t.shape[1] <= MOST_COLUMNS][:MOST_MIXTURES]
        if any(float(_rank_correlations(t[rows], noise[rows]).max()) > 1 - UNRELATED / 2 for t in columns):
            continue  # a sine or cosine of the time
        related = [float(_rank_correlations(t[rows, None], noise[rows])) for t in times[:MOST_MIXTURES]]
        if is_certain and related and int(rows.sum()) >= MANY and max(related) < UNRELATED:
            yield (
                "the network gets other times than those by which noise was mixed into its input (correlation with the "
                f"share of noise {max(related):.2f}), as if they were drawn twice; draw them once, and pass the same"
            )
            return


def _rank_correlations(columns: Tensor, other: Tensor) -> Tensor:
    """Of each column (R, C) with other values (R,), without its sign, shape (C,)."""
    a, b = (t.double().argsort(0).argsort(0).double() for t in (columns, other[:, None]))
    a, b = a - a.mean(0), b - b.mean(0)
    found: Tensor = (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0) + 1e-12)
    return found.abs()
