"""What TPUs need besides Lightning's own strategies for them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


class HostCheckpointIO(_WrappingCheckpointIO):
    """Brings tensors from the devices to the machine's memory before another plugin writes them.

    Lightning's strategies for TPUs take their own way of writing checkpoints, or one that wraps another as this does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint``."""
        super().save_checkpoint(apply_to_collection(checkpoint, Tensor, Tensor.cpu), path, storage_options)

    def wait(self) -> None:
        """Until what is written beside the training is on the disk."""
        getattr(self.checkpoint_io, "wait", int)()
