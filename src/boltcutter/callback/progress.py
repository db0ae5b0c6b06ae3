"""Progress bar of training."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar

from boltcutter.callback.status_line import Field, StatusLine
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.formatting import format_duration, format_number, is_terminal
from boltcutter.task.host_copy import Shown

# Why not one of Lightning's bars: its rich bar takes 1 ms of each step, this one 0.03 ms (docs/benchmarks.md), because
# it computes nothing between redraws. It also shows the progress and remaining time of the whole training.
INTERVAL = 0.2  # seconds between two redraws, at least
LINE_INTERVAL = 10.0  # seconds between two lines, at least, if there is no terminal


class Progress(ProgressBar):
    """A progress bar over the whole training: loss, metric, remaining time, and what ``ThroughputMonitor`` measures.

    The bar is drawn at most five times per second; other output appears above it. On a GPU it shows the loss of the
    redraw before, which has arrived on the host by then, so that a step never waits for it. If standard output is not
    a terminal, one line per epoch is printed instead, at most every ten seconds, and always the last one.

    Args:
        monitor: Metric to show, as logged; None for the metric that selects the best checkpoint.
    """

    def __init__(self, monitor: str | None = None) -> None:
        super().__init__()
        self.monitor = monitor
        self.is_enabled = True
        self._status_line: StatusLine | None = None
        self._total: int | None = None  # optimizer steps; None if training is unlimited
        self._counts_batches = False  # rather than optimizer steps
        self._began, self._began_at = 0.0, 0  # time and step when training started
        self._next = self._next_line = 0.0
        self._pending = ""  # a line to be printed after ``LINE_INTERVAL``
        self._loss: Any = None  # of the latest step, still on its device
        self._metric: Any = None  # of the latest validation
        self._shown = Shown(), Shown()  # both, as they were shown last
        self._is_validating = False

    def disable(self) -> None:
        """Disable the bar; Lightning calls this on all ranks but rank zero."""
        self.is_enabled = False

    def enable(self) -> None:
        """Enable the bar."""
        self.is_enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the status line, if standard output is a terminal."""
        super().on_train_start(trainer, pl_module)
        self._began = time.monotonic()
        # With manual optimization, each step of each optimizer counts as one of Lightning's, but batches do not.
        self._counts_batches = not pl_module.automatic_optimization and trainer.max_steps == -1
        self._began_at = self._step(trainer)
        self._loss, self._metric, self._shown = None, None, (Shown(), Shown())
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if 0 < steps < math.inf else None
        # The terminal itself, not a stream that also writes a log, in which redraws are useless.
        out = sys.__stdout__ or sys.stdout
        if self.is_enabled and is_terminal(out):
            self._status_line = StatusLine(out)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw the bar, if it is time to."""
        if not self.is_enabled:
            return
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._status_line and time.monotonic() >= self._next:
            self._update_metric(trainer)
            self._draw(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show that training is validated."""
        self._is_validating = True
        self._draw(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Update the metric."""
        self._is_validating = False
        if not trainer.sanity_checking:
            self._update_metric(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Redraw the bar; without a terminal, print a line."""
        if self._status_line:
            self._draw(trainer)
        elif self.is_enabled:
            self._pending = "  ".join(f.text for f in self._fields(trainer, waits=True) if f.weight > 1)
            if time.monotonic() >= self._next_line:
                self._print_line()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the bar a last time."""
        if self._status_line and trainer.current_epoch:
            self._draw(trainer, ended=True)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the status line."""
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the status line."""
        self._stop()

    def _stop(self) -> None:
        if self._pending:
            self._print_line()
        if self._status_line:
            self._status_line.close()
            self._status_line = None

    def _print_line(self) -> None:
        print(self._pending, flush=True)
        self._pending, self._next_line = "", time.monotonic() + LINE_INTERVAL

    def _update_metric(self, trainer: L.Trainer) -> None:
        # Not at the end of an epoch, where Lightning would reduce over ranks, which the other ranks do not call.
        self._metric = trainer.callback_metrics.get(monitored_metric(self, trainer), self._metric)

    def _draw(self, trainer: L.Trainer, *, ended: bool = False) -> None:
        if self._status_line:
            progress = self._step(trainer) / self._total if self._total else None
            self._status_line.show(self._fields(trainer, ended=ended, waits=ended), progress)
            self._next = time.monotonic() + INTERVAL

    def _step(self, trainer: L.Trainer) -> int:
        return trainer.fit_loop.total_batch_idx + 1 if self._counts_batches else trainer.global_step

    def _fields(self, trainer: L.Trainer, *, ended: bool = False, waits: bool = False) -> list[Field]:
        """Fields of the bar, as far as their values are known; ``waits``: as they are now."""
        step, total = self._step(trainer), self._total
        epoch = trainer.current_epoch + (not ended)
        limit = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        spent, done = time.monotonic() - self._began, step - self._began_at
        found = [Field("epoch", f"{epoch}{limit}", 9)]
        if total:
            found.append(Field("", f"{math.floor(100 * step / total):3d} %", 1))
        loss, metric = self._shown
        loss.update(self._loss, waits=waits)
        metric.update(self._metric, waits=waits)
        if loss.value is not None:
            # Lightning divides the loss by the number of accumulated batches.
            found.append(Field("loss", format_number(loss.value * trainer.accumulate_grad_batches), 6))
        if metric.value is not None:
            found.append(Field(monitored_metric(self, trainer), format_number(metric.value), 5))
        if self._is_validating:
            found.append(Field("", "validating", 4))
        else:
            meters = (c for c in trainer.callbacks if isinstance(c, ThroughputMonitor))  # type: ignore[attr-defined]
            found += speed_fields(next((meter.rates for meter in meters), {}))
        found.append(Field("step", f"{step:,}/{total:,}" if total else f"{step:,}", 0 if total else 2))
        if ended or total == step:
            found.append(Field("in", format_duration(spent), 4))
        elif total and done:
            found.append(Field("", f"{format_duration(spent / done * (total - step))} left", 4))
        return found


def monitored_metric(bar: Progress, trainer: L.Trainer) -> str:
    """Name of the metric to show."""
    monitors = (c.monitor for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.save_top_k)
    return bar.monitor or next(filter(None, monitors), "val/loss")


def speed_fields(rates: Mapping[str, float]) -> list[Field]:
    """Fields for throughput, MFU, time spent waiting for data, and memory, as ``ThroughputMonitor`` measured them."""
    units = (unit for unit in ("tokens", "samples", "batches") if f"{unit}_per_second" in rates)
    found = [Field("", f"{_rate(rates[f'{unit}_per_second'])} {unit}/s", 3) for unit in units][:1]
    if "mfu" in rates:
        found.append(Field("MFU", f"{rates['mfu']:.0%}", 2))
    if rates.get("data_wait", 0.0) >= 0.05:
        found.append(Field("waiting for data", f"{rates['data_wait']:.0%}", 1))
    if "memory_gib" in rates:
        found.append(Field("memory", f"{rates['memory_gib']:.1f} GiB", 0))
    return found


def _rate(number: float) -> str:
    """Format a rate; of a slow one also what is behind the decimal point, as 0 would be wrong."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
