"""Values in a pass of the user's own step that lose their gradient or their digits: for probes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.addends import AddendFinder
from boltcutter.diagnosis.attention import Attention
from boltcutter.diagnosis.calls import LOSSES, LossCalls, Remark, remarks
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.comparisons import Comparisons
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.graph import REGRESSIONS
from boltcutter.diagnosis.indices import Indices
from boltcutter.diagnosis.lengths import Lengths
from boltcutter.diagnosis.noises import Noises
from boltcutter.diagnosis.results import Copies, Results, is_part
from boltcutter.diagnosis.temperatures import Temperatures

ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__", "rsub"))
ARITHMETIC = ADDITIONS | {"mul", "__mul__", "__rmul__", "neg", "__neg__"}
DETACHES = frozenset(("detach", "detach_", "data", "__get__", "item", "requires_grad_"))
NOISES = frozenset(("randn", "randn_like", "rand", "rand_like", "normal", "normal_", "uniform_"))
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NARROW = (torch.uint8, torch.int8, torch.int16)
LAYERS = frozenset(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "bilinear", "cat", "concat", "matmul"))
READS = frozenset(("__get__", "size", "dim", "numel", "__len__", "detach"))
FILLED = frozenset(("ones_like", "zeros_like", "full_like", "empty_like", *NOISES))
EXTREMES = frozenset(("min", "max", "amin", "amax"))
MEAN_LOSSES = frozenset(("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"))
PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply"))
CONVERSIONS = frozenset(("float", "double", "half", "to", "type"))
VIEWS = frozenset(("__getitem__", "squeeze", "unsqueeze", "view", "reshape", "round", "clamp", "contiguous", "flatten"))
WIDE_INTEGERS = (torch.int64, torch.int32)
SCATTERS = frozenset(("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"))
READS_ROWS = frozenset(("__getitem__", "index_select"))
WRITES_ROWS = frozenset(("__setitem__", "index_put_", "index_put", "index_copy_", "index_copy"))
DRAWS = frozenset(("randint", "randint_like", "multinomial", "random_", "rand", "rand_like"))
INDEX_VIEWS = frozenset(("__getitem__", "view", "reshape", "flatten", "long", "int", "to", "floor", "mul", "__mul__"))
DEVIATIONS = frozenset(("std", "var", "std_mean", "var_mean"))
LEVELS = 16  # samples, whose levels of noise show those of all
FEWEST_LEVELS = 8  # steps of a diffusion
MOST_NOISE = 0.5  # of the variance of the noisiest of them
FLOATS = frozenset(("as_tensor", "tensor", "float", "half", "to", "type", "FloatTensor"))
FEWEST_STEPS = 4  # values in a row
MANY = 100_000
LOST = 0.1  # of a step
LARGE, RANGE = 1e3, 0.1  # values of which the range is small, relative to them
TOKENS = frozenset(("cross_entropy", "nll_loss"))
DISTANCES = frozenset(("abs", "square", "pow", "__pow__", "absolute"))
DIVISIONS = frozenset(("div", "__truediv__", "true_divide", "divide"))
FEW_PADDED = 0.05  # share of places
FRACTIONS = 0.2  # share of targets that lose one


class Cuts(TorchFunctionMode):
    """Follow values through a step.

    Args:
        batch: Its batch.
        module: Which has the step; None of a dataset.
    """

    def __init__(self, batch: Any, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self.remarks: list[Remark] = []
        self.batch = tensors_of(batch)
        self.cut = WeakTensorKeyDictionary()  # what autograd.grad has returned without its graph, or is computed of it
        self.noise = WeakTensorKeyDictionary()  # what was drawn: how often it is used
        # Samples of a distribution with a gradient: whether a layer, and a score, get it.
        self.drawn = WeakTensorKeyDictionary()
        self.samples: list[list[bool]] = []
        self.sampled_from: dict[int, list[list[bool]]] = {}  # samples, by the memory of their mean
        self.sums = WeakTensorKeyDictionary()  # of samples in ascending order, and what to say of each
        self.earlier: list[list[str]] = []
        self.truncated: list[Tensor] = []
        self.over_heads = WeakTensorKeyDictionary()  # products of attention whose softmax is over its heads
        self.weights = WeakTensorKeyDictionary()  # results of a softmax: its dimension, from the end
        self.levels = WeakTensorKeyDictionary()  # products with a factor of each sample: whether of noise, the factor
        self.masked = WeakTensorKeyDictionary()  # products with a mask: the values, and the mask
        self.each = WeakTensorKeyDictionary()  # losses of each token (N, T), and these times a mask: the mask
        self.padded = WeakTensorKeyDictionary()  # means of these, and what is computed of them: what is to be said
        self.gathered = WeakTensorKeyDictionary()  # rows, and layers of them: the indices
        self.means = WeakTensorKeyDictionary()  # mean losses of a batch, and what exp(-loss) computes of them
        self.errors = WeakTensorKeyDictionary()  # differences, and their squares and sizes: which of both
        self.shapes = WeakTensorKeyDictionary()  # means of errors, and their shape before
        self.whole = WeakTensorKeyDictionary()  # integers as floats: how they were interpolated
        self.sides = WeakTensorKeyDictionary()  # differences of two columns of four
        self.ascending = WeakTensorKeyDictionary()  # orders of a part of the batch, and what is in them
        # Rows that were read by indices, and added to: of which memory, the indices, whether they were added to.
        self.read = WeakTensorKeyDictionary()
        self.computed = WeakTensorKeyDictionary()  # what else was computed of such rows: of which memory
        self.random = WeakTensorKeyDictionary()  # numbers that were drawn as indices
        self.identical = 0  # results of passes that are equal, of which a deviation or a stack is taken
        self.means_of_masked: list[list[str]] = []
        self.temperatures, self.addends, self.results = Temperatures(), AddendFinder(), Results()
        self.copies, self.noises, self.comparisons = Copies(), Noises(), Comparisons(self.batch)
        size = len(self.batch[0]) if self.batch and self.batch[0].ndim else 0
        self.lengths, self.attention, self.indices = Lengths(size), Attention(size), Indices()
        self.same = WeakTensorKeyDictionary()  # stacks of one and the same weights: how many
        self.error: Exception | None = None  # of following values, which ends it
        self.differentiates = False
        self.differentiated = set[int]()  # inputs of autograd.grad, whose results have no gradient

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = tensors_of([args, kwargs])
        result = function(*args, **kwargs)
        if self.error is None:
            LossCalls.is_paused = True
            try:
                self._follow(function, name, args, kwargs, given, result)
            except Exception as error:  # which is not the user's, in whose step this is
                self.error = error
            finally:
                LossCalls.is_paused = False
        return result

    def _follow(self, function: Any, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        """Note what a function has made of its arguments."""
        found = tensors_of(result) if isinstance(result, Tensor) or name == "grad" else []
        reads_gradient = getattr(function, "__self__", None) is Tensor.grad and not isinstance(args[0], nn.Parameter)
        is_own = name == "backward" and getattr(self.module, "automatic_optimization", False)  # not of the loss
        self.differentiates |= name == "grad" or reads_gradient or is_own
        if name == "grad" and not kwargs.get("create_graph"):
            self.differentiated |= {id(t) for t in tensors_of(args[1] if len(args) > 1 else kwargs.get("inputs"))}
        if name in ADDITIONS and len(given) == 2:
            self._mix(given)
        self.copies.follow(name, args, given, result)
        self._follow_stacks(name, args, kwargs, given, result)
        self.results.follow(name, args, kwargs, given, result)
        self.addends.follow(function, name, args, given, tensors_of(result))
        self._follow_noise(name, given, found)
        self._follow_derivative(name, given, found)
        if name in ("long", "int", "to", "type", "short") and found and found[0].dtype in INTEGERS:
            self._truncate(given[0])
        if name in FLOATS and args and found and found[0].dtype in (torch.float32, torch.float16, torch.bfloat16):
            self._round(args[0], found[0])
        if name in ARITHMETIC and found and found[0].dtype in NARROW:
            self._wrap(function, args, kwargs, found[0])
        if name in LOSSES and len(given) > 1:
            self._targets(name, given[1])
        self.comparisons.follow(name, args, kwargs, given, result)
        self._follow_order(name, args, kwargs, found)
        self._follow_edges(name, args, kwargs, found)
        self._follow_rows(name, args, given, found)
        self._compare_passes(name, args, kwargs, result)
        self._follow_mean(name, given, found)
        self._follow_boxes(name, args, given, found)
        self._follow_tokens(name, args, kwargs, given, found)
        self._follow_resize(name, args, kwargs, given, found)
        self.temperatures.follow(name, args, kwargs, result)
        self.noises.follow(name, args, given, result)
        self.lengths.follow(name, args, kwargs, result)
        self.attention.follow(name, args, kwargs, result)
        self.indices.follow(name, args, result)
        if name in ("sin", "cos") and given:
            self._angle(name, given[0])
        if isinstance(result, Tensor) or name in EXTREMES:
            self._weights(name, args, kwargs, result)

    def _round(self, before: Any, after: Tensor) -> None:
        """Large values in a row whose steps are lost in fewer digits, as those of times in milliseconds."""
        if not isinstance(before, Tensor | np.ndarray) or before.ndim != 1 or not FEWEST_STEPS <= len(before) <= MANY:
            return
        if any(t.ndim and len(t) == len(before) for t in self.batch):
            return  # one value of each sample
        exact = torch.as_tensor(before).double()
        steps, error = exact.diff().abs(), (exact - after.detach().double()).abs().max()
        low, is_finite = float(exact.abs().min()), bool(exact.isfinite().all())
        if not is_finite or low < LARGE or float(exact.max() - exact.min()) > RANGE * low:
            return
        if float(steps.median()) > 0 and float(error) > LOST * float(steps.median()):
            self._say(
                "digits-lost",
                f"{after.dtype} rounds values of about {float(exact.abs().max()):.6g} by up to {float(error):.3g}, "
                f"whose steps are {float(steps.median()):.3g}; take differences, or subtract the first value, before "
                "they are converted",
            )

    def _say(self, check: str, text: str) -> None:
        self.remarks.append(Remark(check, text))

    def _follow_derivative(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        if not torch.is_grad_enabled() or name in DETACHES | FILLED or (name.startswith("new_") and len(given) == 1):
            return
        is_cut = any(t in self.cut for t in given)
        others = [t for t in given if t.requires_grad and not t.is_leaf and id(t) not in self.differentiated]
        if name in ADDITIONS and others and is_cut:
            self._say(
                "constant-term",
                f"a derivative of {tuple(given[0].shape)}, which autograd.grad has returned, is added to an output, "
                "and has no gradient, so weights do not learn by it; pass create_graph=True",
            )
        is_sum = name in ADDITIONS or name == "stack"
        are_terms = all(t.ndim == 0 for t in given) and any(t.requires_grad and not t.is_leaf for t in given)
        if is_sum and is_cut and are_terms:  # not of a parameter, of which a step of its own takes a gradient
            self._say(
                "constant-term",
                "a term that is added to the loss has no gradient, as what autograd.grad has returned has none, so it "
                "changes nothing; pass create_graph=True",
            )
        if is_cut or (name == "grad" and any(each.requires_grad for each in given)):
            self.cut.update(dict.fromkeys([t for t in found if not t.requires_grad]))

    def _follow_stacks(self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        """Follow a stack of one and the same weights to its mean over them."""
        if not isinstance(result, Tensor) or not given:
            return
        if name == "stack" and len(given) > 1 and not kwargs.get("dim") and len(args) < 2:
            one = given[0]
            if self._is_weight(one) and all(is_same_memory(t, one) for t in given[1:]):
                self.same[result] = len(given)
        elif name == "mean" and given[0] in self.same:
            dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
            if dim == 0:
                count = self.same[given[0]]
                self._say(
                    "same-layer",
                    f"the mean of weights of {tuple(result.shape)} is over {count} times one and the same, as "
                    f"[network] * {count} does not copy a network; use copy.deepcopy(network) for each",
                )

    def _is_weight(self, t: Tensor) -> bool:
        if t.numel() < 2 or t.grad_fn is not None:
            return False
        weights = self.module.parameters() if self.module is not None else ()
        return any(is_same_memory(t, p) for p in weights)

    def _follow_noise(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for t in given:
            if t in self.noise and name not in LOSSES and name not in READS:
                self.noise[t] += 1
            if t in self.drawn:
                state = self.drawn[t]
                state[0] |= name in LAYERS
                state[1] |= name not in LAYERS and any(other.requires_grad for other in given if other is not t)
        if name in ("sub", "__sub__", "__rsub__") and len(given) == 2:
            one, other = given
            if any(is_part(one, each) for each in self.batch):
                for state in self.sampled_from.get(other.data_ptr(), ()):  # as of log_prob() of what is in the batch
                    state[1] = True
            parts = [t for t in given if t.is_floating_point() and any(is_part(t, each) for each in self.batch)]
            if parts and any(not t.is_floating_point() for t in given):  # what integers lose is computed
                whole = parts[0].detach().trunc()
                self.truncated = [t for t in self.truncated if not torch.equal(t.flatten(), whole.flatten())]
        if name in NOISES:
            is_drawn = name == "normal" and not torch.is_grad_enabled() and any(t.requires_grad for t in given)
            for t in found:
                self.noise[t] = 0
                if is_drawn:
                    self.drawn[t] = state = [False, False]
                    self.samples.append(state)
                    self.sampled_from.setdefault(given[0].data_ptr(), []).append(state)

    def _follow_order(self, name: str, args: Any, kwargs: Any, found: Sequence[Tensor]) -> None:
        """Follow an ascending order of the samples to a cumulative sum of exponentials, as of risk sets."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return
        if name == "argsort":
            is_descending = kwargs.get("descending", any(arg is True for arg in args[1:]))
            is_ascending = not is_descending and any(first is each for each in self.batch)
        elif name in ("sub", "__sub__") and len(args) > 1 and isinstance(args[1], Tensor) and args[1] in self.sums:
            self.sums[args[1]].clear()  # what is left of a total is of later times
            return
        elif name in ("logcumsumexp", "cumsum") and first in self.ascending and first.requires_grad:
            has_events = any(len(t) == len(first) and bool(((t == 0) | (t == 1)).all()) for t in self.batch if t.ndim)
            if has_events and (name == "logcumsumexp" or self.ascending[first] == "exp"):
                self.earlier.append([])
                self.sums[found[0]] = self.earlier[-1]
                self.earlier[-1].append(
                    f"{name} is over samples in ascending order of a part of the batch, so each sum has the samples of "
                    "earlier times; the risk set of an event has later ones: sort with descending=True"
                )
            return
        else:
            is_ascending = first in self.ascending and name == "exp"
            is_ascending |= name == "__getitem__" and isinstance(args[1], Tensor) and args[1] in self.ascending
        for t in found if is_ascending else ():
            self.ascending[t] = name

    def _follow_edges(self, name: str, args: Any, kwargs: Any, found: Sequence[Tensor]) -> None:
        """Follow rows that are gathered, as of the source of each edge, to a sum by the same indices."""
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if not tensors:
            return
        first, others = tensors[0], tensors[1:]
        integers = (t for t in others if t.dtype in INTEGERS)
        index = next((t if t.ndim == 1 else t[:, 0] for t in integers if t.ndim == 1 or is_expanded(t)), None)
        if name in ("__getitem__", "index_select") and index is not None and first.requires_grad:
            self.gathered.update({t: index for t in found if t.ndim == 2})
        elif name in ("linear", "relu", "dropout") and first in self.gathered:
            self.gathered.update(dict.fromkeys(found, self.gathered[first]))
        elif name in SCATTERS and index is not None:
            source = next((t for t in others if t in self.gathered), None)
            if (
                source is not None
                and torch.equal(self.gathered[source], index)
                and len(torch.unique(index)) < len(index)
            ):
                self._say(
                    "own-messages",
                    f"{name} adds the rows of {tuple(source.shape)} by the indices by which they were gathered, so "
                    "each node gets its own values, and nothing of its neighbours; add those of sources at the targets",
                )

    def _follow_rows(self, name: str, args: Any, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Follow rows that are read by indices, and added to, to where they are written by the same indices."""
        if name in DRAWS or (name in INDEX_VIEWS and any(t in self.random for t in given)):
            self.random.update(dict.fromkeys(found, True))
        if name in READS_ROWS and found and isinstance(args[0], Tensor):
            index = places_of(args[-1]) if len(args) > 1 else None
            if index is not None and not any(t in self.random for t in given):
                self.read[found[0]] = args[0].untyped_storage().data_ptr(), index, False
            return
        if name in WRITES_ROWS and len(args) > 2:
            at, value = (args[2], args[3]) if "copy" in name and len(args) > 3 else args[1:3]
            if isinstance(value, Tensor) and value in self.read:
                self._write_rows(args[0], at, value)
            return
        rows = [t for t in given if t in self.read]
        if not rows and not any(t in self.computed for t in given):
            return
        sources: dict[int, set[int]] = {id(t): self._sources(t) for t in given}
        is_first = bool(rows) and rows[0] is args[0] and name in ADDITIONS and "rsub" not in name
        is_sum = is_first or (bool(rows) and name in ("add", "__add__", "__radd__"))
        others = [t for t in given if not rows or t is not rows[0]]
        memory = self.read[rows[0]][0] if rows else 0
        if is_sum and others and not any(memory in sources[id(t)] or t in self.noise for t in others):
            self.read.update(dict.fromkeys(found, (memory, self.read[rows[0]][1], True)))
            return
        for t in found:
            if t in self.read:
                del self.read[t]
            self.computed[t] = set[int]().union(*sources.values())

    def _sources(self, t: Tensor) -> set[int]:
        """Memory of which rows were read that a tensor was computed of."""
        found = set[int]()
        if t in self.computed:
            found |= self.computed[t]
        if t in self.read:
            found.add(self.read[t][0])
        return found

    def _write_rows(self, whole: Tensor, at: Any, value: Tensor) -> None:
        """Say it if several of the rows that are written have the same place, and differ."""
        memory, index, is_sum = self.read[value]
        places = places_of(at)
        if not is_sum or places is None or not torch.equal(places, index):
            return
        if memory != whole.untyped_storage().data_ptr():
            return
        kinds, inverse, counts = torch.unique(places, dim=0, return_inverse=True, return_counts=True)
        before = next((i for i, part in enumerate(at) if isinstance(part, Tensor)), 0) if isinstance(at, tuple) else 0
        rows = value.detach().movedim(before, 0) if value.ndim > before else value.detach()
        if rows.numel() % len(places) or not len(kinds) < len(places):
            return
        rows = rows.reshape(len(places), -1)
        last = torch.zeros(len(kinds), dtype=torch.long, device=places.device).scatter_(
            0, inverse, torch.arange(len(places), device=places.device)
        )
        lost = (rows != rows[last[inverse]]).any(1)
        # All that repeat at one place may be padding.
        if len(torch.unique(inverse[lost])) >= 2 and float(lost.float().mean()) > FEW_PADDED:
            self._say(
                "repeated-index",
                f"{int(lost.sum())} of {len(places)} rows that are added to {tuple(whole.shape)} at indices are lost, "
                f"as others have the same index, and only one for each is kept (up to {int(counts.max())} have one); "
                "use index_add_(0, index, values), or index_put_ with accumulate=True",
            )

    def _compare_passes(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Count results of validation that are stacked, or of which a deviation is taken, and that are all the same."""
        first = args[0] if args else None
        if torch.is_grad_enabled():
            return
        if name == "stack" and isinstance(first, list | tuple) and len({id(t) for t in first}) > self.identical:
            parts = [t for t in first if isinstance(t, Tensor)]
            shapes = {(t.shape, t.dtype) for t in parts}
            if len(shapes) == 1 and is_varied(parts[0]) and all(torch.equal(t, parts[0]) for t in parts):
                self.identical = len(parts)
        elif name in DEVIATIONS and isinstance(first, Tensor) and first.is_floating_point():
            dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
            dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
            if type(dim) is not int or not first.numel() or first.shape[dim] <= self.identical:
                return
            slices = first.detach().movedim(dim, 0)
            is_zero = float(tensors_of(result)[0].detach().abs().max()) <= 1e-6 * float(first.detach().abs().max())
            if is_zero and is_varied(slices[0]):
                self.identical = len(slices)

    def _follow_mean(self, name: str, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Follow the mean loss of a batch to exp(-loss), which is a probability of one sample only."""
        if not given or not found:
            return
        is_mean = found[0].requires_grad and found[0].ndim == 0 < given[0].ndim and given[0].numel() > 1
        if name in MEAN_LOSSES and is_mean and len(given[0]) > 1:
            self.means[found[0]], self.shapes[found[0]] = "mean", given[0].shape
        elif name in REGRESSIONS and is_mean and len(given[0]) > 1:
            self.means[found[0]], self.shapes[found[0]] = "error", given[0].shape
        elif name == "mean" and is_mean and given[0] in self.errors and self.errors[given[0]] == "distance":
            self.shapes[found[0]] = given[0].shape
        elif name in ("sub", "__sub__", "rsub", "__rsub__") and len(given) == 2 and given[0].shape == given[1].shape:
            self.errors[found[0]] = "difference"
        elif name in DISTANCES and given[0] in self.errors and found[0].requires_grad:
            self.errors[found[0]] = "distance"
        elif name in PRODUCTS and len(given) == 2 and any(t in self.shapes and t.ndim == 0 for t in given):
            mean, weights = given if given[0] in self.shapes and given[0].ndim == 0 else given[::-1]
            self._weigh_mean(mean, weights)
        elif name == "where" and len(given) > 1 and any(t in self.shapes and t.ndim == 0 for t in given[1:]):
            self._weigh_mean(next(t for t in given[1:] if t in self.shapes and t.ndim == 0), given[0])
        elif name in ("neg", "__neg__") and given[0] in self.means and self.means[given[0]] == "mean":
            self.means.update(dict.fromkeys(found, "negative"))
        elif name == "exp" and given[0] in self.means and self.means[given[0]] == "negative":
            self.means.update(dict.fromkeys(found, "probability"))
        elif name in ARITHMETIC and any(t in self.means and self.means[t] == "probability" for t in given):
            self._say(  # it is used, not only logged
                "mean-probability",
                "exp(-loss) is computed of the mean loss of a batch, so it is no probability of a sample, and weights "
                "all of them alike; use reduction='none', and mean() at the end",
            )

    def _weigh_mean(self, mean: Tensor, weights: Tensor) -> None:
        """Say it if the mean loss of a batch is multiplied by a value of each sample, or by a mask of its places."""
        shape = self.shapes[mean]
        if weights.requires_grad or not weights.ndim or len(weights) < 2 or not bool((weights != weights[:1]).any()):
            return
        is_each = mean in self.means and weights.ndim == 1 and weights.is_floating_point()
        if is_each and any(len(t) == len(weights) for t in self.batch if t.ndim):
            self._say(
                "weights-of-mean",
                f"the mean loss of the batch is multiplied by {len(weights)} weights of samples, so that each "
                "weighs all of them alike; use reduction='none' in the loss, and mean() after the weights",
            )
            return
        # Of classes, the mask has a dimension less.
        fits = weights.shape in (shape, shape[:1] + shape[2:], shape[:-1])
        if fits and is_mask(weights) and any(len(t) == len(weights) for t in self.batch if t.ndim):
            self._say(
                "weights-of-mean",
                f"the mean of {tuple(shape)} errors is multiplied by a mask of {tuple(weights.shape)}, which leaves "
                "out none of them, as the mean has all; use reduction='none', and divide the masked sum by mask.sum()",
            )

    def _follow_tokens(
        self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], found: Sequence[Tensor]
    ) -> None:
        """Follow the losses of tokens, times a mask of padding, to a mean over all places."""
        if not given or not found:
            return
        if name in TOKENS and found[0].ndim and found[0].requires_grad:
            self.each[found[0]] = None
        elif name in VIEWS and given[0] in self.each:
            self.each.update(dict.fromkeys(found, self.each[given[0]]))
        elif name in PRODUCTS and len(given) == 2 and any(t in self.each and self.each[t] is None for t in given):
            mask = next((t for t in given if t not in self.each), None)
            if mask is not None and is_mask(mask) and is_prefix(mask, self.batch):
                self.each[found[0]] = float((mask == 0).float().mean())
        elif name == "mean" and len(args) == 1 and not kwargs and given[0] in self.each and self.each[given[0]]:
            share = self.each[given[0]]
            if share > FEW_PADDED:
                text = (
                    f"the mean of the masked loss counts padding, {share:.0%} of all places, as 0, so it is too small, "
                    "and tokens of batches with more padding weigh less; divide the sum by mask.sum()"
                )
                self.padded[found[0]] = [text]
                self.means_of_masked.append(self.padded[found[0]])
        elif name in PRODUCTS | DIVISIONS and any(t in self.padded for t in given):
            of = next(t for t in given if t in self.padded)
            if name in DIVISIONS or len(given) > 1 or not isinstance(args[-1], float):
                self.padded[of].clear()  # it is divided by the mean of the mask
            else:
                self.padded[found[0]] = self.padded[of]

    def _follow_resize(
        self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], found: Sequence[Tensor]
    ) -> None:
        """Follow numbers of classes through an interpolation, and back to integers."""
        if not given or not found:
            return
        if given[0].dtype in WIDE_INTEGERS and found[0].is_floating_point() and name in CONVERSIONS:
            self.whole[found[0]] = ""
        elif given[0] in self.whole and name == "interpolate":
            mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
            self.whole[found[0]] = "" if str(mode).startswith("nearest") else str(mode)
        elif given[0] in self.whole and found[0].dtype in WIDE_INTEGERS and self.whole[given[0]]:
            if len({*found[0].flatten().tolist()}) < 3:
                return  # between two classes there is no third one
            self._say(
                "mask-resized",
                f"integers, as of classes, are resized by {self.whole[given[0]]} interpolation, which gives a border "
                "between two classes the number of a third one; use mode='nearest' for masks",
            )
        elif given[0] in self.whole and name in VIEWS:
            self.whole.update(dict.fromkeys(found, self.whole[given[0]]))

    def _follow_boxes(self, name: str, args: Any, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Follow differences of columns 2 and 0, or 3 and 1, of the batch to what clamps them at 0."""
        if name in ("sub", "__sub__") and len(given) == 2 and found:
            one, other = given
            of_batch = any(t.shape[-1:] == (4,) and is_part(one, t) and is_part(other, t) for t in self.batch)
            if of_batch and one.shape == other.shape and one.storage_offset() - other.storage_offset() == 2:
                self.sides[found[0]] = float((found[0] < 0).float().mean())
        elif (
            name in ("clamp", "clamp_", "clamp_min", "relu", "prod")
            and given
            and not any(isinstance(bound, int | float) and bound < 0 for bound in args[1:2])
            and given[0] in self.sides
            and self.sides[given[0]] > FRACTIONS
        ):
            self._say(
                "box-format",
                f"{self.sides[given[0]]:.0%} of the boxes of the batch end before they begin: the last two of four "
                "columns are less than the first two; convert centers and sizes to corners first",
            )

    def _angle(self, name: str, t: Tensor) -> None:
        """Degrees that come from the batch as they are."""
        if (
            any(is_part(t, each) for each in self.batch)
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
        if name == "einsum" and isinstance(first, str):
            self._contract(first, args[1:])
        if not isinstance(first, Tensor):
            return
        if name == "softmax" and first.ndim >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self.weights[result] = dim if dim is None or dim < 0 else dim - first.ndim
        elif name == "dropout" and first in self.weights:
            self.weights[result] = self.weights[first]
        elif name in ("matmul", "__matmul__", "bmm") and first in self.weights and self.weights[first] == -2:
            self._weigh(first, -2, -1)
        elif name in ("matmul", "__matmul__") and first in self.weights and first.ndim == 4:
            if self.weights[first] == -3 and first.shape[-1] == first.shape[-2]:  # over the heads
                self.over_heads[result] = first
        elif name in ("transpose", "permute", "swapaxes") and first in self.over_heads:
            self._weigh(self.over_heads[first], -3, -1)  # heads are joined, and no kinds of messages are summed
        elif name in ("mul", "__mul__", "__rmul__"):
            self._follow_level(args, result)
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

    def _contract(self, equation: str, operands: Sequence[Any]) -> None:
        """Find the dimension of a softmax's result over which an einsum sums."""
        given, arrow, kept = equation.replace(" ", "").partition("->")
        for t, letters in zip(operands, given.split(","), strict=False):
            over = self.weights[t] if isinstance(t, Tensor) and arrow and t in self.weights else None
            if over is None or "." in letters or len(letters) != t.ndim or letters[over] not in kept:
                continue
            for place, letter in enumerate(letters, -t.ndim):
                if (
                    letter not in kept and t.shape[place] == t.shape[over]
                ):  # others assign what they sum, as to clusters
                    self._weigh(t, over, place)

    def _weigh(self, weights: Tensor, over: int, summed: int) -> None:
        """Say it if weights do not add up to 1 over the dimension over which what they weight is summed."""
        sums = weights.detach().sum(summed)
        if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            self._say(
                "weights-of-queries",
                f"softmax over dimension {over} of {tuple(weights.shape)} gives the weights of a sum over its "
                f"dimension {summed}, in which they do not add up to 1; use softmax({summed})",
            )

    def _follow_level(self, factors: Sequence[Any], result: Tensor) -> None:
        """Follow how much of each sample, and how much noise, is mixed."""
        for t, level in (factors[:2], factors[1::-1]) if len(factors) > 1 else ():
            is_level = isinstance(level, Tensor) and not level.requires_grad and [level.numel()] == [*result.shape[:1]]
            if is_level and isinstance(t, Tensor) and t.numel() > level.numel() >= LEVELS:
                self.levels[result] = t in self.noise, level.flatten()

    def _mix(self, parts: Sequence[Tensor]) -> None:
        """Say it if noise is never half of the variance of a sample, though its level is drawn for each."""
        found = dict(self.levels[t] for t in parts if t in self.levels)
        if len(found) == 2 and torch.allclose(found[0] + found[1], torch.ones_like(found[0]), atol=1e-4):
            self._mix_linearly(found[0])
        if len(found) == 2 and torch.allclose(found[0] ** 2 + found[1] ** 2, torch.ones_like(found[0]), atol=1e-3):
            least, most = (float(level**2) for level in found[1].aminmax())
            if most < MOST_NOISE and least < 0.5 * most:
                self._say(
                    "little-noise",
                    f"noise is {least:.1%} to {most:.1%} of the variance of {len(found[1])} noised samples, so the "
                    "last step of the diffusion is not noise alone, from which samples are drawn; use the cumulative "
                    "product of the alphas, or more noise",
                )

    def _mix_linearly(self, level: Tensor) -> None:
        """Say it if levels of samples, which add up to 1 with those of noise, are cumulative products of the module."""
        held = [
            t for part in (self.module.modules() if self.module else ()) for t in tensors_of([*vars(part).values()])
        ]
        lines = [t.double() for t in held if t.ndim == 1 and t.is_floating_point() and len(t) >= FEWEST_LEVELS]
        for t in lines:
            ratios = t[1:] / t[:-1]
            factors = [o for o in lines if len(o) == len(t) and o is not t]
            is_product = any(torch.allclose(each[1:], ratios, atol=1e-6) for o in factors for each in (o, 1 - o))
            distances = (level.double()[:, None] - t).abs().amin(1)
            if is_product and bool((t > 0).all() & (t < 1).all()) and float(distances.max()) < 1e-6:
                self._say(
                    "noise-levels",
                    f"samples are multiplied by a cumulative product of {len(t)} steps, and noise by 1 less it, so the "
                    "variance is not kept, which these steps take for granted; multiply by the square roots of both",
                )

    def _truncate(self, t: Tensor) -> None:
        is_of_batch = t.is_floating_point() and any(t.data_ptr() == each.data_ptr() for each in self.batch)
        if is_of_batch and t.numel() and float((t != t.trunc()).float().mean()) > FRACTIONS:
            self.truncated.append(t.detach().trunc())

    def _wrap(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        if function.__name__ in ("add_", "__iadd__"):
            return  # what it was is gone
        wide = [a.int() if isinstance(a, Tensor) else a for a in args]
        exact = function(*wide, **kwargs)
        if isinstance(exact, Tensor) and exact.shape == result.shape and bool((exact != result).any()):
            share = float((exact != result).float().mean())
            kind = str(result.dtype).removeprefix("torch.")
            self._say("bytes-wrap", wrap_line(function.__name__.strip("_"), kind, tuple(result.shape), share))

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
        for text in (text for each in self.earlier for text in each):
            self._say("risk-sets", text)
        for text in (text for each in self.means_of_masked for text in each):
            self._say("padding-in-mean", text)
        for name, text in self.comparisons.said():
            self._say(name, text)
        if text := self.copies.unread():
            self._say("no-effect", text)
        for name, owner in (
            ("noise-distribution", self.noises),
            ("normalized-over-batch", self.lengths),
            ("attention-scale", self.attention),
            ("colliding-index", self.indices),
        ):
            for text in owner.found[:1]:
                self._say(name, text)


@check("constant-term", "likely", at="probe")
def constant_term(seen: Evidence) -> Lines:
    """A derivative that autograd.grad has returned without its graph is added to the loss, or to an output."""
    yield from remarks(seen, "constant-term")


def wrap_line(name: str, kind: str, shape: tuple[int, ...], share: float) -> str:
    """The line on integers that are too large or small for their type."""
    return (
        f"{share:.0%} of the results of {name} on {kind}, of {shape}, do not fit into it, and wrap around; convert to "
        "floating point first"
    )


@check("no-effect", "likely", at="probe")
def copy_is_changed(seen: Evidence) -> Lines:
    """A statement changes in place what an index tensor or a mask has copied, and no operation reads it afterwards."""
    yield from remarks(seen, "no-effect")


@check("same-layer", "likely", at="probe")
def mean_of_one_network(seen: Evidence) -> Lines:
    """A training step averages weights of several networks, which are one and the same."""
    yield from remarks(seen, "same-layer")


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same values in the same memory."""
    try:
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    except (RuntimeError, NotImplementedError):  # of torch.func, or sparse
        return False


def is_varied(t: Tensor) -> bool:
    """Whether floating-point values differ."""
    return t.is_floating_point() and t.numel() > 0 and bool((t != t.flatten()[0]).any())


def places_of(index: Any) -> Tensor | None:
    """The places (K, D) that indices of one dimension name; None if they are others, such as masks or slices."""
    parts = [*index] if isinstance(index, tuple) else [index]
    tensors = [torch.as_tensor(p) if isinstance(p, list | np.ndarray) and len(p) else p for p in parts]
    chosen = [t for t in tensors if isinstance(t, Tensor)]
    if not chosen or any(t.dtype not in INTEGERS[:-1] or t.ndim != 1 or len(t) != len(chosen[0]) for t in chosen):
        return None
    return torch.stack([t.long() for t in chosen], 1) if len(chosen[0]) else None


@check("repeated-index", "likely", at="probe")
def repeated_index(seen: Evidence) -> Lines:
    """Rows are read by indices, of which some repeat, added to and written again, so only one for each is kept."""
    yield from remarks(seen, "repeated-index")


@check("own-messages", "likely", at="probe")
def own_messages(seen: Evidence) -> Lines:
    """Rows that are gathered by indices, or a layer of them, are added up by the same indices, of which some repeat."""
    yield from remarks(seen, "own-messages")


@check("mean-probability", "likely", at="probe")
def mean_probability(seen: Evidence) -> Lines:
    """The exponential of a negative cross-entropy, which is the mean of a batch, is part of the loss."""
    yield from remarks(seen, "mean-probability")


@check("weights-of-mean", "likely", at="probe")
def weights_of_mean(seen: Evidence) -> Lines:
    """The mean loss of a batch is multiplied by values that differ from sample to sample, or by a mask of places."""
    yield from remarks(seen, "weights-of-mean")


@check("mask-resized", "likely", at="probe")
def mask_resized(seen: Evidence) -> Lines:
    """Integers are interpolated between neighbours, and become integers again."""
    yield from remarks(seen, "mask-resized")


@check("box-format", "likely", at="probe")
def box_format(seen: Evidence) -> Lines:
    """Of boxes of the batch, columns 2 less 0, or 3 less 1, are clamped or multiplied, and over 20% are negative."""
    yield from remarks(seen, "box-format")


def is_expanded(t: Tensor) -> bool:
    """Whether a matrix has one value for each row, as the index of scatter_add has."""
    return t.ndim == 2 and t.shape[1] > 0 and bool((t == t[:, :1]).all())


def is_mask(t: Any) -> bool:
    """Whether a tensor has no gradient, and zeros, and ones, and nothing else."""
    if not isinstance(t, Tensor) or t.requires_grad or t.ndim == 0:
        return False
    return bool(((t == 0) | (t == 1)).all() and t.any() and (t == 0).any())


def is_prefix(mask: Tensor, batch: Sequence[Tensor]) -> bool:
    """Whether a mask (N, T), or its rows in a row, is 1 up to the end of each sample of a batch, and 0 behind it."""
    count = next((len(t) for t in batch if t.ndim > 1), 0)
    if count < 2 or mask.numel() % count or mask.numel() // count < 2 or mask.ndim > 2:
        return False
    rows = mask.reshape(count, -1) != 0
    return bool(rows[:, 0].all()) and torch.equal(rows, rows.long().cummin(1).values.bool())


@check("digits-lost", "likely", at="probe")
def digits_lost(seen: Evidence) -> Lines:
    """Large values in a row, as times since 1970, are converted to so few digits that steps between them are lost."""
    yield from remarks(seen, "digits-lost")


@check("padding-in-mean", "likely", at="probe")
def padding_in_mean(seen: Evidence) -> Lines:
    """Losses of tokens, times a mask that is 0 behind the end of each sample, are averaged over all places."""
    yield from remarks(seen, "padding-in-mean")


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
    """A matrix product, or einsum, sums over another dimension of a softmax than over which its weights add up to 1."""
    yield from remarks(seen, "weights-of-queries")


@check("little-noise", "likely", at="probe")
def little_noise(seen: Evidence) -> Lines:
    """Of 16 samples and more that are mixed with noise at levels of their own, none is half noise."""
    yield from remarks(seen, "little-noise")


@check("noise-levels", "likely", at="probe")
def noise_levels(seen: Evidence) -> Lines:
    """Samples, times a cumulative product of the module, are mixed with noise times 1 less it, without roots."""
    yield from remarks(seen, "noise-levels")


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
    """Sums, differences or products of integers of 8 or 16 bits wrap around."""
    yield from remarks(seen, "bytes-wrap")
