"""Data parallel in one process: copies of the model on several devices, which Lightning 2 has no more."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from boltcutter.strategy.replicas import Replicas


class ReplicationError(RuntimeError):
    """The model cannot be copied at each step."""

    hide_traceback = True


class DataParallelStrategy(ParallelStrategy):
    """Each step copies the model to all devices, gives each a part of the batch, and brings their outputs together.

    Loss, metrics and whatever is logged are then those of the whole batch, as on one device, and so are checkpoints.

    Args:
        module: Which part of the task is copied: the name of the attribute through which it calls the model.
        options: As for Lightning's ``ParallelStrategy``.
    """

    strategy_name = "dp"

    def __init__(self, module: str = "model", **options: Any) -> None:
        super().__init__(**options)
        self.module = module
        self._spread: nn.Module | None = None

    @property
    def root_device(self) -> torch.device:
        """Where the model is, and all but its copies."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """There is one process."""
        return 0

    local_rank = node_rank = global_rank

    @property
    def world_size(self) -> int:
        """There is one process."""
        return 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Whole batches."""
        return {"num_replicas": 1, "rank": 0}

    def model_to_device(self) -> None:
        """Move the model."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        """Move the model, and spread its calls from here on.

        Raises:
            ReplicationError: It is not there, or compiled.
        """
        super().setup(trainer)
        if len(self.parallel_devices or ()) < 2:
            return
        model = getattr(self.lightning_module, self.module, None)
        if not isinstance(model, nn.Module):
            raise ReplicationError(f"trainer.strategy.module={self.module}: the task has no such module to copy")
        if compiled := getattr(self.lightning_module, "compile_model", False):
            raise ReplicationError(
                f"task.compile={str(compiled).lower()}: trainer=dp copies the model at each step, and what is compiled "
                "is the model alone; take trainer=ddp, or task.compile=false"
            )
        if self._spread is None:
            print("hint: torch recommends trainer=ddp, which copies no model", file=sys.stderr)
        self._unspread()
        # On the instance, so that keys of checkpoints stay as they are.
        model.forward = Replicas(model, self.parallel_devices or ())
        self._spread = model

    def teardown(self) -> None:
        """Give the model its own calls back."""
        self._unspread()
        super().teardown()

    def _unspread(self) -> None:
        if self._spread is not None:
            vars(self._spread).pop("forward", None)

    # What there is is that of the whole batch, and nobody is waited for.
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What there is is that of the whole batch."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """There is one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """There is one process."""
        return decision

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Nobody is waited for."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """There is one process."""
        return obj
