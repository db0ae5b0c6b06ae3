"""The duration of each step."""

import csv
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from boltcutter.config.settings import Settings


class StepTimes(Callback):
    """Writes the milliseconds of each training step to ``step_times.csv`` of the run."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self._times, self._last = [], time.perf_counter()  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop it."""
        now = time.perf_counter()
        self._times.append((trainer.global_step, (now - self._last) * 1000))
        self._last = now

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            with open(Path(trainer.default_root_dir) / "step_times.csv", "w", newline="") as file:
                csv.writer(file).writerows([("step", "ms"), *self._times])


def for_each_run(cfg: Settings) -> list[Callback]:
    """The callbacks of each run."""
    return [StepTimes()]
