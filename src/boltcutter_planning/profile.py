"""Profile of a few training steps."""

from __future__ import annotations

import warnings
from functools import partial
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

    Raises:
        ValueError: ``wait`` is negative, or ``active`` is not positive.
    """

    def __init__(self, folder: Path, *, wait: int = 5, active: int = 5) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"callback.profile.{name}={value} must be {least} or more; try {max(5, least)}")
        self.folder, self.wait, self.active = Path(folder), wait, active
        self._profiler: Any = None
        self._is_written = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the schedule: the last batch that is waited for warms the profiler up."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")  # without it with wait=0
            schedule = torch.profiler.schedule(
                wait=max(0, self.wait - 1), warmup=min(1, self.wait), active=self.active, repeat=1
            )
        write = partial(self._write, trainer, pl_module)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
        self._is_written = False
        self._profiler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on in the schedule, which writes the results after the last batch."""
        if self._profiler is not None:
            self._profiler.step()
            if self._is_written:
                self._stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the results if training ends during profiling."""
        if self._profiler is not None:
            batches = self._profiler.step_num
            self._stop()
            if not self._is_written:
                print(f"profile: nothing was profiled, because training ended after {batches} batches")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the profiler, without results."""
        if self._profiler is not None:
            self._profiler.on_trace_ready = None
            self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule, profiler: Any) -> None:
        self._is_written = True
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank-{trainer.global_rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        device = "cuda" if pl_module.device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=60
        )
        (self.folder / f"table-rank-{trainer.global_rank}.txt").write_text(table)
        if trainer.is_global_zero:
            print("\n".join(line.rstrip() for line in table.splitlines()[:15]))
            print(f"profile: {trace} (open it in https://ui.perfetto.dev), table-rank-0.txt")
