"""Data parallel in a single process, which Lightning 2 no longer offers: replicas of the model on several devices."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import nn

from boltcutter.protocols import CompilesModel
from boltcutter.strategy.errors import StrategyError
from boltcutter_parallel.replicas import Replicas


class DataParallelStrategy(ParallelStrategy):
    """Replicate the model to all devices at each step, scatter the batch, and gather the outputs on the first device.

    The loss, the metrics and all logged values are those of the whole batch, and checkpoints are those of a single
    device.

    Args:
        module: Name of the task's attribute that holds the module to replicate.
        options: Arguments of Lightning's ``ParallelStrategy``.
    """

    strategy_name = "dp"
    # There is a single process, in which nothing is communicated.
    global_rank: Any = 0
    local_rank: Any = 0
    node_rank: Any = 0
    world_size: Any = 1
    reduce: Any = SingleDeviceStrategy.reduce
    all_gather: Any = SingleDeviceStrategy.all_gather
    barrier: Any = SingleDeviceStrategy.barrier
    broadcast: Any = SingleDeviceStrategy.broadcast
    reduce_boolean_decision: Any = SingleDeviceStrategy.reduce_boolean_decision
    model_to_device: Any = SingleDeviceStrategy.model_to_device

    def __init__(self, module: str = "model", **options: Any) -> None:
        super().__init__(**options)
        self.module = module
        self._replicated: nn.Module | None = None

    @property
    def root_device(self) -> torch.device:
        """The first device, which holds the original model and the outputs."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler yields whole batches."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: L.Trainer) -> None:
        """Move the model, and replace its ``forward`` by one that runs replicas."""
        super().setup(trainer)
        if len(self.parallel_devices or ()) < 2:
            return
        model = getattr(self.lightning_module, self.module, None)
        if not isinstance(model, nn.Module):
            raise StrategyError(f"trainer.strategy.module={self.module}: the task has no such module to replicate")
        task = self.lightning_module
        if isinstance(task, CompilesModel) and (compiled := task.compile_model):
            raise StrategyError(
                f"task.compile={str(compiled).lower()}: trainer=dp replicates the model at each step, and replicas are "
                "not compiled; use trainer=ddp, or set task.compile=false"
            )
        if self._replicated is None:
            print("hint: torch recommends trainer=ddp, which does not replicate the model", file=sys.stderr)
        self._restore_forward()
        # Set on the instance rather than by a wrapper, so that the keys of checkpoints do not change.
        model.forward = Replicas(model, self.parallel_devices or ())
        self._replicated = model

    def teardown(self) -> None:
        """Restore the model's own ``forward``."""
        self._restore_forward()
        super().teardown()

    def _restore_forward(self) -> None:
        if self._replicated is not None:
            vars(self._replicated).pop("forward", None)
