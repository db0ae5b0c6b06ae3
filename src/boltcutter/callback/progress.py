"""What a person sees while a model trains."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(ProgressBar):
    """A bar over the whole training with loss, metric, samples a second and time left.

    It draws at most five times a second, and reads the loss from the device only then. Where standard output is
    not a terminal it prints one line for an epoch, and no more often than ``seconds_between_lines``.

    Args:
        monitor: The metric shown, as it is logged.
        refresh: Drawings a second at most.
        seconds_between_lines: Where there is no terminal.
    """

    def __init__(self, monitor: str = "val/loss", *, refresh: float = 5.0, seconds_between_lines: float = 10.0) -> None:
        super().__init__()
        if refresh <= 0:
            raise ValueError(
                f"callback.progress.refresh={refresh} is no rate; give 5, or callback.progress=null for no bar"
            )
        self.monitor = monitor
        self.interval, self.seconds_between_lines = 1 / refresh, seconds_between_lines
        self.enabled = True
        # Past whatever keeps a log of standard output: a log of drawings is of no use.
        self.console = Console(file=sys.__stdout__)
        self.bar: Bar | None = None
        self.task = TaskID(0)
        self._next = 0.0
        self._next_line = 0.0
        self._samples = 0
        self._since = 0.0
        self._loss: Any = None  # of the newest step, still on its device

    def disable(self) -> None:
        """Be silent: Lightning asks this of all ranks but the first."""
        self.enabled = False

    def enable(self) -> None:
        """Speak again."""
        self.enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the bar where there is a terminal."""
        super().on_train_start(trainer, pl_module)
        self._since, self._samples = time.monotonic(), 0
        if self.enabled and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TextColumn("[dim]left"),
                TimeRemainingColumn(),
                console=self.console,
                auto_refresh=False,
                expand=True,
            )
            total = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
            steps = None if total == float("inf") else int(total)
            self.task = self.bar.add_task("starting", total=steps, shown="", completed=self._done(trainer))
            self.bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw, if the last drawing is old enough."""
        self._samples += len(batch[0])
        self._loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        now = time.monotonic()
        if self.bar and now >= self._next:
            self._draw(trainer, now)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw; or without a terminal, print a line."""
        now = time.monotonic()
        if self.bar:
            self._draw(trainer, now)
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if self.enabled and not self.bar and (now >= self._next_line or last):
            print(f"{self._where(trainer)}  {self._shown(trainer, now)}", flush=True)
            self._next_line = now + self.seconds_between_lines

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the last drawing standing."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _draw(self, trainer: L.Trainer, now: float) -> None:
        if self.bar:
            shown = self._shown(trainer, now)
            self.bar.update(self.task, completed=self._done(trainer), description=self._where(trainer), shown=shown)
            self.bar.refresh()
            self._next = time.monotonic() + self.interval

    def _shown(self, trainer: L.Trainer, now: float) -> str:
        sharing = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        rate = self._samples * sharing.get("num_replicas", 1) / max(now - self._since, 1e-9)
        self._samples, self._since = 0, now
        parts = [] if self._loss is None else [f"loss {float(self._loss):.4f}"]
        if self.monitor in trainer.callback_metrics:
            parts.append(f"{self.monitor} {float(trainer.callback_metrics[self.monitor]):.4f}")
        return "  ".join([*parts, f"{rate:,.0f} samples/s"])

    @staticmethod
    def _where(trainer: L.Trainer) -> str:
        ends = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "…"
        return f"epoch {trainer.current_epoch + 1}/{ends}"

    @staticmethod
    def _done(trainer: L.Trainer) -> int:
        return int(trainer.fit_loop.total_batch_idx) + 1
