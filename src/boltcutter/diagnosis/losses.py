"""Checks of the graph behind the loss: pairs of an output and a loss function that do not fit, and where it ends."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.data import loader_of
from boltcutter.diagnosis.evidence import WITH_WEIGHTS, Evidence, tensors_of
from boltcutter.diagnosis.graph import (
    COMPUTES,
    REGRESSIONS,
    Graph,
    Loss,
    attributes,
    extremes,
    find_holder,
    leaves_behind,
    name_of,
    operation_behind,
    saved,
)
from boltcutter.diagnosis.layers import NORMS, fan_of, is_initial
from boltcutter.diagnosis.source import codes_of_users, depends_on_time, says
from boltcutter.structure import inputs_of

# What an operation can return.
MANY_LOSSES = 4  # of a step
RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
    "Softmax": (0.0, 1.0),
}
FLAT = frozenset(("round", "sign", "floor", "ceil", "trunc", "heaviside"))  # operations whose derivative is 0
MANY = 1_000_000  # values that are summed
FEWEST = 8  # values of a softmax
ACCUMULATED = re.compile("accum|(^|_)grad(ient)?_steps|micro|virtual", re.IGNORECASE)
NONE = 0  # reduction="none", as the graph keeps it
TIES = ("margin_ranking_loss", "soft_margin_loss")  # a target of 0 has no gradient
LATE = 100  # steps, after which a reconstruction is rated
WIDE = 16  # samples of a batch, and values of a sample
EXPLAINED = 0.02  # share of the variance
SURPRISING = 8.0  # nats above those of equal probabilities: logits with a deviation above 4
TIED = 25.0  # the same, of an output that is tied to an embedding


def losses(seen: Evidence, *kinds: str) -> list[Loss]:
    """The calls of some loss functions in this step; of a probe, in the steps of training and validation."""
    found = seen.graph.losses if seen.graph else seen.calls
    return [loss for loss in found if loss.kind in kinds]


@check("double-softmax", "certain", at="graph")
def double_softmax(seen: Evidence) -> Lines:
    """The logits of cross-entropy, or of a logarithm of probabilities, are the output of a softmax."""
    if any(loss.before == "Softmax" for loss in losses(seen, "nll_loss")):
        yield "cross-entropy gets probabilities, where it expects logits, so that learning is slow; remove the softmax"
    elif any(name_of(operation_behind(node)) == "Softmax" for node in (seen.graph.logarithms if seen.graph else ())):
        yield Line(
            "log_softmax, logsumexp or Categorical(logits=…) gets probabilities, where it expects logits, so that "
            "learning is slow; remove the softmax, or pass probs=",
            "likely",
        )


@check("ctc-blank", "certain", at="graph")
def ctc_blank(seen: Evidence) -> Lines:
    """Targets of CTC have the index of the blank among them."""
    for loss in losses(seen, "ctc_loss"):
        node = loss.node
        targets, blank, lengths = (saved(node, name) for name in ("targets", "blank", "target_lengths"))
        if not isinstance(targets, Tensor) or blank is None or lengths is None:
            continue
        if targets.ndim == 2:  # rows that are padded, often by the blank
            counts = torch.as_tensor(lengths, device=targets.device)
            targets = targets[torch.arange(targets.shape[1], device=targets.device) < counts[:, None]]
        if share := float((targets == blank).float().mean()):
            yield (
                f"{share:.0%} of the labels of ctc_loss are {blank}, its blank, which is never predicted as a label; "
                "shift the labels by one, or pass another blank"
            )


@check("padding-in-loss", "likely", at="graph")
def padding_in_loss(seen: Evidence) -> Lines:
    """Over 5% of the targets of cross-entropy, and more than one a sample, are the padding_idx of an embedding."""
    found = [loss for loss in losses(seen, "nll_loss") if loss.options.get("reduction")]
    pads = (
        {(len(m.weight), m.padding_idx) for m in seen.module.modules() if isinstance(m, nn.Embedding)}
        if found
        else set()
    )
    for loss in found:
        for count, pad in pads:
            t = loss.target
            if pad is None or count != loss.num_classes or loss.options["ignore_index"] == pad or t is None:
                continue
            padded = int((t == pad).sum())
            if padded > max(0.05 * t.numel(), seen.batch_size):  # one for each sequence may be its end
                yield (
                    f"{padded / t.numel():.0%} of the targets of cross-entropy are {pad}, the padding (padding_idx), "
                    f"which it learns to predict; pass ignore_index={pad}"
                )


@check("squashed-logits", "likely", at="graph")
def squashed_logits(seen: Evidence) -> Lines:
    """The logits of cross-entropy are the output of a sigmoid or tanh."""
    for loss in losses(seen, "nll_loss"):
        if loss.before in ("Sigmoid", "Tanh"):
            yield f"cross-entropy gets the output of {loss.before.lower()}, so no class can become certain; remove it"


@check("relu-logits", "likely", at="graph")
def relu_logits(seen: Evidence) -> Lines:
    """The logits of cross-entropy are the output of a ReLU."""
    if any(loss.before in ("Relu", "Threshold") for loss in losses(seen, "nll_loss")):
        yield "the logits come from a ReLU, so none is below 0, and those at 0 get no gradient; remove the last ReLU"


@check("one-class", "certain", at="graph")
def one_class(seen: Evidence) -> Lines:
    """Cross-entropy has a single class."""
    if any(loss.num_classes == 1 for loss in losses(seen, "nll_loss")):
        yield "cross-entropy of one class is always 0; use two outputs, or binary_cross_entropy_with_logits"


@check("not-log", "certain", at="probe")
@check("not-log", "certain", at="graph")
def not_log(seen: Evidence) -> Lines:
    """What must be log-probabilities, or the logarithm of a rate, is none."""
    for loss in losses(seen, "nll_loss", "kl_div", "ctc_loss"):
        kind, p = loss.kind, loss.prediction
        result = saved(loss.source_node, "result") if p is not None and loss.source == "LogSoftmax" else None
        if result is not None and result.shape == p.shape and kind == "nll_loss":
            classes = min(1, p.ndim - 1)
            if saved(loss.source_node, "dim") in (classes, (1 << 64) + classes - p.ndim):  # negative ones wrap
                continue  # as in cross_entropy
        low = extremes(loss.target)[0] if kind == "kl_div" else 0.0
        high = float(p.max()) if p is not None and p.numel() else math.nan
        if high > 1e-4:
            remedy = "cross_entropy, or log_softmax before it" if kind == "nll_loss" else "log_softmax before it"
            yield f"{kind} gets values up to {high:.3g}, but log-probabilities are never above 0; use {remedy}"
        elif kind == "nll_loss" and p is not None and share_unnormalized(p) > 0.5:
            classes = min(1, p.ndim - 1)
            total = p.detach().exp().sum(classes)
            if torch.allclose(total, torch.full_like(total, p.shape[classes] - 1), rtol=1e-3):
                continue  # log(1 - p), of a class that is left out
            yield Line(
                f"nll_loss gets {tuple(p.shape)}, whose exponentials do not sum to 1 over the classes, dimension "
                f"{min(1, p.ndim - 1)}; use log_softmax over this dimension before it",
                "likely",
            )
        elif kind == "kl_div" and low < -1e-4 and not loss.options["log_target"]:
            yield f"kl_div gets targets down to {low:.3g}, which are no probabilities; pass log_target=True"
        elif kind == "ctc_loss" and p is not None and bool((p.float().logsumexp(-1).abs() > 1e-2).any()):
            yield "ctc_loss gets values whose exponentials do not sum to 1; use log_softmax(-1) before it"
    for loss in losses(seen, "poisson_nll_loss"):
        if loss.options["log_input"] and RANGES.get(loss.source, (-1.0,))[0] == 0:
            yield Line(
                f"poisson_nll_loss takes the output of {loss.source.lower()} for the logarithm of a rate; pass "
                "log_input=False",
                "likely",
            )


def share_unnormalized(log_p: Tensor) -> float:
    """The share of samples of which the probabilities of all classes do not sum to 1."""
    if log_p.ndim == 0 or not log_p.numel() or log_p.numel() > MANY:
        return 0.0
    total = log_p.detach().float().logsumexp(min(1, log_p.ndim - 1))
    return float((total.abs() > 0.05).float().mean())


@check("softmax-of-batch", "likely", at="graph")
def softmax_of_samples(seen: Evidence) -> Lines:
    """A softmax of a matrix that is not square is over the samples, or one of a convolution's classes over places."""
    graph, count = seen.graph, seen.batch_size
    if graph is None or count < 8:
        return
    named = {loss.source_node for loss in graph.losses}
    for node in (*graph.softmaxes, *graph.logarithms):
        result = saved(node, "result") if node not in named else None
        if isinstance(result, Tensor) and result.ndim > 2:
            yield from _softmax_of_places(seen, node, result)
        if not isinstance(result, Tensor) or result.ndim != 2:
            continue
        if any(t.numel() == 1 for t in tensors_of(seen.batch)):
            return  # samples of one bag, which has one label
        if count == len(result) != result.shape[1] > 1 and saved(node, "dim") in (0, (1 << 64) - 2):
            yield (
                f"a softmax is over the {count} samples of the batch, dimension 0 of {tuple(result.shape)}, so each "
                "result depends on the other samples; pass dim=1"
            )
            return


def _softmax_of_places(seen: Evidence, node: Any, result: Tensor) -> Lines:
    """Whether a convolution has computed a value for each class and place, the batch has a class for each place."""
    dim, before = saved(node, "dim"), name_of(operation_behind(node))
    if not isinstance(dim, int):
        return  # of logsumexp
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    shape = (len(result), *result.shape[2:])
    labels = [t for t in tensors_of(seen.batch) if not t.is_floating_point() and t.shape == shape]
    if dim in (1, 1 - result.ndim) or not before.startswith(("Convolution", "Upsample")) or result.shape[1] < 2:
        return
    if any(int(t.max()) < result.shape[1] for t in labels if t.numel()):
        yield (
            f"a softmax is over dimension {dim % result.ndim} of {tuple(result.shape)}, which are places, not over the "
            f"{result.shape[1]} classes, so that each place depends on the others; pass dim=1"
        )


@check("softmax-of-batch", "certain", at="graph")
def softmax_of_batch(seen: Evidence) -> Lines:
    """The softmax before a loss function is over the samples, not over the classes."""
    for loss in seen.graph.losses if seen.graph else ():
        node, target = loss.source_node, loss.target
        node = operation_behind(node) if name_of(node) == "Log" else node
        if name_of(node) not in ("Softmax", "LogSoftmax") or target is None or not target.ndim:
            continue
        result = saved(node, "result")
        is_square = result is None or result.ndim < 2 or result.shape[0] == result.shape[1]  # as of pairs of samples
        if not is_square and saved(node, "dim") == 0 and len(result) == len(target):
            yield (
                f"the softmax before the loss is over the {len(target)} samples of the batch, dimension 0 of "
                f"{tuple(result.shape)}; pass dim=1"
            )


@check("softmax-of-one", "certain", at="graph")
def softmax_of_one(seen: Evidence) -> Lines:
    """The input of a loss function is a softmax over a dimension of size 1."""
    for loss in seen.graph.losses if seen.graph else ():
        if loss.source != "Softmax":
            continue
        result, dim = saved(loss.source_node, "result"), saved(loss.source_node, "dim")
        dim = dim - (1 << 64) if dim is not None and dim >= 1 << 63 else dim  # it is read as an unsigned number
        if isinstance(result, Tensor) and result.ndim and result.shape[dim] == 1 < result.numel():
            yield (
                f"a softmax over a dimension of size 1, of {tuple(result.shape)}, is always 1; use a sigmoid, or "
                "another dim"
            )


@check("softmax-of-one", "likely", at="graph")
def weights_of_one(seen: Evidence) -> Lines:
    """A softmax within the graph is over a dimension of size 1, and none is over the same one of another size."""
    sizes: dict[tuple[int, int], set[int]] = {}
    for node in seen.graph.softmaxes if seen.graph else ():
        result, dim = saved(node, "result"), saved(node, "dim")
        if isinstance(result, Tensor) and result.numel() >= FEWEST and dim is not None:
            dim = (dim - (1 << 64) if dim >= 1 << 63 else dim) % result.ndim
            sizes.setdefault((result.ndim, dim), set()).add(result.shape[dim])
    for (ndim, dim), found in sizes.items():
        is_given = any(t.ndim > dim and t.shape[dim] == 1 for t in tensors_of(seen.batch))  # as series of length 1
        if found == {1} and not is_given:
            yield (
                f"a softmax over dimension {dim} of {ndim}, which has size 1, is always 1: what it weighs counts "
                "equally, and what feeds it is not trained; take the softmax over the elements that are weighed"
            )


@check("double-sigmoid", "certain", at="graph")
def double_sigmoid(seen: Evidence) -> Lines:
    """The logits of binary cross-entropy are the output of a sigmoid."""
    if any(loss.source == "Sigmoid" for loss in losses(seen, "binary_cross_entropy_with_logits")):
        yield "binary_cross_entropy_with_logits gets the output of a sigmoid, and applies another; remove the sigmoid"


@check("softmax-of-labels", "likely", at="probe")
def softmax_of_labels(seen: Evidence) -> Lines:
    """Binary cross-entropy gets a softmax, though over 20% of the samples have several labels."""
    for loss in losses(seen, "binary_cross_entropy"):
        t = loss.target
        if loss.source == "Softmax" and t is not None and t.ndim == 2 and t.shape[1] > 1:
            several = float((t.sum(1) > 1.5).float().mean())
            if several > 0.2:
                yield (
                    f"{several:.0%} of the samples have several labels, but binary_cross_entropy gets a softmax, whose "
                    "probabilities sum to 1; use sigmoid(), or binary_cross_entropy_with_logits"
                )


@check("bce-target", "certain", at="graph")
def bce_target(seen: Evidence) -> Lines:
    """A target of binary cross-entropy is below 0 or above 1."""
    for loss in losses(seen, "binary_cross_entropy_with_logits"):
        low, high = extremes(loss.target)
        if low < -1e-3 or high > 1 + 1e-3:
            outside = (loss.target < -1e-3) | (loss.target > 1 + 1e-3)
            if loss.options["reduction"] == NONE and {0.0, 1.0} <= {*loss.target.unique()[:3].tolist()}:
                continue  # one value outside says that the label is unknown, and a mask leaves its loss out
            yield Line(
                f"targets of binary cross-entropy are {low:g} to {high:g}, so its minimum is -Inf; scale them to 0–1",
                sample=seen.sample(outside),
            )


@check("margin-target", "certain", at="probe")
@check("margin-target", "certain", at="graph")
def margin_target(seen: Evidence) -> Lines:
    """A loss function whose targets are -1 and 1 gets others."""
    for loss in losses(
        seen, "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss"
    ):
        if loss.target is None:
            continue
        has_both = all(bool((loss.target == side).any()) for side in (-1, 1))
        wrong = (loss.target.abs() != 1) & ~((loss.target == 0) & (loss.kind in TIES and has_both))
        if bool(wrong.any()):
            low, high = extremes(loss.target)
            yield Line(
                f"targets of {loss.kind} are {low:g} to {high:g}, but must be -1 or 1; use 2 * target - 1",
                sample=seen.sample(wrong),
            )


@check("target-sum", "likely", at="probe")
def target_sum(seen: Evidence) -> Lines:
    """Targets of cross-entropy that are no indices have rows of which over 20% sum to more than 1.5."""
    batches = seen.probe.batches.values() if seen.probe is not None else ()
    inputs = [x for batch in batches for x in tensors_of(inputs_of(batch))]
    for loss in losses(seen, "cross_entropy"):
        t = loss.target
        if t is not None and any(x.shape == t.shape and torch.equal(x, t) for x in inputs):
            continue  # the likelihood of how often each item is there, as of a multinomial distribution
        if t is not None and t.is_floating_point() and t.ndim > 1 and t.numel():
            share = float((t.sum(1) > 1.5).float().mean())
            if share > 0.2:
                yield (
                    f"{share:.0%} of the rows of the target of cross_entropy sum to more than 1, as of samples with "
                    "several labels; use binary_cross_entropy_with_logits"
                )


@check("ignored-class", "likely", at="graph")
def ignored_class(seen: Evidence) -> Lines:
    """The ignore_index of cross-entropy is a class that labels of samples have."""
    found = [*losses(seen, "nll_loss")]
    for loss in found if len(found) < MANY_LOSSES else ():  # as of a loop over places, of which some are padding
        index, t = loss.options["ignore_index"], loss.target
        is_class = index is not None and 0 <= index < (loss.num_classes or 0)
        # Of samples that a loader collates one by one: tokens and points have a class that stands for none.
        if is_class and t is not None and t.ndim == 1 and len(t) == getattr(loader_of(seen), "batch_size", None):
            share = float((t == index).float().mean())
            if share:
                yield Line(
                    f"{share:.0%} of the samples have class {index}, which the loss ignores (ignore_index={index}); "
                    "leave it at -100",
                    sample=seen.sample(t == index),
                )


@check("range", "certain", at="probe")
@check("range", "certain", at="graph")
def out_of_range(seen: Evidence) -> Lines:
    """Over 5% of the targets are values that the last activation cannot return."""
    for loss in losses(seen, *REGRESSIONS):
        low, high = RANGES.get(loss.source, (-math.inf, math.inf))
        if loss.target is None or not loss.target.numel():
            continue
        outside = (loss.target < low - 1e-3) | (loss.target > high + 1e-3)
        share = float(outside.float().mean())
        if share > 0.05:
            least, most = extremes(loss.target)
            yield Line(
                f"targets are {least:.3g} to {most:.3g}, but the output of {loss.source.lower()} is {low:g} to "
                f"{high:g}, so {share:.0%} of them are out of reach; scale the targets, or remove the last activation",
                sample=seen.sample(outside),
            )


@check("broadcasting", "certain", at="probe")
@check("broadcasting", "certain", at="graph")
def broadcasting(seen: Evidence) -> Lines:
    """Prediction and target are broadcast against each other, as (N, 1) and (N,), to N × N pairs."""
    for loss in losses(seen, *REGRESSIONS):
        p, t = loss.prediction, loss.target
        is_pair = p is not None and p.ndim > 2 and loss.options.get("reduction") in (NONE, "none")  # within a sample
        if p is not None and t is not None and not (is_pair and len(p) == len(t)) and is_broadcast(p, t):
            yield (
                f"{loss.kind} compares each prediction with each target, {tuple(p.shape)} and {tuple(t.shape)}, so it "
                "learns the mean; give prediction and target the same shape"
            )
    yield from [remark.text for remark in seen.remarks if remark.check == "broadcasting"][:1]


def is_broadcast(p: Tensor, t: Tensor) -> bool:
    """Whether each of two tensors is repeated for the other, or has been, as a loss function keeps them."""
    if p.shape != t.shape:
        pairs = torch.broadcast_shapes(p.shape, t.shape).numel()  # type: ignore[no-untyped-call]
        return bool(pairs > max(p.numel(), t.numel()))
    one, other = ({d for d in range(p.ndim) if each.shape[d] > 1 and each.stride(d) == 0} for each in (p, t))
    return bool(one - other and other - one)


@check("nan-hidden", "likely", at="graph")
def nan_hidden(seen: Evidence) -> Lines:
    """A value that nan_to_num replaces within the graph is NaN or infinite, but not -inf, nor that of a masked row."""
    for node in seen.graph.replaced if seen.graph else ():
        value = saved(node, "self")
        if not isinstance(value, Tensor) or value.is_complex():
            continue
        hidden = value.isnan() | value.isposinf()
        for part in tensors_of(seen.batch):
            if part.is_floating_point() and part.shape == hidden.shape:
                hidden &= ~part.isnan()  # what is missing in the data
        if bool(hidden.any()) and not _is_masked_softmax(node, hidden):
            yield (
                f"nan_to_num hides that {float(hidden.float().mean()):.0%} of the values of {tuple(hidden.shape)} in "
                "the loss are not finite; find where they come from"
            )


def _is_masked_softmax(node: Any, hidden: Tensor) -> bool:
    """Whether what nan_to_num replaces are whole rows of a softmax, as of a sequence of which all is masked."""
    softmax = operation_behind(node)
    if name_of(softmax) != "Softmax":
        return False
    result, dim = saved(softmax, "result"), _signed(saved(softmax, "dim"))
    missing = result.isnan() if isinstance(result, Tensor) and result.numel() == hidden.numel() else None
    is_masked = name_of(operation_behind(softmax)) in ("MaskedFill", "Where", "Add", "Sub")
    return is_masked and missing is not None and torch.equal(missing.any(dim), missing.all(dim))


def _signed(dim: int) -> int:
    """A dimension that a node keeps, which is -1 as an integer without a sign."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


@check("leaf-loss", "certain", at="graph")
def leaf_loss(seen: Evidence) -> Lines:
    """The loss is a leaf, which depends on nothing."""
    loss = seen.loss
    is_leaf = isinstance(loss, Tensor) and loss.requires_grad and loss.grad_fn is None
    if is_leaf and not any(loss is p for p in seen.module.parameters()):
        yield (
            "training_step returns a tensor that was created from the value of the loss, so nothing is trained; "
            "return the loss itself"
        )


@check("unregistered", "likely", at="graph")
def unregistered(seen: Evidence) -> Lines:
    """The graph reaches an nn.Parameter, or a tensor in an attribute, that the module does not have as a parameter."""
    if seen.graph is None or seen.sharded:  # FSDP2 swaps the parameters for others while it computes
        return
    unknown = [leaf for leaf in seen.graph.leaves if id(leaf) not in seen.made]
    registered = {id(p) for p in seen.module.parameters()} if unknown else set()
    for leaf in unknown:
        is_owned = id(leaf) in seen.owned
        if id(leaf) in registered or not (isinstance(leaf, nn.Parameter) or id(leaf) in attributes(seen.module)):
            continue
        where = f" ({holder})" if (holder := find_holder(seen.module, leaf)) else ""
        result = "in no checkpoint" if is_owned else "never trained, and in no checkpoint"
        yield Line(
            f"the loss depends on a parameter of shape {tuple(leaf.shape)} that the module does not know{where}; "
            f"it is {result}: use nn.Parameter, nn.ModuleList, nn.ModuleDict or register_parameter",
            # A temperature of reinforcement learning is often such a tensor, in an optimizer of its own.
            # What an optimizer of the step itself has made is no weight of the module.
            "note" if (is_owned and not isinstance(leaf, nn.Parameter)) or leaf.grad is not None else None,
        )


@check("late-parameter", "certain", at="graph")
def late_parameter(seen: Evidence) -> Lines:
    """The graph reaches a parameter that was made after the optimizers, and is in none."""
    if seen.graph is None or seen.sharded:
        return
    reached = {id(leaf) for leaf in seen.graph.leaves} - seen.made
    unowned = reached - seen.optimized() if reached else reached
    if late := [name for name, p in seen.module.named_parameters() if id(p) in unowned] if unowned else []:
        yield (
            f"{some(late)} was created after configure_optimizers, so no optimizer trains it; create it in __init__, "
            "setup or configure_model"
        )


@check("dropout-of-output", "likely", at="graph")
def dropout_of_output(seen: Evidence) -> Lines:
    """What a loss function gets was multiplied by zeros and one other value, as by a dropout."""
    for loss in losses(seen, "nll_loss", *REGRESSIONS, "binary_cross_entropy_with_logits"):
        node = operation_behind(loss.source_node) if loss.kind == "nll_loss" and loss.before else loss.source_node
        factor = saved(node, "other") if name_of(node) == "Mul" else None
        if not isinstance(factor, Tensor) or factor.numel() < 16 or factor.ndim < 1:
            continue
        high = float(factor.max())
        is_dropout = high > 1.001 and bool(((factor == 0) | (factor == high)).all()) and bool((factor == 0).any())
        if is_dropout:
            yield (
                f"a dropout of {1 - 1 / high:.0%} is applied to the output that {loss.kind} gets, "
                f"{tuple(factor.shape)}, so predictions are set to 0 at random; put it before the last layer"
            )
            return


def joins_later(seen: Evidence) -> bool:
    """Whether code adds parameters to an optimizer while it trains."""
    return any("add_param_group" in code.co_names for code in codes_of_users(seen.module, seen.trainer))


@check("in-no-optimizer", "likely", at="graph")
def untrained_head(seen: Evidence) -> Lines:
    """A layer that is in no optimizer gets the output of trained ones, and is smaller than all of these."""
    if seen.graph is None or seen.step or seen.sharded or not seen.module.automatic_optimization:
        return
    lacking = [n for n, p in seen.parameters.items() if p.requires_grad and id(p) not in seen.owned]
    trained = [n for n, p in seen.parameters.items() if p.requires_grad and id(p) in seen.owned]
    size, rest = (sum(seen.parameters[n].numel() for n in names) for names in (lacking, trained))
    if not lacking or size >= rest or any(id(leaf) not in seen.names for leaf in seen.graph.leaves):
        return  # a prompt, or an adapter, of a body that is left as it is
    behind = leaves_behind(seen.loss, {id(seen.parameters[n]) for n in lacking})
    heads = [n for n in lacking if behind.get(id(seen.parameters[n]), set()) & seen.owned]
    if heads and not joins_later(seen):
        layers = [seen.module.get_submodule(n.rpartition(".")[0]) for n in heads]
        matrices = [(layer, w) for layer in layers for w in layer.parameters() if w.ndim > 1]
        are_given = {n.partition(".")[0] for n in heads} <= {*inspect.signature(type(seen.module)).parameters}
        if are_given and any(isinstance(m, WITH_WEIGHTS) and not is_initial(w, fan_of(m, w)) for m, w in matrices):
            return  # an argument, which was trained before
        are_norms = all(isinstance(layer, NORMS) for layer in layers)
        yield Line(
            f"{some(heads)} is in no optimizer, but its layer gets the output of trained ones, so it stays at its "
            "initial values; pass self.parameters() to the optimizer",
            "note" if are_norms else None,  # which norm without them
            subject="head",
        )


@check("initial-loss", "likely", at="graph")
def initial_loss(seen: Evidence) -> Lines:
    """The first cross-entropy is more than 8 nats above that of equal probabilities."""
    if seen.step or seen.trainer.global_step or seen.graph is None:
        return
    for loss in losses(seen, "nll_loss"):
        value, count = loss.mean_nll(), loss.num_classes or 1
        if value is None or count < 2:
            continue
        if value > math.log(count) + SURPRISING and not _has_cosines(seen.graph):
            is_pretrained = any(seen.parameters[name].ndim > 1 for name in seen.frozen)
            embeddings = [m for m in seen.module.modules() if isinstance(m, nn.Embedding) and len(m.weight) == count]
            yield Line(
                f"the first cross-entropy is {value:.1f}, while equal probabilities have ln({count}) = "
                f"{math.log(count):.2f}: the logits have a deviation above 4; scale the initial weights of the last "
                "layer, or the inputs",
                # A small default embedding that is tied to the output has 18; other weights are not initial ones.
                "note" if (embeddings and value < math.log(count) + TIED) or is_pretrained else None,
            )


def _has_cosines(graph: Graph) -> bool:
    """Whether a loss is computed of vectors and weights of length 1, whose products are scaled on purpose."""
    return bool(graph.counts["LinalgVectorNormBackward0"] > 1 or graph.counts["CosineSimilarityBackward0"])


@check("same-output", "certain", at="graph")
def same_output(seen: Evidence) -> Lines:
    """At three looks, the prediction is equal for all samples, although the weights have moved by over 1%."""
    graph = seen.graph
    if seen.step < 3 or graph is None or len(graph.losses) != 1 or not COMPUTES & graph.counts.keys():
        return
    loss = graph.losses[0]
    if loss.source and loss.prediction is not None and loss.same_for_all() and seen.has_moved():
        seen.constant += 1
        if seen.constant >= 3:
            yield (
                f"the output is the same for all {len(loss.prediction)} samples of a batch; the inputs do not reach "
                "it: correct dead units, constant inputs, or a wrong variable"
            )


@check("divided-twice", "likely", at="graph")
def divided_twice(seen: Evidence) -> Lines:
    """The loss is the value of its only loss function, divided by the number of accumulated batches."""
    count, loss, graph = seen.trainer.accumulate_grad_batches, seen.loss, seen.graph
    if count == 1 or graph is None or len(graph.losses) != 1 or not seen.module.automatic_optimization:
        return
    if not says(seen.module, ACCUMULATED):  # half of a square error is one, too
        return
    value = graph.losses[0].mean()
    if value and isinstance(loss, Tensor) and math.isclose(float(loss) * count, value, rel_tol=1e-4):
        yield (
            f"training_step divides the loss by accumulate_grad_batches={count}, as Lightning does, too, so the "
            "gradient is too small; return the loss as it is"
        )


def remember(seen: Evidence) -> None:
    """Keep which classes cross-entropy was trained on, and which operations have a derivative of 0."""
    if seen.graph is not None:
        seen.rounding |= FLAT & {name.partition("Backward")[0].lower() for name in seen.graph.counts}
        kinds = [loss.kind for loss in seen.graph.losses]
        seen.has_classes |= any("binary" in kind for kind in kinds) and not any(kind in REGRESSIONS for kind in kinds)
    for loss in losses(seen, "nll_loss"):
        if loss.num_classes and loss.num_classes > 1 and loss.target is not None:
            seen.num_classes = max(seen.num_classes, loss.num_classes)
            if loss.target.ndim == 1 and loss.target.numel() < 1_000_000:
                seen.targets.append(loss.target)
    if seen.step >= LATE and (share := _reconstructed(seen)) is not None:
        seen.reconstructed.append(share)


def _reconstructed(seen: Evidence) -> float | None:
    """The share of the variance of the batch that the prediction explains whose target is a part of it, if any is."""
    for loss in losses(seen, *REGRESSIONS, "binary_cross_entropy_with_logits"):
        p, t = loss.prediction, loss.target
        if p is None or t is None or p.shape != t.shape or t.ndim < 2 or len(t) < WIDE or t[0].numel() < WIDE:
            continue
        parts = (x for x in tensors_of(inputs_of(seen.batch)) if x.numel() == t.numel() and x.is_floating_point())
        if any(torch.equal(x.flatten().to(t), t.flatten()) for x in parts):
            p, t = p.float().reshape(len(p), -1), t.float().reshape(len(t), -1)
            p = p.sigmoid() if loss.kind == "binary_cross_entropy_with_logits" else p
            return 1 - float((p - t).square().mean() / (t.var(0, correction=0).mean() + 1e-12))
    return None


@check("reconstruction", "likely", at="summary")
def reconstruction(seen: Evidence) -> Lines:
    """At the last two looks, of 300 steps or more, a reconstruction of the inputs was no better than their mean."""
    found = seen.reconstructed[-2:]
    is_worst = len(found) == 2 and max(found) < EXPLAINED and found[1] - found[0] < EXPLAINED / 4
    if seen.ended and seen.step >= 3 * LATE and is_worst and seen.has_moved():
        yield Line(
            f"after {seen.step} steps, the reconstruction explains {max(0.0, found[-1]):.0%} of the variance of the "
            "inputs, as their mean does, so nothing about a sample passes through; weigh the terms of the loss alike "
            "(a sum over pixels beside a divergence), or look for what the decoder ignores",
            "note" if depends_on_time(seen.module) else None,
        )
