"""Values in a pass of the user's own step that lose their gradient or their digits: for probes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.calls import LOSSES, Remark, remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS

ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__", "rsub"))
ARITHMETIC = ADDITIONS | {"mul", "__mul__", "__rmul__", "neg", "__neg__"}
DETACHES = frozenset(("detach", "detach_", "data", "__get__", "item", "requires_grad_"))
NOISES = frozenset(("randn", "randn_like", "rand", "rand_like", "normal", "normal_", "uniform_"))
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LAYERS = frozenset(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "bilinear", "cat", "concat", "matmul"))
READS = frozenset(("__get__", "size", "dim", "numel", "__len__", "detach"))
EXTREMES = frozenset(("min", "max", "amin", "amax"))
COPIES = frozenset(("detach", "__get__"))  # the latter of .data
FRACTIONS = 0.2  # share of targets that lose one


class Cuts(TorchFunctionMode):
    """Follow values through a step.

    Args:
        batch: Its batch.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.remarks: list[Remark] = []
        self.batch = tensors_of(batch)
        self.cut = WeakTensorKeyDictionary()  # what depends on weights, but has no gradient: the function that cut it
        self.noise = WeakTensorKeyDictionary()  # what was drawn: how often it is used
        # Samples of a distribution with a gradient: whether a layer, and a score, get it.
        self.drawn = WeakTensorKeyDictionary()
        self.samples: list[list[bool]] = []
        self.truncated: list[Tensor] = []
        self.weights = WeakTensorKeyDictionary()  # results of a softmax: its dimension, from the end
        self.masked = WeakTensorKeyDictionary()  # products with a mask: the values, and the mask
        self.ascending = WeakTensorKeyDictionary()  # orders of a part of the batch, and what is in them
        self.differentiates = False
        self.differentiated = set[int]()  # inputs of autograd.grad, whose results have no gradient

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = tensors_of([args, kwargs])
        result = function(*args, **kwargs)
        found = tensors_of(result) if isinstance(result, Tensor) or name == "grad" else []
        self.differentiates |= name in ("grad", "backward")
        if name == "grad" and not kwargs.get("create_graph"):
            self.differentiated |= {id(t) for t in tensors_of(args[1] if len(args) > 1 else kwargs.get("inputs"))}
        self._follow_noise(name, given, found)
        self._follow_cut(name, given, found)
        if name in ("long", "int", "to", "type", "short") and found and found[0].dtype in INTEGERS:
            self._truncate(given[0])
        if name in ARITHMETIC and found and found[0].dtype == torch.uint8:
            self._wrap(function, args, kwargs, found[0])
        if name in LOSSES and len(given) > 1:
            self._targets(name, given[1])
        self._follow_order(name, args, kwargs, found)
        if name in ("sin", "cos") and given:
            self._angle(name, given[0])
        if isinstance(result, Tensor) or name in EXTREMES:
            self._weights(name, args, kwargs, result)
        return result

    def _say(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))

    def _follow_cut(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        if torch.is_grad_enabled() and name in COPIES and given and isinstance(given[0], nn.Parameter):
            self.cut.update(
                {t: "a parameter's .data or detach()" for t in found if given[0].requires_grad and not t.requires_grad}
            )
        if not torch.is_grad_enabled() or name in DETACHES:
            return
        cuts = [self.cut[t] for t in given if t in self.cut]
        others = [t for t in given if t.requires_grad and not t.is_leaf and id(t) not in self.differentiated]
        if name in ADDITIONS and others and "grad" in cuts:
            self._say(
                "constant-term",
                f"a derivative of {tuple(given[0].shape)}, which autograd.grad has returned, is added to an output, "
                "and has no gradient, so weights do not learn by it; pass create_graph=True",
            )
        is_sum = name in ADDITIONS or name == "stack"
        if is_sum and cuts and any(t.requires_grad for t in given) and all(t.numel() == 1 for t in given):
            remedy = "pass create_graph=True" if cuts[0] == "grad" else "compute it from values that have a gradient"
            self._say(
                "constant-term",
                f"a term that is added to the loss has no gradient, as what {cuts[0]} has returned has none, so it "
                f"changes nothing; {remedy}",
            )
        for t in found:
            if not t.requires_grad and (cuts or any(each.requires_grad for each in given)):
                self.cut[t] = cuts[0] if cuts else name

    def _follow_noise(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for t in given:
            if t in self.noise and name not in LOSSES and name not in READS:
                self.noise[t] += 1
            if t in self.drawn:
                state = self.drawn[t]
                state[0] |= name in LAYERS
                state[1] |= name not in LAYERS and any(other.requires_grad for other in given if other is not t)
        if name in NOISES:
            is_drawn = name == "normal" and not torch.is_grad_enabled() and any(t.requires_grad for t in given)
            for t in found:
                self.noise[t] = 0
                if is_drawn:
                    self.drawn[t] = state = [False, False]
                    self.samples.append(state)

    def _follow_order(self, name: str, args: Any, kwargs: Any, found: Sequence[Tensor]) -> None:
        """Follow an ascending order of the samples to a cumulative sum of exponentials, as of risk sets."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return
        if name == "argsort":
            is_descending = kwargs.get("descending", any(arg is True for arg in args[1:]))
            is_ascending = not is_descending and any(first is each for each in self.batch)
        elif name in ("logcumsumexp", "cumsum") and first in self.ascending and first.requires_grad:
            if name == "logcumsumexp" or self.ascending[first] == "exp":
                self._say(
                    "risk-sets",
                    f"{name} is over samples in ascending order of a part of the batch, so each sum has the samples of "
                    "earlier times; the risk set of an event has later ones: sort with descending=True",
                )
            return
        else:
            is_ascending = first in self.ascending and name == "exp"
            is_ascending |= name == "__getitem__" and isinstance(args[1], Tensor) and args[1] in self.ascending
        for t in found if is_ascending else ():
            self.ascending[t] = name

    def _angle(self, name: str, t: Tensor) -> None:
        """Degrees that come from the batch as they are."""
        is_raw = t.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in self.batch}
        if (
            is_raw
            and t.numel() >= 8
            and float(t.max()) <= 360
            and float(t.min()) >= -180
            and float(t.abs().max()) > 100
        ):
            self._say(
                "degrees",
                f"{name} gets values of the batch from {float(t.min()):.3g} to {float(t.max()):.3g}, as of degrees, "
                "and takes them for radians; use torch.deg2rad() first",
            )

    def _weights(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow softmax to the product that it weights, and masks that multiply to a minimum or maximum."""
        first = args[0] if args else kwargs.get("input")
        if not isinstance(first, Tensor):
            return
        if name == "softmax" and first.ndim >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self.weights[result] = dim if dim is None or dim < 0 else dim - first.ndim
        elif name == "dropout" and first in self.weights:
            self.weights[result] = self.weights[first]
        elif name in ("matmul", "__matmul__", "bmm") and first in self.weights and self.weights[first] == -2:
            sums = first.detach().sum(-1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                self._say(
                    "weights-of-queries",
                    f"softmax over dimension -2 of {tuple(first.shape)} gives the weights of a sum over its dimension "
                    "-1, in which they do not add up to 1; use softmax(-1)",
                )
        elif name in ("mul", "__mul__", "__rmul__"):
            for values, mask in (args[:2], args[1::-1]) if len(args) > 1 else ():
                if is_mask(mask) and isinstance(values, Tensor) and values.is_floating_point():
                    self.masked[result] = values.detach(), mask.detach().expand_as(result)
        elif name in EXTREMES and first in self.masked and (len(args) > 1 or "dim" in kwargs):
            values, mask = self.masked[first]
            found = result if isinstance(result, Tensor) else result[0]
            is_least = name in ("min", "amin")
            is_one_sided = bool((values >= 0).all() if is_least else (values <= 0).all())
            if is_one_sided and bool(values.any()) and not bool(found.any()) and bool((mask != 0).any()):
                self._say(
                    "masked-extreme",
                    f"the {'least' if is_least else 'largest'} of {tuple(first.shape)} values is 0 for all, as a mask "
                    f"multiplies others by 0; use masked_fill(~mask, float('{'' if is_least else '-'}inf'))",
                )

    def _truncate(self, t: Tensor) -> None:
        is_of_batch = t.is_floating_point() and any(t.data_ptr() == each.data_ptr() for each in self.batch)
        if is_of_batch and t.numel() and float((t != t.trunc()).float().mean()) > FRACTIONS:
            self.truncated.append(t.detach().trunc())

    def _wrap(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        wide = [a.int() if isinstance(a, Tensor) else a for a in args]
        exact = function(*wide, **kwargs)
        if isinstance(exact, Tensor) and exact.shape == result.shape and bool((exact != result).any()):
            share = float((exact != result).float().mean())
            self._say(
                "bytes-wrap",
                f"{share:.0%} of the results of {function.__name__.strip('_')} on bytes, of {tuple(result.shape)}, are "
                "below 0 or above 255, and wrap around; call float() first",
            )

    def _targets(self, name: str, target: Tensor) -> None:
        if name in REGRESSIONS and target in self.noise and self.noise[target] == 0:
            self._say(
                "random-target",
                f"the target of {name}, of {tuple(target.shape)}, was drawn at random, and nothing else uses it, so "
                "nothing can be learned of it; keep the noise that was added, and pass it as the target",
            )
        for t in self.truncated:
            if t.numel() == target.numel() and torch.equal(t.flatten(), target.detach().flatten().to(t)):
                self._say(
                    "truncated-target",
                    f"targets of {name} are converted to integers, which takes away their fractions; keep them as "
                    "floating-point numbers",
                )

    def conclude(self) -> None:
        """Say what only the whole step tells."""
        if any(fed and not scored for fed, scored in self.samples):
            self._say(
                "sample-cut",
                "a sample of a normal distribution, which is drawn by sample(), is an input of layers, so no gradient "
                "reaches its mean and deviation; use rsample()",
            )


@check("constant-term", "likely", at="probe")
def constant_term(seen: Evidence) -> Lines:
    """A number that depends on weights, or a derivative, is added to the loss without its gradient, not by detach."""
    yield from remarks(seen, "constant-term")


def is_mask(t: Any) -> bool:
    """Whether a tensor has no gradient, and zeros, and ones, and nothing else."""
    if not isinstance(t, Tensor) or t.requires_grad or t.ndim == 0:
        return False
    return bool(((t == 0) | (t == 1)).all() and t.any() and (t == 0).any())


@check("risk-sets", "likely", at="probe")
def risk_sets(seen: Evidence) -> Lines:
    """A cumulative sum of exponentials is over samples in ascending order of a part of the batch, such as times."""
    yield from remarks(seen, "risk-sets")


@check("degrees", "likely", at="probe")
def degrees(seen: Evidence) -> Lines:
    """A sine or cosine is computed of values as they are in the batch, within -180 to 360, and some over 100."""
    yield from remarks(seen, "degrees")


@check("weights-of-queries", "likely", at="probe")
def weights_of_queries(seen: Evidence) -> Lines:
    """A matrix product sums over the last dimension of a softmax that is over the one before it."""
    yield from remarks(seen, "weights-of-queries")


@check("masked-extreme", "certain", at="probe")
def masked_extreme(seen: Evidence) -> Lines:
    """The minimum of values that are never negative, times a mask, is always 0; or the maximum of the reverse."""
    yield from remarks(seen, "masked-extreme")


@check("sample-cut", "likely", at="probe")
def sample_cut(seen: Evidence) -> Lines:
    """A layer gets a sample of a normal distribution with learned parameters, without rsample or a log-probability."""
    yield from remarks(seen, "sample-cut")


@check("random-target", "likely", at="probe")
def random_target(seen: Evidence) -> Lines:
    """The target of a regression is drawn at random, and used for nothing else."""
    yield from remarks(seen, "random-target")


@check("truncated-target", "likely", at="probe")
def truncated_target(seen: Evidence) -> Lines:
    """A loss function gets floating-point targets of which over 20% have lost a fraction."""
    yield from remarks(seen, "truncated-target")


@check("bytes-wrap", "certain", at="probe")
def bytes_wrap(seen: Evidence) -> Lines:
    """Sums, differences or products of bytes wrap around."""
    yield from remarks(seen, "bytes-wrap")
