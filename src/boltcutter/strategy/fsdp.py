"""Torch's first FSDP, with norms over all ranks, whose checkpoints are read as data alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

PREFIX = "_fsdp_wrapped_module."  # what FSDP puts into names


class GradientClippingError(RuntimeError):
    """Gradients cannot be clipped by their norm, because the module sharded its parts itself."""

    hide_traceback = True


class FSDPStrategy(strategies.FSDPStrategy):
    """Lightning's, which would unpickle a checkpoint with all the code that it holds, and does not clip by the norm.

    Each rank has a shard of every gradient, so norms are taken over all ranks, for clipping and for callbacks.

    Args:
        options: As for Lightning's ``FSDPStrategy``.
    """

    @property
    def accelerator(self) -> Accelerator | None:
        """What the trainer has chosen; Lightning refuses a CPU for its own class alone.

        Raises:
            ValueError: It is a CPU.
        """
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
        """Shard the model; have gradients clipped by the norm over all ranks."""
        # Lightning's plugin has no reference to the sharded module, and refuses.
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip
        super().setup(trainer)

    def teardown(self) -> None:
        """Give the plugin its own method back."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        """The norm of the gradients of all ranks; not finite on all of them where it is not on one.

        Args:
            parameters: Those of this rank that have a gradient.
            norms: Of the shard of each gradient.
        """
        total = norms.square().sum()
        dist.all_reduce(total)
        return total.sqrt()

    def gather_names(self, mine: list[str]) -> list[str]:
        """The names that any rank gives, without what FSDP puts into them."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return list(dict.fromkeys(name.replace(PREFIX, "") for names in everyone for name in names))

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise GradientClippingError(
                f"trainer.gradient_clip_val={clip_val}: the module shards its parts itself, so that FSDP knows no norm "
                "over all of them; set trainer.gradient_clip_val=null"
            )
        self.model.clip_grad_norm_(clip_val)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a file, and give its weights and optimizer states to the sharded model.

        Raises:
            ValueError: It is a folder, whose list of contents torch would execute.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            raise ValueError(
                f"trainer.strategy.state_dict_type=sharded: {path} is a folder, and reading it would execute code; set "
                "it to full, or take trainer=fsdp2"
            )
        writer: Any = self.checkpoint_io
        options = {"lazy": True} if hasattr(writer, "load_sharded") else {"weights_only": True}
        with mock.patch(
            f"{strategies.FSDPStrategy.__module__}._lazy_load", lambda place: writer.load_checkpoint(place, **options)
        ):
            return super().load_checkpoint(path, weights_only=True)
