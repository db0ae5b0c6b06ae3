"""Values in a pass of the user's own step that lose their gradient or their digits: for probes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = tensors_of([args, kwargs])
        result = function(*args, **kwargs)
        found = tensors_of(result) if isinstance(result, Tensor) or name == "grad" else []
        self._follow_noise(name, given, found)
        self._follow_cut(name, given, found)
        if name in ("long", "int", "to", "type", "short") and found and found[0].dtype in INTEGERS:
            self._truncate(given[0])
        if name in ARITHMETIC and found and found[0].dtype == torch.uint8:
            self._wrap(function, args, kwargs, found[0])
        if name in LOSSES and len(given) > 1:
            self._targets(name, given[1])
        return result

    def _say(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))

    def _follow_cut(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        if not torch.is_grad_enabled() or name in DETACHES:
            return
        cuts = [self.cut[t] for t in given if t in self.cut]
        is_sum = name in ADDITIONS or name == "stack"
        if is_sum and cuts and any(t.requires_grad for t in given) and all(t.numel() == 1 for t in given):
            remedy = "pass create_graph=True" if cuts[0] == "grad" else "compute it from values that have a gradient"
            self._say(
                "constant-term",
                f"a term that is added to the loss has no gradient, as {cuts[0]} has returned none, so it changes "
                f"nothing; {remedy}",
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
    """A number that depends on weights, but has no gradient, is added to the loss, not by detach."""
    yield from remarks(seen, "constant-term")


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
