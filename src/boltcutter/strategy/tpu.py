"""Checkpoints on TPUs, in addition to Lightning's own strategies for them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from boltcutter.protocols import WaitsForWrites


class HostCheckpointIO(_WrappingCheckpointIO):
    """Move tensors from the devices to host memory before the wrapped ``CheckpointIO`` writes them.

    Lightning's strategies for TPUs accept only their own ``CheckpointIO`` or a wrapper such as this.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint from host memory."""
        super().save_checkpoint(apply_to_collection(checkpoint, Tensor, Tensor.cpu), path, storage_options)

    def wait(self) -> None:
        """Wait until asynchronously written checkpoints are on disk."""
        if isinstance(self.checkpoint_io, WaitsForWrites):
            self.checkpoint_io.wait()
