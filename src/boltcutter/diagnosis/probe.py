"""Repeat the user's own steps on altered batches, for ``check --batch`` and ``audit``, never in a training.

``training_step`` and ``validation_step`` are called as they are. Then some samples, labels or positions of the batch
are replaced, and what the steps computed is compared. Weights, buffers, attributes, gradients, metrics, random states
and modes are restored after each pass, and optimizers and schedulers make no step.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import monotonic
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchmetrics import Metric

from boltcutter.diagnosis.addends import Addends
from boltcutter.diagnosis.calls import LossCalls, Remark, unread_parts
from boltcutter.diagnosis.cuts import Cuts
from boltcutter.diagnosis.evidence import is_metric, num_rows, overrides, tensors_of
from boltcutter.diagnosis.graph import Loss
from boltcutter.diagnosis.results import Results, Unread
from boltcutter.diagnosis.source import own_classes
from boltcutter.structure import map_tensors, take_rows

MOST_PASSES = 60
FEWEST_JOINED = 4  # samples
MOST_ITEMS = 10_000  # of a container, whose own ones are looked at
MOST_BYTES = 1 << 30  # of tensors that are kept of a pass
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
ATTENTIVE = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerDecoder)
STEPS = ("training_step", "validation_step")


class BudgetError(RuntimeError):
    """All passes of a batch are used up, or the time is."""


class Trace:
    """What one pass of a step computed.

    Attributes:
        tensors: Inputs and outputs of each layer, in their order, with a name.
        masks: What attention of torch gets as key_padding_mask, shape (N, T), True where it leaves out.
        inputs: Shape of the first input of each layer.
        with_grad: Whether gradients were enabled in a layer.
        is_packed: Whether a layer got a ``PackedSequence``, in which the samples are sorted by length.
        calls: Of loss functions.
        remarks: On reshapes and shapes.
        error: That ended the following of values, without which nothing is remarked.
        output: Of the step.
        logged: Values that were logged.
        of_batch: Values of the metrics among them, for the batch.
        averaged: Names of those numbers of which Lightning logs the mean.
        options: Of the logging, by name.
        of_metrics: Names of those that a metric has returned for the batch, and its class.
        buffers: Names of the buffers that it changed.
        cumulative: Name of a cumulative operation over the samples.
        pairs: Of each loss function, whether both of its sides have a gradient, and its mean.
        differences: Values of equal number that were subtracted from each other.
        addends: What is added to its loss, and has no gradient.
        compared: Distributions of a student and a teacher that a loss compares.
        unread_results: Of functions of layers, which nothing reads.
        metrics: Names of metrics that it updated.
        unread: Names of the parts of the batch that no operation got.
        reads_batch: Whether an operation got any part of it.
        differentiates: Whether it computes gradients itself, as of adversarial samples, by which predictions depend on
            targets.
        random: State of the generator of torch at its end.
        has_generator: Whether it draws numbers from a generator of its own.
        identical: How many equal results were stacked, or had a deviation, in validation.
        lengths: Of the samples of the first ``PackedSequence`` that a layer got, shape (N,).
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.masks: list[Tensor] = []
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.size = 0  # of these tensors, in bytes
        self.with_grad = self.is_packed = False
        self.calls: list[Loss] = []
        self.remarks: list[Remark] = []
        self.error: Exception | None = None
        self.output: Any = None
        self.logged: dict[str, Any] = {}
        self.of_batch: dict[str, Any] = {}
        self.averaged: set[str] = set()
        self.options: dict[str, dict[str, Any]] = {}
        self.of_metrics: dict[str, str] = {}
        self.buffers: set[str] = set()
        self.cumulative, self.has_generator, self.differentiates = "", False, False
        self.pairs: list[tuple[bool, float]] = []
        self.differences: list[tuple[Tensor, Tensor]] = []
        self.addends = Addends()
        self.compared: list[Any] = []
        self.unread_results: list[Unread] = []
        self.metrics: set[str] = set()
        self.unread: list[str] = []
        self.reads_batch = True
        self.random: Tensor | None = None
        self.identical = 0
        self.lengths: Tensor | None = None

    def keep_masks(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook before attention."""
        given = dict(zip(inspect.signature(part.forward).parameters, args, strict=False)) | kwargs
        masks = [t for n, t in given.items() if n.endswith("key_padding_mask") and isinstance(t, Tensor)]
        self.masks += [t.detach() if t.dtype == torch.bool else t.detach() == -math.inf for t in masks]


def is_adjacency(t: Tensor, count: int) -> bool:
    """Whether a matrix tells which of a number of nodes are connected, in both directions, which most are not."""
    if t.shape != (count, count) or count < 8:
        return False
    edges = t != 0
    return torch.equal(edges, edges.T) and float(edges.float().mean()) < 0.5


def copy_batch(batch: Any) -> Any:
    """A batch whose tensors have memory of their own."""
    return map_tensors(batch, lambda t: t if t.requires_grad else t.detach().clone())


class Probe:
    """Runs steps of a module on altered batches.

    Args:
        trainer: Which is about to train the first batch.
        module: That it trains.
        batch: First batch of training, on the device.
        held: First batch of validation; None if there is none.
        seconds: Time that passes may take together.
    """

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, held: Any, seconds: float = 30.0
    ) -> None:
        self.trainer, self.module = trainer, module
        self.modes = {part: part.training for part in module.modules()}
        batches = {"training_step": batch, "validation_step": held}
        used = {kind: data for kind, data in batches.items() if data is not None and overrides(module, kind)}
        self.batches = {kind: copy_batch(data) for kind, data in used.items()}  # a step may change its own in place
        self.passes, self.most, self.end = 0, MOST_PASSES, monotonic() + seconds
        self.terms: Any = None  # of the loss, as ``signs`` reads them
        self.before_nearest = 0  # outputs of layers before the nearest of several values is chosen
        self.pulls: list[list[Any]] | None = None  # of each addend of the loss, as ``pulls`` reads them
        self.weight_of_samples = 0.0  # of the losses of all samples of the batch, in the loss
        self.of_weights: dict[str, Tensor] = {}  # gradients of what the loss has beside these, by parameter
        self._base: dict[tuple[str, bool], Trace] = {}
        self._repeated: dict[tuple[str, int], Trace] = {}
        self._with_copy: dict[tuple[str, bool], Trace | None] = {}

    @property
    def evaluated(self) -> str:
        """The step in which samples should not depend on each other: that of validation, if it has several."""
        if "training_step" not in self.batches:
            return "validation_step"
        has_several = "validation_step" in self.batches and self.size("validation_step") != 1
        return "validation_step" if has_several else "training_step"

    @property
    def scored(self) -> str:
        """The step whose predictions are compared: that of validation, if it has a loss function, which gets them."""
        has_loss = self.base(self.evaluated, training=False).calls
        return self.evaluated if has_loss or "training_step" not in self.batches else "training_step"

    def size(self, kind: str) -> int:
        """Number of samples that are rows of a batch; 0 if there are none, as of the nodes of a graph."""
        count = num_rows(self.batches[kind])
        return 0 if any(is_adjacency(t, count) for t in tensors_of(self.batches[kind])) else count

    def base(self, kind: str, *, training: bool | None = None) -> Trace:
        """The step on its own batch, in its own mode, or in that which is given."""
        training = kind == "training_step" if training is None else training
        if (kind, training) not in self._base:
            self._base[kind, training] = self.run(kind, self.batches[kind], training=training)
        return self._base[kind, training]

    def draws_by_itself(self, kind: str) -> bool:
        """Whether a step draws by a generator of its own, or by one that it seeds, so that its numbers are the same."""
        base, other = self.base(kind, training=False), self.repeated(kind, seed=1)
        is_seeded = base.random is not None and other.random is not None and torch.equal(base.random, other.random)
        return base.has_generator or is_seeded

    def forget(self) -> None:
        """Release what layers computed; the calls of loss functions are kept."""
        self._repeated.clear()
        self._with_copy.clear()
        self.terms = self.pulls = None
        self.of_weights.clear()
        for trace in self._base.values():
            trace.tensors.clear()

    def repeated(self, kind: str, seed: int) -> Trace:
        """A step once more, in evaluation mode, with the random numbers of a seed."""
        if (kind, seed) not in self._repeated:
            self._repeated[kind, seed] = self.run(kind, self.batches[kind], training=False, seed=seed)
        return self._repeated[kind, seed]

    def with_copy(self, kind: str, *, training: bool) -> Trace | None:
        """The step with a copy of the first sample behind its batch, which changes sizes of samples only; or None."""
        if (kind, training) not in self._with_copy:
            count, trace = self.size(kind), None
            with suppress(Exception):
                if count > 1:
                    batch = take_rows(self.batches[kind], [*range(count), 0], count)
                    trace = self.run(kind, batch, training=training)
            self._with_copy[kind, training] = trace
        return self._with_copy[kind, training]

    def run(
        self,
        kind: str,
        batch: Any,
        *,
        training: bool,
        seed: int = 0,
        copies: bool = True,
        record: bool = True,
        then: Callable[[Any], None] | None = None,
    ) -> Trace:
        """Call a step, and restore all that it changes.

        Args:
            kind: ``training_step`` or ``validation_step``.
            batch: Its batch.
            training: Whether the layers are in their mode of training; otherwise all are in evaluation mode.
            seed: Of random numbers that are drawn.
            copies: Whether it gets a copy of the batch, so that it cannot change the data.
            record: Whether what layers get and return is kept.
            then: Lossed with the loss, before all is restored.

        Raises:
            BudgetError: There were too many passes, or they took too long.
        """
        if self.passes >= self.most or monotonic() > self.end:
            raise BudgetError(f"{self.passes} passes of a batch, of at most {self.most}, have used up the time")
        self.passes += 1
        module, trace = self.module, Trace()
        if copies:
            batch = copy_batch(batch)
        step = getattr(module, kind)
        indices = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
        indices += [0] if indices and is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else []
        context = "train_step_context" if kind == "training_step" else "val_step_context"
        cuts = Cuts(batch, module)
        metrics = {n: m for n, m in module.named_modules() if is_metric(m)}
        counts = {n: m._update_count for n, m in metrics.items()}
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()} if record else {}
        calls = LossCalls(tensors_of(batch), [p for p in module.parameters() if p.requires_grad])
        with ExitStack() as stack:
            stack.enter_context(kept(module))
            stack.enter_context(without_effects(self.trainer, module, trace))
            stack.enter_context(seeded(seed))
            for part, mode in self.modes.items():
                part.training = mode and training
            for name, part in module.named_modules() if record else ():
                if isinstance(part, Metric | torch.jit.ScriptModule):
                    continue
                if part is not module:
                    stack.callback(part.register_forward_hook(Recorder(name, trace, cuts.results)).remove)
                stack.callback(part.register_forward_hook(cuts.results.passed).remove)
                if isinstance(part, ATTENTIVE):
                    stack.callback(part.register_forward_pre_hook(trace.keep_masks, with_kwargs=True).remove)
            stack.enter_context(torch.enable_grad() if kind == "training_step" else torch.no_grad())
            stack.enter_context(getattr(self.trainer.precision_plugin, context)())
            stack.callback(register_optimizer_step_post_hook(calls.notice_step).remove)
            with calls, cuts if record else nullcontext():
                trace.output = step(batch, *indices)
            now = dict(module.named_buffers())
            trace.buffers = {n for n, b in buffers.items() if n in now and not torch.equal(b, now[n])}
            trace.random = torch.get_rng_state()
            trace.metrics = {n for n, m in metrics.items() if m._update_count > counts[n]}
            loss = trace.output.get("loss") if isinstance(trace.output, dict) else trace.output
            if cuts.error is None:
                trace.unread_results = cuts.results.unread(trace.output)
                is_returned = isinstance(loss, Tensor) and module.automatic_optimization
                trace.addends = cuts.addends.of_loss([loss] if is_returned else cuts.addends.roots)
            if then is not None:
                then(loss)
        cuts.conclude()
        calls.conclude()
        trace.masks += cuts.attention.masks
        trace.differentiates, trace.identical = cuts.differentiates, cuts.identical
        trace.pairs, trace.differences = calls.pairs, calls.differences
        trace.compared = cuts.temperatures.compared
        trace.unread = unread_parts(batch, calls.read, step)
        trace.reads_batch = any(id(t) in calls.read for t in tensors_of(batch))
        trace.cumulative, trace.has_generator = calls.cumulative, calls.has_generator
        trace.calls, trace.remarks, trace.error = calls.calls, [*calls.remarks, *cuts.remarks], cuts.error
        return trace


class Recorder:
    """A forward hook that keeps what a layer gets and returns."""

    def __init__(self, name: str, trace: Trace, results: Results) -> None:
        self.name, self.trace, self.results = name, trace, results

    def __call__(self, part: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the tensors."""
        trace = self.trace
        trace.with_grad |= torch.is_grad_enabled()
        self.results.is_paused = True
        packed = [each for each in inputs if isinstance(each, PackedSequence)]
        trace.is_packed |= bool(packed)
        if packed and trace.lengths is None:
            trace.lengths = lengths_of(packed[0])
        given = tensors_of(inputs)
        if given:
            trace.inputs.setdefault(self.name, tuple(given[0].shape))
        found = [(f"the input of {self.name}", t.detach()) for t in given]
        found += [(f"the output of {self.name}", t.detach()) for t in tensors_of(output)]
        if trace.size < MOST_BYTES:
            trace.tensors += found
            trace.size += sum(t.nbytes for _, t in found)
        self.results.is_paused = False


def lengths_of(packed: PackedSequence) -> Tensor:
    """Lengths of the samples, in the order that they had before they were packed, shape (N,)."""
    count = int(packed.batch_sizes[0])
    lengths = (packed.batch_sizes[:, None] > torch.arange(count)).sum(0)
    return lengths if packed.unsorted_indices is None else lengths[packed.unsorted_indices.cpu()]


# What a pass may change, and what is restored


@contextmanager
def kept(module: L.LightningModule) -> Iterator[None]:
    """Restore weights, buffers, gradients, modes, and attributes of all layers: counters, lists, states of metrics."""
    parts: list[Any] = [*module.modules()]
    own = {id(v): v for part in module.modules() for v in vars(part).values() if _is_own_object(v)}
    parts += own.values()
    attributes = [(part, {k: v for k, v in vars(part).items() if k not in ("_modules", "_trainer")}) for part in parts]
    held = [value for _, values in attributes for value in values.values()]
    contents = [(v, copy.copy(v)) for v in nested(held)]
    found = [*module.parameters(), *module.buffers(), *tensors_of([*held, *(inner for _, inner in contents)])]
    tensors = {id(t): (t, t.detach().clone()) for t in found}
    computed = {id(t) for t in found if t.grad_fn is not None}
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone(), p.requires_grad) for p in module.parameters()]
    inner = [v for value in held if _is_own_object(value) for v in vars(value).values()]  # of an object of an object
    drawing = [(v, generator_state(v)) for v in (*held, *inner) if isinstance(v, GENERATORS)]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, values in attributes:
                for key in vars(part).keys() - values.keys() - {"_modules", "_trainer"}:
                    del vars(part)[key]
                vars(part).update(values)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(content)
            for tensor, value in tensors.values():
                if tensor.grad_fn is not None and id(tensor) not in computed:
                    tensor.detach_()  # which was changed in place by what has a gradient, as of an altered batch
                if tensor.shape == value.shape and not torch.equal(tensor, value):
                    tensor.copy_(value)
            for p, grad, kept_grad, requires_grad in gradients:
                p.grad = grad if grad is None or kept_grad is None else grad.copy_(kept_grad)
                p.requires_grad_(requires_grad)
        for generator, state in drawing:
            set_generator_state(generator, state)


def nested(values: list[Any]) -> list[Any]:
    """Containers among some values, and those within these."""
    found = [v for v in values if isinstance(v, list | dict | set | deque)]
    known = {id(v) for v in found}
    for v in found:  # which grows
        if len(v) <= MOST_ITEMS:
            inner = [each for each in (v.values() if isinstance(v, dict) else v) if id(each) not in known]
            inner = [each for each in inner if isinstance(each, list | dict | set | deque)]
            known.update(map(id, inner))
            found += inner
    return found


def _is_own_object(value: Any) -> bool:
    """Whether an attribute is an object of a class of the user's, such as a replay buffer."""
    is_plain = hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | nn.Module | Tensor)
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    return is_plain and not is_function and bool(own_classes(type(value)))


def _value_of(metric: Metric) -> Any:
    """The value of a metric for its last batch; of one that was only updated, that of all that it has."""
    cached = getattr(metric, "_forward_cache", None)
    if cached is not None:
        return cached
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(metric).compute()
    return None


@contextmanager
def without_effects(trainer: L.Trainer, module: L.LightningModule, trace: Trace) -> Iterator[None]:
    """Nothing is logged but to the trace, and neither optimizers nor schedulers make a step."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        trace.logged[name] = value.detach().clone() if isinstance(value, Tensor) else value
        trace.options[name] = options
        if is_metric(value):
            trace.of_batch[name] = _value_of(value)
        is_mean = options.get("reduce_fx", "mean") in ("mean", torch.mean) and options.get("on_epoch") is not False
        if isinstance(value, Tensor | float) and is_mean:
            trace.averaged.add(name)
        for metric in filter(is_metric, module.modules()):
            if isinstance(value, Tensor) and getattr(metric, "_forward_cache", None) is value:
                trace.of_metrics[name] = type(metric).__name__

    def log_dict(values: Any, *args: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, **options)

    def no_step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        return closure() if callable(closure) else None

    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
    steppers = [*optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]
    new = [(module, "log", log), (module, "log_dict", log_dict), *((each, "step", no_step) for each in steppers)]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in new]
    for owner, name, function in new:
        vars(owner)[name] = function
    try:
        yield
    finally:
        for owner, name, value in before:
            vars(owner).pop(name, None)
            if value is not None:
                vars(owner)[name] = value


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the numbers of a seed, and restore the global random states."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def generator_state(generator: Any) -> Any:
    """The state of a random generator."""
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


# Batches and comparisons


def take(batch: Any, rows: Tensor) -> Any:
    """Other rows of all tensors that have one for each sample."""
    return take_rows(batch, rows, len(rows))


def are_joined(tensors: list[Tensor]) -> bool:
    """Whether samples of several lengths are joined: a part has the lengths, the begins or the owners of rows."""
    most = max((len(t) for t in tensors if t.ndim), default=0)
    for t in (t for t in tensors if t.ndim == 1 and t.dtype in (torch.int64, torch.int32) and len(t) >= FEWEST_JOINED):
        steps, first, last, total = t.diff(), int(t[0]), int(t[-1]), int(t.sum())
        if len(t) == most:
            found = first == 0 and 1 < last < most // 2 and bool(((steps == 0) | (steps == 1)).all())
        else:
            is_rising = first == 0 and len(t) < last <= most and bool((steps >= 0).all())
            found = is_rising or (int(t.min()) >= 0 and any(len(u) == total for u in tensors if u.ndim))
        if found:
            return True
    return False


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if a.shape != b.shape or not a.is_floating_point():
        return a.shape == b.shape and torch.equal(a, b)
    return torch.allclose(a.float(), b.float(), rtol=0, atol=tolerance(a), equal_nan=True)


def rows_that_differ(a: Tensor, b: Tensor) -> Tensor:
    """Which rows of two tensors of equal shape differ, shape (R,)."""
    if not a.is_floating_point():
        return (a != b).flatten(1).any(1)
    return ((a - b).abs() > tolerance(a)).flatten(1).any(1)


def tolerance(a: Tensor) -> float:
    """How much a value may differ by rounding, relative to the largest."""
    relative = 2e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return relative * (float(a.abs().nan_to_num().max()) if a.numel() else 0.0) + 1e-12
