"""Where a run runs: its nodes, devices and ranks, as requested or as the trainer has them, and what that refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from boltcutter.protocols import data_parallel

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.callbacks import Callback

ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # settings of a trainer with a single process


@dataclass(frozen=True)
class Topology:
    """Nodes, devices and ranks of a run.

    Args:
        num_nodes: Number of nodes.
        num_devices: Devices on each node.
        num_processes: Processes on each node: usually one for each device, but a single one may drive all.
        world_size: Ranks in total.
        data_ranks: Ranks that process different samples, over which a global batch divides.
    """

    num_nodes: int
    num_devices: int
    num_processes: int
    world_size: int
    data_ranks: int

    @classmethod
    def of(cls, trainer: L.Trainer) -> Topology:
        """Return the topology of a trainer."""
        strategy = trainer.strategy
        processes, ranks = getattr(strategy, "num_processes", 0) or 1, data_parallel(strategy).size
        return cls(trainer.num_nodes, trainer.num_devices, processes, trainer.world_size, ranks)

    @classmethod
    def requested(cls, trainer: Mapping[str, Any]) -> Topology:
        """Return the topology for a job with these settings of the trainer, with a rank for each device.

        Raises:
            ValueError: The numbers of nodes or devices are missing, or depend on the machine.
        """
        nodes, devices = trainer.get("num_nodes", 1), count_devices(trainer)
        if not devices:
            given = trainer.get("devices", "auto")
            raise ValueError(f"trainer.devices={given}: a job needs an explicit number; try trainer.devices=1")
        if not isinstance(nodes, int) or nodes < 1:
            raise ValueError(f"trainer.num_nodes={nodes} is not a number of nodes; try trainer.num_nodes=1")
        return cls(nodes, devices, devices, nodes * devices, nodes * devices)

    @property
    def total_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.num_devices

    def __str__(self) -> str:
        return f"trainer.devices={self.num_devices}, trainer.num_nodes={self.num_nodes}"


@dataclass(frozen=True)
class PlannedTraining:
    """A training that has not started, on this machine or by a job.

    Args:
        task: That is to be trained; ``configure_model`` was not called.
        topology: Its nodes, devices and ranks.
        strategy: Strategy, or the name of one of Lightning's.
        precision: Such as ``16-mixed``.
        callbacks: Of the trainer.
        accumulated: Batches of which gradients are accumulated.
        batch_size: Of all ranks; 0: unknown.
        checkpoint_io: Writes checkpoints; None: Lightning's own.
        device: Type of the devices; None: a job's, unknown here.
    """

    task: Any
    topology: Topology
    strategy: Any
    precision: str
    callbacks: Sequence[Callback]
    accumulated: int = 1
    batch_size: int = 0
    checkpoint_io: Any = None
    device: str | None = None

    @classmethod
    def of(cls, trainer: L.Trainer, task: Any, data: Any) -> PlannedTraining:
        """The training of a trainer that was built."""
        strategy, size = trainer.strategy, getattr(data, "batch_size", None)
        return cls(
            task,
            Topology.of(trainer),
            strategy,
            str(trainer.precision),
            trainer.callbacks,  # type: ignore[attr-defined]
            trainer.accumulate_grad_batches,
            size if isinstance(size, int) else 0,
            strategy.checkpoint_io,
            strategy.root_device.type,
        )

    def refusals(self) -> list[str]:
        """What strategy, precision and task do not support, each with its remedy."""
        plugin = getattr(self.strategy, "precision_plugin", None)
        parts = [part for part in (self.strategy, plugin, self.task) if isinstance(part, Refuses)]
        return [text for part in parts for text in part.refuses_training(self)]


@runtime_checkable
class Refuses(Protocol):
    """A strategy, precision or task that does not support each training."""

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """What is not supported, each with its remedy."""
        yield from ()


def count_devices(trainer: Mapping[str, Any]) -> int:
    """Return the number of devices on each node in settings of the trainer; 0 if the machine decides, as for ``auto``.

    Like Lightning, it takes a number, also as text, or the indices of devices: ``[0, 1]`` or ``0,1``.
    """
    devices: Any = trainer.get("devices", "auto")
    if isinstance(devices, str):
        indices = [index for index in devices.split(",") if index]
        devices = indices if "," in devices else int(devices) if devices.isdecimal() else 0
    return max(0, devices) if isinstance(devices, int) else len(devices) if hasattr(devices, "__len__") else 0


def check_batch_size(batch_size: int, ranks: int) -> None:
    """Check that a global batch is not empty and divides over the data-parallel ranks.

    Raises:
        ValueError: The batch is empty or does not divide.
    """
    if batch_size < 1:
        raise ValueError(f"data.batch_size={batch_size} must be 1 or more; try 64")
    if batch_size % ranks:
        fitting = batch_size + -batch_size % ranks
        raise ValueError(f"data.batch_size={batch_size} does not divide over {ranks} ranks; try {fitting}")
