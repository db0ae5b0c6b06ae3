"""Memory of a training step, on devices that need not be there.

The step is really taken, but on tensors without contents, which cost neither memory nor time: the model is made and
cut, run forward and back, and stepped, while torch notes what would be alive. Ranks are imagined likewise.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from weakref import finalize

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from boltcutter import build
from boltcutter.config import ConfigError, DictConfig, one_line
from boltcutter.environment.mpi import disable_mpi_detection
from boltcutter.precision import CANONICAL

DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64, "transformer": torch.bfloat16}


class EstimationError(RuntimeError):
    """The model cannot be run on tensors without contents, or not be cut so."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, or on the one that needs most.

    Args:
        weights: Parameters and buffers.
        gradients: Of all parameters that are trained.
        optimizer: What the optimizer keeps.
        activations: What the backward pass needs of the forward pass; gathered weights too, where these are cut.
        peak: The most that is alive at once.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class SampleSpec:
    """What one sample's tensors look like.

    Args:
        shapes: Without the batch.
        dtypes: Of each.
    """

    shapes: Sequence[torch.Size]
    dtypes: Sequence[torch.dtype]

    def batch(self, size: int) -> tuple[Tensor, ...]:
        """Zeros, in the mode that torch is in."""
        both = zip(self.shapes, self.dtypes, strict=True)
        return tuple(torch.zeros((size, *shape), dtype=dtype) for shape, dtype in both)


def sample_spec(data: L.LightningDataModule) -> SampleSpec:
    """What a sample of the training split looks like.

    Raises:
        ConfigError: A batch is not made of tensors.
    """
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    if not isinstance(batch, list | tuple) or not all(isinstance(part, Tensor) for part in batch):
        raise ConfigError("data: memory can be estimated for batches that are tuples of tensors alone")
    return SampleSpec([part.shape[1:] for part in batch], [part.dtype for part in batch])


def estimate_step(
    cfg: DictConfig,
    sample: SampleSpec,
    size: int,
    *,
    data_ranks: int = 1,
    tensor_ranks: int = 0,
    spread: int = 1,
    stages: int = 1,
    held: bool = False,
) -> Memory:
    """Take a step of ``cfg`` on tensors without contents.

    Args:
        cfg: Checked.
        sample: What the batch is made of.
        size: Samples in the batch of one rank.
        data_ranks: Over which weights are cut between layers, where ``tensor_ranks`` is set.
        tensor_ranks: Over which they are cut within layers; 0: they are not cut at all.
        spread: Devices of one process that share the batch; their outputs come together on the first.
        stages: Ranks that have some of the layers each, through which at least four parts of the batch flow.
        held: Whether gradients keep their memory from step to step.

    Raises:
        EstimationError: The model looks at numbers, or cannot be cut so.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second that nothing else needs

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what fails is told below
    precision = CANONICAL.get(str(cfg.trainer.precision), str(cfg.trainer.precision))
    dtype = DTYPES.get(precision.partition("-")[0])
    mixed = precision.endswith("-mixed") or precision.startswith("transformer")
    parts = min(2, int(cfg.trainer.get("accumulate_grad_batches", 1)))
    try:
        with _imagined(data_ranks * tensor_ranks) as ranks, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disable_mpi_detection()
            trainer = L.Trainer(accelerator="cpu", devices=1, barebones=True)  # asks nothing of the task
            with torch.device("meta"):
                task = _task(cfg, trainer)
            if dtype and not mixed:
                task.to(dtype)
            mesh = ranks and init_device_mesh(
                "cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data_parallel", "tensor_parallel")
            )
            empty = FakeTensorMode(allow_non_fake_inputs=True)
            with empty:
                _place(task)
            if mesh:
                _shard(task.model, mesh)  # the mesh has contents, which are looked at
            with empty:
                if spread > 1:
                    _spread(task.model, spread)
                batch = sample.batch(size)
                if dtype and not mixed:
                    batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in batch)
                cast = torch.autocast("cpu", dtype) if dtype and mixed else nullcontext()
                if stages > 1:
                    return _pipeline(task, batch, stages, cast)
                return _step(task, _optimizers(task.configure_optimizers()), batch, parts, cast, held)
    except (ConfigError, EstimationError):
        raise
    except Exception as error:  # whatever a model's code does with tensors that have no contents
        raise EstimationError(one_line(error)[:200]) from error


def _step(
    task: L.LightningModule, optimizers: list[Optimizer], batch: tuple[Tensor, ...], parts: int, cast: Any, held: bool
) -> Memory:
    """A step, with what the optimizer would have made in one before."""
    trained = [p for p in task.parameters() if p.requires_grad]
    with Watch() as watch:
        watch.see([*task.parameters(), *task.buffers(), *batch])
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        _advance(optimizers, held)
        # At first torch tries out what happens to shapes that are cut, on tensors that are whole.
        for _ in range(2 if any(isinstance(parameter, DTensor) for parameter in trained) else 1):
            watch.most = watch.alive
            for number in range(parts):
                before = watch.alive
                with cast:
                    loss: Any = task.training_step(batch, number)
                activations = watch.alive - before
                (loss["loss"] if isinstance(loss, dict) else loss).backward()
                del loss
            _advance(optimizers, held)
    states = [v for o in optimizers for kept in o.state.values() for v in kept.values() if isinstance(v, Tensor)]
    weights = _bytes([*task.parameters(), *task.buffers()])
    return Memory(weights, _bytes(trained), _bytes(states), activations, watch.most)


def _pipeline(task: Any, batch: tuple[Tensor, ...], stages: int, cast: Any) -> Memory:
    """The stage that needs most: an earlier one keeps more parts of the batch, the last one has outputs and loss."""
    if not callable(getattr(task.model, "stages", None)):
        raise EstimationError(f"{type(task.model).__name__} does not say its stages; give it a method stages(count)")
    count = max(4, stages)
    optimizers = _optimizers(task.configure_optimizers())
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _advance(optimizers, held=False)
    kept: dict[Any, Any] = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    x = batch[0][: len(batch[0]) // count]
    found: list[Memory] = []
    with Watch() as watch:
        for number, stage in enumerate(task.model.stages(stages)):
            before = watch.alive
            with cast:
                made = stage(x)
            activations = (watch.alive - before) * min(count, stages - number)
            own = list(stage.parameters())
            states = [v for p in own for v in kept.get(p, {}).values() if isinstance(v, Tensor)]
            sizes = (_bytes([*own, *stage.buffers()]), _bytes(own), _bytes(states), activations)
            found.append(Memory(*sizes, sum(sizes)))
            x = made.detach().requires_grad_()
        before = watch.alive
        with cast:
            outputs = torch.zeros((len(batch[0]), *x.shape[1:]), dtype=x.dtype, requires_grad=True)
            loss = task.losses(outputs, batch[1]).mean()
        after = watch.alive - before  # on each rank, once its parts are done
        del loss
    peaks = [max(m.peak, m.peak - m.activations + after) for m in found]
    peaks[-1] = found[-1].peak + after
    return max((replace(m, peak=peak) for m, peak in zip(found, peaks, strict=True)), key=lambda m: m.peak)


def _advance(optimizers: Sequence[Optimizer], held: bool) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=not held)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors without contents that are alive.

    Attributes:
        alive: Now.
        most: At most at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0
        self._sizes: dict[int, int] = {}
        self._mode: Any = None

    def __enter__(self) -> Watch:
        """Begin, in the mode that torch is in."""
        from torch._guards import active_fake_mode

        self._mode, self._resize = active_fake_mode(), torch.UntypedStorage.resize_
        watch, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            watch._count(id(storage), storage.nbytes(), known=True)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # no operation of tensors
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its parts comes here again
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without contents, it would be a copy
        made = func(*args, **(kwargs or {}))
        self.see(tree_leaves(made))
        return made

    def see(self, values: Iterable[Any]) -> None:
        """Count those of ``values`` that are tensors and have memory of their own."""
        for value in values:
            tensor = value.to_local() if isinstance(value, DTensor) else value
            # Others are those with which torch works out what shapes will be.
            if isinstance(tensor, Tensor) and getattr(tensor, "fake_mode", None) is self._mode:
                storage = tensor.untyped_storage()
                if id(storage) not in self._sizes:
                    finalize(storage, self._count, id(storage), 0)
                    self._count(id(storage), storage.nbytes())

    def _count(self, key: int, size: int, known: bool = False) -> None:
        if known and key not in self._sizes:
            return
        self.alive += size - self._sizes.pop(key, 0)
        if size or known:
            self._sizes[key] = size
        self.most = max(self.most, self.alive)


def _task(cfg: DictConfig, trainer: L.Trainer) -> Any:
    """The task, without schedule and metrics."""
    task = build.build(cfg.task, "task")
    if hasattr(task, "scheduler"):
        task.scheduler = None
    for module in task.modules():
        if isinstance(module, Metric):
            module.update = lambda *values: None  # type: ignore[method-assign]  # it may look at numbers
    task.trainer = trainer
    return task.train()


def _place(task: nn.Module) -> None:
    """Give parameters and buffers a place on the processor, which they only seem to have."""
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
    if not callable(getattr(model, "shard", None)):
        raise EstimationError(f"{type(model).__name__} does not say how it is cut; give it a method shard(mesh)")
    model.shard(mesh)


def _spread(model: nn.Module, devices: int) -> None:
    """The first device computes its part of the batch, and gets as much from each other."""
    forward = model.forward
    model.forward = lambda x: torch.cat([forward(x[: len(x) // devices])] * devices)


def _optimizers(made: Any) -> list[Optimizer]:
    if isinstance(made, Optimizer):
        return [made]
    inner = made.values() if isinstance(made, dict) else made if isinstance(made, list | tuple) else ()
    return [optimizer for part in inner for optimizer in _optimizers(part)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


@contextmanager
def _imagined(ranks: int) -> Iterator[bool]:
    """A process group whose other ranks are not there."""
    if not ranks:
        yield False
        return
    import_module("torch.distributed._tools.fake_collectives")  # what they do to shapes
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield True
    finally:
        dist.destroy_process_group()
