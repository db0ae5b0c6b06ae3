"""Ranks that another process has forked or spawned announce themselves, too."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.environment import announcement


class Announced(Callback):
    """Announce the rank in which a trainer runs, and whether it has failed.

    Args:
        folder: Of the run.
        timeout: Seconds without progress until stacks are reported.
        command: What is done with the run: ``train``, ``evaluate`` or ``predict``.
    """

    def __init__(self, folder: Path, timeout: float, command: str = "train") -> None:
        self.folder, self.timeout, self.command, self._joined = folder, timeout, command, False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Announce this process, unless its command has."""
        self._joined |= announcement.joined(self.folder, self.timeout, trainer.global_rank, self.command)
        announcement.follow(trainer)
        announcement.set_state("running")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Announce the failure before anything else is done about it."""
        announcement.set_state("done" if isinstance(exception, SystemExit) else "failed")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A rank that was forked or spawned ends with what it was started for."""
        if self._joined:
            announcement.set_state("done")
