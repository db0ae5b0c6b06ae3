"""Estimate the memory of a training step on hypothetical devices.

The step runs on fake tensors, which have shapes but no data: the model is instantiated and sharded, and forward,
backward and optimizer step run while a dispatch mode counts the bytes that would be alive. Other ranks are a fake
process group.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.environment.platform_facts import disable_mpi_detection
from boltcutter.protocols import NativeTask, ShardsWeights, SplitsIntoStages
from boltcutter.strategy.precision import CANONICAL
from boltcutter.strategy.units import fully_shard_units
from boltcutter.structure import split_batch, tensors, with_tensors

if TYPE_CHECKING:
    from torch.distributed._tools.mem_tracker import MemTracker

DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64, "transformer": torch.bfloat16}


class EstimationError(RuntimeError):
    """The model cannot be run on fake tensors, or cannot be sharded as requested."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, or on the device that needs most.

    Args:
        weights: Parameters and buffers.
        gradients: Gradients of all trainable parameters.
        optimizer: State of the optimizer.
        activations: Tensors saved for the backward pass; with sharding also the gathered weights.
        peak: Maximum of the allocated memory.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


def read_batch(data: L.LightningDataModule) -> Any:
    """Read a batch of the training split, of whose tensors memory depends on shapes and dtypes only."""
    data.prepare_data()
    data.setup(stage="fit")
    batch = next(iter(data.train_dataloader()))
    parts = [part for part in tensors(batch) if part.ndim]
    if not parts or len({len(part) for part in parts}) > 1:
        raise ConfigError(
            "data: memory can be estimated only for batches whose tensors have the samples in their first dimension; "
            "pad samples of different lengths in collate_fn"
        )
    return batch


def estimate_step(
    cfg: Settings,
    like: Any,
    size: int,
    *,
    data_ranks: int = 1,
    tensor_ranks: int = 0,
    stages: int = 1,
    keep_gradients: bool = False,
) -> Memory:
    """Estimate the memory of a training step by running it on fake tensors.

    Args:
        cfg: Checked configuration.
        like: A batch of any size and structure.
        size: Samples in the batch of one rank.
        data_ranks: Ranks of FSDP, if ``tensor_ranks`` is set.
        tensor_ranks: Ranks of tensor parallelism; 0: the model is not sharded.
        stages: Pipeline stages, with at least four microbatches.
        keep_gradients: Whether gradients stay allocated between steps.

    Raises:
        EstimationError: The model depends on the values of tensors, or cannot be sharded as requested.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # its import takes a second

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # errors are raised below
    precision = CANONICAL.get(str(cfg.trainer["precision"]), str(cfg.trainer["precision"]))
    dtype = DTYPES.get(precision.partition("-")[0])
    mixed = precision.endswith("-mixed") or precision.startswith("transformer")
    batches = min(2, int(cfg.trainer.get("accumulate_grad_batches", 1)))
    try:
        with _fake_process_group(data_ranks * tensor_ranks) as ranks, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disable_mpi_detection()
            trainer = L.Trainer(accelerator="cpu", devices=1, barebones=True)  # needs no hooks of the task
            with torch.device("meta"):
                task = _task(cfg, trainer)
            if dtype and not mixed:
                task.to(dtype)
            mesh = ranks and init_device_mesh(
                "cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data_parallel", "tensor_parallel")
            )
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
            with fake_mode:
                _materialize(task)
            if mesh:
                _shard(task.model, mesh)  # outside the fake mode, since it reads the mesh
            with fake_mode:
                parts = [torch.zeros((size, *t.shape[1:]) if t.ndim else (), dtype=t.dtype) for t in tensors(like)]
                if dtype and not mixed:
                    parts = [part.to(dtype) if part.is_floating_point() else part for part in parts]
                batch = with_tensors(like, parts)
                cast = torch.autocast("cpu", dtype) if dtype and mixed else nullcontext()
                if stages > 1:
                    return _pipeline(task, batch, stages, cast)
                return _step(task, _optimizers(task.configure_optimizers()), batch, batches, cast, keep_gradients)
    except (ConfigError, EstimationError):
        raise
    except Exception as error:  # a model's code may raise anything on fake tensors
        raise EstimationError(one_line(error)[:200]) from error


def _step(
    task: L.LightningModule,
    optimizers: list[Optimizer],
    batch: Any,
    batches: int,
    cast: Any,
    keep_gradients: bool,
) -> Memory:
    """Run a step after a warm-up that allocates the state of the optimizer."""
    trainable = [p for p in task.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    _optimizer_step(optimizers, keep_gradients)
    # The first step with DTensors also allocates full tensors for sharding propagation, so measure the second.
    for _ in range(2 if any(isinstance(parameter, DTensor) for parameter in trainable) else 1):
        with _make_tracker(task, *optimizers, *tensors(batch)) as tracker:
            for number in range(batches):
                before = _total(tracker)
                with cast:
                    loss: Any = task.training_step(batch, number)
                activations = _total(tracker) - before
                (loss["loss"] if isinstance(loss, dict) else loss).backward()
                del loss
            _optimizer_step(optimizers, keep_gradients)
    states = [v for o in optimizers for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    weights = _bytes([*task.parameters(), *task.buffers()])
    return Memory(weights, _bytes(trainable), _bytes(states), activations, _total(tracker, "peak"))


def _pipeline(task: Any, batch: Any, stages: int, cast: Any) -> Memory:
    """Estimate the stage that needs most: earlier ones keep more microbatches, the last has outputs and loss."""
    if not isinstance(task.model, SplitsIntoStages):
        raise EstimationError(f"{type(task.model).__name__} has no pipeline stages; add a method stages(count)")
    inputs, targets = split_batch(batch)
    if not isinstance(inputs, Tensor):
        raise EstimationError("the stages of a pipeline take one tensor, not several inputs")
    count = max(4, stages)
    optimizers = _optimizers(task.configure_optimizers())
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _optimizer_step(optimizers, keep_gradients=False)
    state_of: dict[Any, Any] = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    x = inputs[: len(inputs) // count]
    found: list[Memory] = []
    with _make_tracker(task) as tracker:
        for number, stage in enumerate(task.model.stages(stages)):
            before = _total(tracker)
            with cast:
                outputs = stage(x)
            activations = (_total(tracker) - before) * min(count, stages - number)
            parameters = list(stage.parameters())
            states = [v for p in parameters for v in state_of.get(p, {}).values() if isinstance(v, Tensor)]
            sizes = (_bytes([*parameters, *stage.buffers()]), _bytes(parameters), _bytes(states), activations)
            found.append(Memory(*sizes, sum(sizes)))
            x = outputs.detach().requires_grad_()
        before = _total(tracker)
        with cast:
            outputs = torch.zeros((len(inputs), *x.shape[1:]), dtype=x.dtype, requires_grad=True)
            loss = task.losses(outputs, targets).mean()
        after = _total(tracker) - before  # on each rank, after its microbatches
        del loss
    peaks = [max(m.peak, m.peak - m.activations + after) for m in found]
    peaks[-1] = found[-1].peak + after
    return max((replace(m, peak=peak) for m, peak in zip(found, peaks, strict=True)), key=lambda m: m.peak)


def _optimizer_step(optimizers: Sequence[Optimizer], keep_gradients: bool) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_gradients)


def _make_tracker(task: nn.Module, *others: Optimizer | Tensor) -> MemTracker:
    """Return torch's tracker of the bytes that are alive, which knows these objects."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    for hook in ("_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook", "_post_bw_hook"):
        setattr(tracker, hook, lambda *_: None)  # which attribute memory to modules, and refuse frozen parameters
    tracker.track_external(task, *others)
    return tracker


def _total(tracker: MemTracker, state: str = "current") -> int:
    """Bytes of all tensors that are alive, or were at the ``peak``."""
    return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot(state).values())


def _task(cfg: Settings, trainer: L.Trainer) -> Any:
    """Build the task without scheduler and metrics."""
    task = build(cfg.task, "task")
    if isinstance(task, NativeTask):
        task.scheduler = None
    for module in task.modules():
        if isinstance(module, Metric):
            module.update = lambda *values: None  # type: ignore[method-assign]  # metrics may depend on values
    task.trainer = trainer
    return task.train()


def _materialize(task: nn.Module) -> None:
    """Replace meta parameters and buffers by fake CPU tensors."""
    seen: dict[int, Any] = {}
    for module in task.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None:
                continue
            new = seen.setdefault(id(old), torch.empty_like(old, device="cpu"))
            if name in module._buffers:
                module._buffers[name] = new
            else:
                module._parameters[name] = seen[id(old)] = (
                    new if isinstance(new, nn.Parameter) else nn.Parameter(new, old.requires_grad)
                )


def _shard(model: Any, mesh: DeviceMesh) -> None:
    if isinstance(model, ShardsWeights):
        model.shard(mesh)
    elif mesh["tensor_parallel"].size() > 1:
        raise EstimationError(f"{type(model).__name__} cannot be sharded by tensors; add a method shard(mesh)")
    fully_shard_units(model, mesh["data_parallel"])


def _optimizers(configured: Any) -> list[Optimizer]:
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, dict):
        configured = configured.values()
    elif not isinstance(configured, list | tuple):
        configured = ()
    return [optimizer for item in configured for optimizer in _optimizers(item)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


@contextmanager
def _fake_process_group(ranks: int) -> Iterator[bool]:
    """Create a process group whose other ranks do not exist; yields whether there is one."""
    if not ranks:
        yield False
        return
    import_module("torch.distributed._tools.fake_collectives")  # registers the shapes that collectives return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield True
    finally:
        dist.destroy_process_group()
