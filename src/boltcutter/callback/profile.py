"""Profile of a few training steps."""

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
    """Profile some training steps with ``torch.profiler`` and write a trace and a table.

    ``trace-rank-<n>.json.gz`` can be opened in https://ui.perfetto.dev, ``chrome://tracing`` and HTA;
    ``table-rank-<n>.txt`` lists the most expensive operations. Profiling slows each step, so relative times are more
    meaningful than absolute ones.

    Args:
        folder: Output folder.
        wait: Batches before profiling starts, so that compilation, caches and starting workers are excluded.
        active: Batches to profile.
        profile_memory: Whether to record memory allocations and shapes.
        with_stack: Whether to record the Python source line of each operation, which is slower.

    Raises:
        ValueError: ``wait`` is negative, or ``active`` is not positive.
    """

    def __init__(
        self, folder: Path, *, wait: int = 5, active: int = 5, profile_memory: bool = False, with_stack: bool = False
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"callback.profile.{name}={value} must be {least} or more; try {max(5, least)}")
        self.folder, self.wait, self.active = Path(folder), wait, active
        self.options: dict[str, Any] = {
            "profile_memory": profile_memory,
            "record_shapes": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: Any = None
        self._seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset the number of batches."""
        self._seen = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start profiling after ``wait`` batches, and write the results after ``active`` more."""
        self._seen += 1
        if self._profiler is not None:
            self._profiler.step()  # names the steps in the trace
            if self._seen == self.wait + self.active:
                self._write(trainer, pl_module)
        if self._seen == max(1, self.wait) and self._profiler is None:
            self._profiler = torch.profiler.profile(**self.options)
            self._profiler.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the results if training ends during profiling."""
        if self._profiler is not None:
            self._write(trainer, pl_module)
        elif self._seen < max(1, self.wait):
            print(f"profile: nothing was profiled, because training ended after {self._seen} batches")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the profiler."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank-{trainer.global_rank}.json"
        profiler.export_chrome_trace(str(trace))
        compressed = trace.with_suffix(".json.gz")
        with open(trace, "rb") as plain, gzip.open(compressed, "wb", compresslevel=5) as file:
            shutil.copyfileobj(plain, file)
        trace.unlink()
        device = "cuda" if pl_module.device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=60
        )
        (self.folder / f"table-rank-{trainer.global_rank}.txt").write_text(table)
        if trainer.is_global_zero:
            print("\n".join(line.rstrip() for line in table.splitlines()[:15]))
            print(f"profile: {compressed} (open it in https://ui.perfetto.dev), table-rank-0.txt")
