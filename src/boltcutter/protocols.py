"""What components and core expect of each other beyond the hooks of Lightning.

A class satisfies a protocol by having its attributes and methods; it need not inherit from it. All of them are
optional: a class without them trains, and the docstrings say what it gains with them.

``isinstance`` with a protocol takes tens of microseconds and evaluates properties, so it is called once per training or
epoch, not at each step. Since Python 3.12 it ignores what ``__getattr__`` returns, such as submodules (``find_model``).

A single attribute needs no protocol; ``docs/modules.md`` lists those that are read, such as ``kind`` and ``monitor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # this module is also imported by commands that do not need torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

# Models


@runtime_checkable
class ShardsWeights(Protocol):
    """A model that says how its matrices are sharded, as tensor parallelism in ``trainer=fsdp2`` requires."""

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard matrices over ``mesh["tensor_parallel"]``; all weights are then sharded by blocks, unless it does so.

        The attribute ``row_permutations`` has, by parameter name, how it reorders rows; checkpoints have the old order.
        A method ``check_shards(ranks)`` raises a ``ValueError`` for what is not supported, before there are ranks.
        """


@runtime_checkable
class SplitsIntoStages(Protocol):
    """A model that can be trained by ``trainer=pipeline``."""

    def stages(self, count: int) -> list[nn.Module]:
        """Split the model into modules that, applied in turn, compute its outputs."""


# Tasks


@runtime_checkable
class NativeTask(Protocol):
    """A task like the library's own: its network is the attribute ``model``, and it lists the metrics that it logs.

    Monitored metrics are checked before training, ``init_from`` loads weights into ``model``, and gradient norms that a
    callback has computed are reused for clipping.
    """

    optimizer: Callable[..., Any]  # called with the parameters
    scheduler: Callable[..., Any] | None  # called with the optimizer
    l1: float  # factors of penalties of the weights
    l2: float
    gradient_norm: Tensor | None  # of all gradients before clipping, if a callback has computed it in this step

    @property
    def logged_metrics(self) -> set[str]:
        """Names of all metrics that the task logs."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the model to predictions."""


@runtime_checkable
class GeneratesTokens(Protocol):
    """A task whose predictions are continuations of a text."""

    def generate(
        self, prompt: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Iterator[int]:
        """Generate tokens that continue a prompt of shape (T,)."""


# Data modules, loaders and datasets


@runtime_checkable
class NativeData(Protocol):
    """A data module like the library's own: ``batch_size`` is global, and its position is exact.

    A resumed run detects changed data, and any split can be evaluated. See ``boltcutter.data.module.DataModule``.
    """

    batch_size: int
    resume_exact: bool
    statistics: dict[str, Any]
    splits: Any

    @property
    def empty_splits(self) -> set[str]:
        """Names of splits without samples; known after ``setup``."""

    def infer_settings(self) -> dict[str, Any]:
        """Return the values that the data determines for settings that may be null."""

    def fingerprint(self) -> str:
        """Hash that changes when the contents of a split change."""

    def loader(self, split: Any, *, shuffle: bool = False, drop_last: bool = False) -> Any:
        """Loader of this rank's batches of a split: ``train``, ``val`` or ``test``."""

    def read(self, paths: Sequence[Path]) -> tuple[Any, list[str]]:
        """Read new inputs for prediction, with a name for each."""


# Callbacks


@runtime_checkable
class FollowsReplay(Protocol):
    """A callback whose hooks within a step need not be called where steps are replayed as CUDA graphs.

    They are called when a step is captured, while ``is_capturing`` of the task is true: what they compute on the device
    is a part of the graph. Other callbacks with such hooks forbid captures.
    """

    def refuses_capture(self, optimizer: Any) -> str | None:
        """Why steps of this optimizer cannot be captured; None: they can."""

    def after_replay(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Do what the hooks would have done on the host, after each replay with an optimizer step."""


# Loggers


@runtime_checkable
class BuffersMetrics(Protocol):
    """A logger whose metrics are written before each checkpoint, so that none logged before it is lost."""

    def flush(self) -> None:
        """Write the metrics logged so far."""

    def discard(self) -> None:
        """Drop buffered metrics, and write nothing more, as another process has taken over the run folder."""


@runtime_checkable
class ClosesWithExitCode(Protocol):
    """A logger that marks the run as completed or failed."""

    def close(self, exit_code: int) -> None:
        """Finish logging; called at the end of the process."""


# Strategies and checkpoint IO


@runtime_checkable
class ReducesGradientNorms(Protocol):
    """A strategy whose ranks hold different weights or shards, so that norms of gradients must be reduced."""

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Total norm of the gradients of all ranks, given this rank's parameters and the norm of each gradient."""

    def gather_names(self, names: list[str]) -> list[str]:
        """Parameter names of all ranks."""


@runtime_checkable
class WaitsForWrites(Protocol):
    """A checkpoint IO that may write asynchronously."""

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""


# Exceptions


@runtime_checkable
class PlannedExit(Protocol):
    """A ``SystemExit`` that was requested, such as by a signal."""

    status: int  # exit status without a launcher that requeues the run
    reason: str  # recorded with the attempt
    is_collective: bool  # whether all ranks exit at the same point, so that they can wait for one another


class DataParallel(NamedTuple):
    """The position of a rank among those that process different samples."""

    size: int
    rank: int


def data_parallel(strategy: Any) -> DataParallel:
    """Return the number of data-parallel ranks, and the index of this one; others process the same samples."""
    sampler = getattr(strategy, "distributed_sampler_kwargs", None) or {}  # of Lightning's strategies for several ranks
    return DataParallel(int(sampler.get("num_replicas", 1)), int(sampler.get("rank", 0)))


def gather_objects(local: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks; only this one without a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return [local]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, local)
    return found


def find_model(task: nn.Module) -> Any:
    """Return the attribute ``model`` of any module; in those of users it may be missing, or anything."""
    return getattr(task, "model", None)


def is_sharded(loader: Any) -> bool:
    """Whether a loader or dataset yields only the samples of its rank."""
    return bool(getattr(loader, "is_sharded", False))


def handles_signals(callbacks: Sequence[Any]) -> bool:
    """Whether a callback saves and exits after a signal."""
    return any(getattr(callback, "handles_signals", False) for callback in callbacks)
