"""Torch's first FSDP, whose checkpoints are read as data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch import strategies


class FSDPStrategy(strategies.FSDPStrategy):
    """Lightning's, which would unpickle a checkpoint with all the code that it holds.

    Args:
        options: As for Lightning's ``FSDPStrategy``.
    """

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
        options = {"peek": True} if hasattr(writer, "read_parts") else {"weights_only": True}
        with mock.patch(
            f"{strategies.FSDPStrategy.__module__}._lazy_load", lambda place: writer.load_checkpoint(place, **options)
        ):
            return super().load_checkpoint(path, weights_only=True)
