"""What each training records of itself when it starts, and in each checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.assembly.recorded import describe
from boltcutter.config.errors import printable
from boltcutter.config.settings import Settings
from boltcutter.environment import reads
from boltcutter.protocols import BuffersMetrics, NativeData
from boltcutter.report import terminal as summary
from boltcutter.run.folder import read_record, update_record
from boltcutter.run.inputs import changed_inputs, describe_environment, describe_inputs
from boltcutter.run.remote.store import run_store
from boltcutter.training.resume import check_restored_paths


class Recorder(Callback):
    """Records what is known only once training starts, and adds the run's id and commit to each checkpoint."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.provenance: dict[str, Any] = {"save": 0}  # number of the save in this attempt
        self._count: int | None = None  # of the variables that are recorded

    def __getstate__(self) -> dict[str, Any]:
        """Pass what was read until now to spawned processes."""
        return {**vars(self), "_reads": reads.current()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on noting what is read."""
        reads.go_on(state.pop("_reads"))
        vars(self).update(state)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the fingerprint of the data, log the configuration, and print a summary of the run."""
        check_restored_paths(trainer)
        if not trainer.is_global_zero:
            return
        folder = self.cfg.place.folder
        record = read_record(folder)
        self.provenance |= {"run": record["id"], **{name: record["git"][name] for name in ("commit", "dirty")}}
        self.provenance |= {"attempt": len(record["attempts"]), "command": record["command"]}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, NativeData):
            read_as = getattr(data, "read_as", [])  # empty if a checkpoint says how
            self.provenance["data"] = data.fingerprint()
            update_record(folder, data=self.provenance["data"], **({"columns": read_as} if read_as else {}))
        hyperparameters = self.cfg.redacted
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)
            if isinstance(location := getattr(logger, "location", None), str):
                update_record(folder, wandb={"id": logger.version, "location": location})
        update_record(folder, loggers=describe(trainer.loggers, folder))
        summary.print_start(folder, trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what the user's code has read until now, and report what has changed of it on resume."""
        found = reads.current()
        if found is None or not trainer.is_global_zero:
            reads.end()
            return
        found.notes_files, self._count = False, len(found.variables)
        folder = self.cfg.place.folder
        inputs = describe_inputs(found, folder)
        earlier = read_record(Path(self.cfg.reproduce) if self.cfg.reproduce else folder)
        for line in changed_inputs(earlier, inputs):
            print(f"warning: {printable(line)}")
        update_record(folder, **inputs)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the run's id and commit to the checkpoint, and flush metrics so that none logged before it is lost."""
        flush_loggers(trainer)
        self._record_variables()
        self.provenance["save"] += 1
        checkpoint["boltcutter"] = dict(self.provenance)
        run_store().flush(self.cfg.place.folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what steps have read."""
        self._record_variables()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record what steps have read."""
        self._record_variables()

    def _record_variables(self) -> None:
        """Record the environment variables that the user's code has read since training started, in rank 0."""
        found = reads.current()
        if self._count is not None and found is not None and len(found.variables) > self._count:
            self._count = len(found.variables)
            update_record(self.cfg.place.folder, environment=describe_environment(found))


def flush_loggers(trainer: L.Trainer) -> None:
    """Write the metrics logged so far to disk."""
    for logger in trainer.loggers:
        if isinstance(logger, BuffersMetrics):
            logger.flush()
