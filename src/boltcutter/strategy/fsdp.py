"""torch's FSDP1, with gradient norms over all ranks, and checkpoints that are loaded without executing code."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.internals import replaced
from boltcutter.protocols import gather_objects
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.units import find_units

PREFIX = "_fsdp_wrapped_module."  # which FSDP adds to parameter names


class FSDPStrategy(strategies.FSDPStrategy):
    """Lightning's ``FSDPStrategy`` with clipping by the norm, and without unpickling of arbitrary objects.

    Each rank has a shard of every gradient, so norms are reduced over all ranks, for clipping and for callbacks. The
    arguments are those of Lightning's class.
    """

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator; Lightning checks that it is not a CPU for its own class only."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        if isinstance(accelerator, CPUAccelerator):
            raise ValueError(
                "trainer.strategy=fsdp, trainer.accelerator=cpu: it needs CUDA devices; try trainer=fsdp2, which "
                "shards on CPUs too"
            )
        self._accelerator = accelerator

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model, and replace clipping by the norm by that over all ranks."""
        # Lightning's plugin has no reference to the sharded module, and raises an error instead.
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Create the optimizers, then shard, by blocks unless another policy was given.

        FSDP keeps the parameters, but makes them one-dimensional, and parameter groups depend on their shapes.
        """
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        if trainer.state.fn == TrainerFn.FITTING and self.kwargs.get("use_orig_params"):
            super().setup_optimizers(trainer)
        units = find_units(model)
        policy = {} if self.kwargs.get("auto_wrap_policy") else {"auto_wrap_policy": CustomPolicy(units.__contains__)}
        with replaced(self, "kwargs", {**self.kwargs, **policy}):
            return super()._setup_model(model)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Create the optimizers, unless they were before the model was sharded."""
        if not self.kwargs.get("use_orig_params"):
            super().setup_optimizers(trainer)

    def teardown(self) -> None:
        """Restore the plugin's own clipping."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Total norm of the gradients of all ranks, on all ranks; non-finite if any gradient is.

        Args:
            parameters: Parameters of this rank that have a gradient.
            norms: Norm of this rank's shard of each gradient, of shape (number of parameters,).
        """
        total = norms.square().sum()
        dist.all_reduce(total)
        return total.sqrt()

    def gather_names(self, names: list[str]) -> list[str]:
        """Parameter names of all ranks, without duplicates and without FSDP's prefix."""
        return list(dict.fromkeys(name.replace(PREFIX, "") for some in gather_objects(names) for name in some))

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise StrategyError(
                f"trainer.gradient_clip_val={clip_val}: the module wraps its submodules itself, so FSDP cannot compute "
                "their total norm; set trainer.gradient_clip_val=null"
            )
        self.model.clip_grad_norm_(clip_val)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer states from a file into the sharded model.

        Raises:
            ValueError: The path is a folder, whose metadata torch would unpickle, executing code.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            raise ValueError(
                f"trainer.strategy.state_dict_type=sharded: {path} is a folder, and reading it would execute code; set "
                "it to full, or use trainer=fsdp2"
            )
        writer: Any = self.checkpoint_io
        options = {"lazy": True} if isinstance(writer, AtomicCheckpointIO) else {"weights_only": True}
        module = import_module(strategies.FSDPStrategy.__module__)
        with replaced(module, "_lazy_load", lambda place: writer.load_checkpoint(place, **options)):
            return super().load_checkpoint(path, weights_only=True)
