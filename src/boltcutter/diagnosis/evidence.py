"""What has been seen of a training so far: all that checks decide on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from boltcutter.diagnosis.graph import Graph, Loss
from boltcutter.internals import foreach_norm
from boltcutter.structure import children, count_after_time, tensors

if TYPE_CHECKING:
    from boltcutter.diagnosis.calls import Remark
    from boltcutter.diagnosis.data import Scale
    from boltcutter.diagnosis.loaders import Splits
    from boltcutter.diagnosis.metrics import MetricCalls
    from boltcutter.diagnosis.probe import Probe

SAMPLE = 512  # elements of each parameter that are compared
WITH_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


@dataclass
class Update:
    """One step of an optimizer.

    Args:
        optimizer: Which one.
        number: Of its steps.
        parameters: Of the optimizer, by name.
        with_gradient: Names of those with a gradient.
        nonzero: Names of those whose gradient is not 0 everywhere.
        moved: By how much the sampled elements of each changed, as a norm; None if that is unknown.
        size: Norm of these elements before the step.
        rate: The largest learning rate.
        stuck: Share of the elements with a gradient that did not change; only of half precision.
        cleared: Whether all gradients were 0 at some backward pass since the last step.
        had_gradient: Whether a gradient was not 0 after the last backward pass.
        of_others: Name of the optimizer whose backward pass the gradients are from, too, and which has made its step.
        lost: Training steps since the last one without any, whose gradients were cleared.
        dropped: Names of parameters without a gradient, of which that of an earlier backward pass of the same training
            step was cleared.
        missed: Whether it has no gradient, though there was one when the training step began.
        against: Name of the optimizer that has just changed the same parameters by a loss that this step undoes.
    """

    optimizer: Optimizer
    number: int
    parameters: dict[str, Tensor]
    with_gradient: set[str]
    nonzero: set[str]
    moved: dict[str, float] | None
    size: dict[str, float]
    rate: float
    stuck: float
    cleared: bool
    had_gradient: bool
    of_others: str = ""
    lost: int = 0
    dropped: set[str] = field(default_factory=set)
    against: str = ""
    missed: bool = False


@dataclass
class Steps:
    """What is kept of the steps of one optimizer that were looked at."""

    count: int = 0  # all steps, also those that were not looked at
    rated: bool = False  # whether the learning rate was above 0
    uncleared: int = 0
    emptied: int = 0
    lost: int = 0
    dropped: int = 0
    looks: int = 0
    idle: int = 0  # of which all gradients were 0
    mixed: int = 0  # of which gradients were those of another optimizer's loss, too
    missed: int = 0  # of which the gradients of an earlier training step were cleared, and there were no others
    opposed: int = 0  # of which the step undid that of another optimizer
    ratios: list[tuple[float, float]] = field(default_factory=list)  # relative change, learning rate
    jumps: list[float] = field(default_factory=list)  # changes larger than the weights, of the median matrix
    stuck: list[float] = field(default_factory=list)


@dataclass
class Repeat:
    """A layer that is in a list, or in a sequence, several times.

    Args:
        name: Of the list.
        count: How often it is there.
        is_named: Whether it has another name, outside of the list.
        shape: Of the input of its last call.
        node: Of the graph, which computed the output of its last call.
        is_chained: Whether an input of it, of the same shape, was computed from its output before.
        given: Input of its last call.
        times: In how many calls in a row it was the same.
    """

    name: str
    count: int
    is_named: bool
    shape: tuple[int, ...] = ()
    node: Any = None
    is_chained: bool = False
    given: Any = None
    times: int = 0


class Evidence:
    """What has been seen of a training.

    Args:
        trainer: The trainer.
        module: The module that it trains.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.parts = list(module.named_modules())  # the module and its layers, as they were at the last look
        self.made = {id(p) for p in module.parameters()}  # when the optimizers were made
        self.step = 0  # optimizer steps since training began or was resumed
        self.looks = 0
        # of several ranks
        self.store: Any = None
        self.pending: list[int] = []  # steps of which not all facts are read
        self.facts: list[dict[str, Any]] = []  # of all ranks, at one step
        self.has_data = False  # whether a batch is more than a placeholder
        self.ended = False
        self.optimizers: list[Optimizer] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.names: dict[int, str] = {}  # of parameters by identity
        self.owned: set[int] = set()  # identities of parameters that an optimizer has
        self.shared: set[str] = set()  # parameters that several optimizers have, in manual optimization
        self.frozen: set[str] = set()  # parameters that require no gradient when training begins
        self.sharded, self.compiled = False, is_compiled(module)
        # of the step that is looked at
        self.batch: Any = None
        self.loss: Any = None  # as training_step returned it
        self.graph: Graph | None = None
        self.update: Update | None = None
        # of all steps that were looked at
        self.steps: dict[int, Steps] = {}  # by identity of the optimizer
        self.start: dict[str, Tensor] = {}  # sampled elements of the weights
        self.versions: dict[str, int] = {}
        self.got_gradient: set[str] = set()
        self.got_nonzero: set[str] = set()
        self.largest: dict[str, float] = {}  # change of each matrix in a step, relative to its size
        self.rounding: set[str] = set()  # operations of the graph whose derivative is 0
        self.looks_with_hooks = 0
        self.hooks: list[int] = []  # of layers, when a look begins
        self.repeated: dict[str, Repeat] = {}  # layers that are in a list several times, by their first name
        self.calls_of_schedules: dict[int, int] = {}  # when training began, by identity
        self.first_epoch = 0
        self.ran_without_gradient: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()  # activations that were 0 everywhere, looks in a row
        self.forward_passes = self.without_loss = 0
        self.constant = 0
        self.batches = 0  # of training, that were looked at
        self.hashes: list[int] = []  # of these, with several workers
        self.labels: list[Tensor] = []
        self.targets: list[Tensor] = []  # of cross-entropy
        self.num_classes, self.has_classes = 0, False
        self.reconstructed: list[float] = []  # shares of the variance of the inputs, at late looks
        self.scale: dict[str, Scale | None] = {}  # of inputs; None after the comparison with validation
        # of a trial, which is no training: check --batch and audit
        self.probe: Probe | None = None
        self.splits: Splits | None = None
        self.buffers: dict[str, Tensor] = {}  # before the first step
        self.calls: list[Loss] = []  # of loss functions, in one pass of the steps
        self.remarks: list[Remark] = []  # on shapes, in the same passes
        self.predictions: list[Loss] = []  # of a trained model in validation
        self.metric_calls: MetricCalls | None = None
        self.followed: dict[str, Any] = {}  # averages of weights, as ``averages`` follows them
        self.rates: dict[int, list[float]] = {}  # of optimizers, as ``rates`` follows them, by step
        self.kept: dict[tuple[str, bool], list[int]] = {}  # losses with their graphs, in a list or added, before steps
        self.is_converged = False  # its validation had been best before training ended
        # of validation
        self.validations = 0
        self.validation_batch: Any = None
        self.validation_batches = 0
        self.validation_labels: list[Tensor] = []
        self.active_dropout: list[str] = []
        self.metrics: dict[str, tuple[Any, int]] = {}  # computed in the last validation and not reset: updates
        self.stale_metrics: list[tuple[str, int]] = []
        self.epochs = 0
        self.epoch_metrics: dict[str, int] = {}  # updates of those computed by the begin of the last epoch

    def begin(self) -> None:
        """Read what is known when training starts."""
        trainer, module = self.trainer, self.module
        found = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        self.optimizers = [o for o in found if isinstance(o, Optimizer) and any(g["params"] for g in o.param_groups)]
        self.parts = list(module.named_modules())
        self.parameters = dict(module.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.frozen = {name for name, p in self.parameters.items() if not p.requires_grad}
        self.owned = self.optimized()
        self.sharded = any(hasattr(p, "full_tensor") for p in self.parameters.values()) or is_sharded(trainer)
        self.compiled = is_compiled(module)
        counts = Counter(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])
        if not module.automatic_optimization and not self.sharded:
            self.shared = {name for key, name in self.names.items() if counts[key] > 1}
        self.steps = defaultdict(Steps)
        self.calls_of_schedules = {
            id(config.scheduler): int(getattr(config.scheduler, "last_epoch", 0))
            for config in trainer.lr_scheduler_configs
        }
        self.first_epoch = trainer.current_epoch
        self.repeated = find_repeated(module)
        if not self.sharded:
            self.start = {name: sampled(p).clone() for name, p in self.parameters.items()}
        self.versions = {name: p._version for name, p in self.parameters.items()}

    def optimized(self) -> set[int]:
        """Identities of the parameters that an optimizer has now."""
        return {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}

    @property
    def total_steps(self) -> float:
        """Optimizer steps of the whole training; infinite if it has no end."""
        total = self.trainer.estimated_stepping_batches
        return float(total) if total > 0 else math.inf

    @property
    def batch_size(self) -> int:
        """Number of samples of the training batch that are rows of its tensors; 0 if there are none."""
        return num_rows(self.batch)

    def sample(self, chosen: Tensor, *, validation: bool = False) -> list[Tensor] | None:
        """The sample of the batch of which a row is chosen: the first one; None if the batch has other rows.

        Args:
            chosen: Of the elements of a tensor (N, …), which are those that show something.
            validation: Whether the batch is that of validation.
        """
        tensors = tensors_of(self.validation_batch if validation else self.batch)
        rows = chosen.reshape(len(chosen), -1).any(1).nonzero() if chosen.ndim else chosen.new_zeros(0)
        if not len(rows) or any(t.ndim == 0 or len(t) != len(chosen) for t in tensors):
            return None
        return [t[int(rows[0])] for t in tensors]

    @property
    def trained(self) -> list[str]:
        """Names of parameters that are to be trained."""
        return [n for n, p in self.parameters.items() if p.requires_grad and id(p) in self.owned]

    def has_moved(self) -> bool:
        """Whether the weights differ by more than 1% from those at the start."""
        now = {n: p for n, p in self.parameters.items() if p.requires_grad and n in self.start}
        if not now:
            return False
        start = joined([self.start[n] for n in now])
        moved, size = torch.stack([(joined([sampled(p) for p in now.values()]) - start).norm(), start.norm()]).tolist()
        return bool(moved > 0.01 * size)


def is_compiled(module: nn.Module) -> bool:
    """Whether any layer is compiled."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())


def find_repeated(module: nn.Module) -> dict[str, Repeat]:
    """Layers with weights that a list or a sequence has several times, by their first names."""
    found = {}
    names = {id(part): name for name, part in module.named_modules()}
    parents = [(name, part) for name, part in module.named_modules() if part._modules]
    for name, part in parents:
        if not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        counts = Counter(id(child) for child in part._modules.values())
        for child in part.children():
            if (count := counts[id(child)]) > 1 and any(p.requires_grad for p in child.parameters()):
                is_named = any(
                    inner is child for _, other in parents if other is not part for inner in other.children()
                )
                found[names[id(child)]] = Repeat(name, count, is_named)
    return found


def is_sharded(trainer: L.Trainer) -> bool:
    """Whether each rank holds only a part of the weights, or swaps them for others while it computes."""
    return any(word in type(trainer.strategy).__name__ for word in ("FSDP", "ModelParallel", "DeepSpeed", "Pipeline"))


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [tensor for tensor in tensors(batch) if not tensor.is_sparse]


def num_rows(batch: Any) -> int:
    """Number of samples that are the rows of a batch; 0 without tensors, or if they are no rows."""
    if _lists_samples(batch) or count_after_time(batch):
        return 0
    return next((len(t) for t in tensors_of(batch) if t.ndim), 0)


def _lists_samples(batch: Any, *, nested: bool = False) -> bool:
    parts = children(batch) or ()
    kinds = {(p.shape[1:], p.dtype) for p in parts if isinstance(p, Tensor) and p.ndim}
    if isinstance(batch, list | tuple) and len(kinds) == 1 and all(isinstance(p, Tensor) and p.ndim for p in parts):
        differ = nested and len({len(p) for p in parts}) > 1
        return len(parts) >= 4 or differ  # fewer may be views of the same samples
    return any(_lists_samples(part, nested=True) for part in parts)


def values(tensor: Tensor) -> Tensor:
    """The elements of a tensor; of a sparse one, those that it stores."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def sampled(tensor: Tensor) -> Tensor:
    """Up to SAMPLE elements, evenly spread; a view where that is possible."""
    flat = values(tensor).reshape(-1)
    count = flat.numel()
    if count <= SAMPLE:
        return flat
    step = count // SAMPLE
    while math.gcd(step, count) > 1:  # else all may be of one column, or one corner of each kernel
        step -= 1
    return flat[::step][:SAMPLE]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Samples of several tensors as one copy, in a precision in which their differences can be computed."""
    whole = torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)
    return whole if whole.dtype in (torch.float32, torch.float64) else whole.float()


def norms(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The norm of each of the samples that were joined."""
    return torch.stack(foreach_norm(torch.split(whole, [part.numel() for part in parts])))


def any_nonzero(tensors: list[Tensor]) -> bool:
    """Whether a tensor is not 0 everywhere; of most, a sample of the first one is not."""
    return any(bool(sampled(t).any()) or bool(values(t).any()) for t in tensors)


def nonzero(tensors: list[Tensor]) -> list[bool]:
    """Which tensors are not 0 everywhere; waits once for the device, and again only for those of which a sample is."""
    if not tensors:
        return []
    found: list[bool] = torch.stack([sampled(t).any() for t in tensors]).tolist()
    rest = [i for i, each in enumerate(found) if not each and tensors[i].numel() > SAMPLE]
    again = torch.stack([values(tensors[i]).any() for i in rest]).tolist() if rest else []
    for i, each in zip(rest, again, strict=True):
        found[i] = each
    return found


def overrides(instance: Any, name: str) -> bool:
    """Whether a module or data module, of ``lightning`` or of ``pytorch_lightning``, defines a hook of Lightning."""
    for base in type(instance).__mro__:
        is_theirs = base.__module__.startswith(("lightning.", "pytorch_lightning."))
        if is_theirs and base.__name__ in ("LightningModule", "LightningDataModule"):
            return is_overridden(name, instance, base)
    return False


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric; ``isinstance`` would ask all classes of metrics for each kind of layer."""
    return Metric in type(module).__mro__
