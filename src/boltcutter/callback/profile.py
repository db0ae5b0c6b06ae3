"""Where the time of a few steps goes."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

ROWS = 30  # operations in the table


class Profile(Callback):
    """Watch some steps of training after a few others, and write down what they did.

    ``trace-rank-<n>.json.gz`` is read by https://ui.perfetto.dev, ``chrome://tracing`` and HTA; ``table-rank-<n>.txt``
    lists the operations that cost most. Watching slows each step, so shares tell more than seconds.

    Args:
        folder: Where they go.
        wait: Batches before anything is watched: compilation, caches, workers that start.
        active: Batches that are watched.
        profile_memory: Also what each operation takes of memory.
        with_stack: Also from which line of Python each operation came; slower still.
    """

    def __init__(
        self, folder: Path, *, wait: int = 5, active: int = 5, profile_memory: bool = False, with_stack: bool = False
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"callback.profile.{name}={value} is not a number of batches; try {max(5, least)}")
        self.folder, self.wait, self.active = Path(folder), wait, active
        self.options: dict[str, Any] = {
            "profile_memory": profile_memory,
            "record_shapes": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: Any = None
        self._seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count batches."""
        self._seen = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin after ``wait`` batches, and write after ``active`` more."""
        self._seen += 1
        if self._profiler is not None:
            self._profiler.step()  # names the steps in the trace
            if self._seen == self.wait + self.active:
                self._write(trainer, pl_module)
        if self._seen == max(1, self.wait) and self._profiler is None:
            self._profiler = torch.profiler.profile(**self.options)
            self._profiler.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write, where training was over before."""
        if self._profiler is not None:
            self._write(trainer, pl_module)
        elif self._seen < max(1, self.wait):
            print(f"profile: nothing was watched, since training had no more than {self._seen} batches")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no profiler running."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank-{trainer.global_rank}.json"
        profiler.export_chrome_trace(str(trace))
        packed = trace.with_suffix(".json.gz")
        with open(trace, "rb") as plain, gzip.open(packed, "wb", compresslevel=5) as file:
            shutil.copyfileobj(plain, file)
        trace.unlink()
        device = "cuda" if pl_module.device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=60
        )
        (self.folder / f"table-rank-{trainer.global_rank}.txt").write_text(table)
        if trainer.is_global_zero:
            print("\n".join(line.rstrip() for line in table.splitlines()[:15]))
            print(f"profile: {packed} for https://ui.perfetto.dev, and table-rank-0.txt beside it")
