"""What a person sees while a model trains."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from rich.console import Console

from boltcutter.batches import count_samples
from boltcutter.callback.status_line import Field, StatusLine
from boltcutter.callback.throughput import ThroughputMonitor, data_parallel_size

SMOOTHING = 3.0  # seconds over which speed is averaged


class Progress(ProgressBar):
    """A bar over the whole training with loss, metric, samples a second and time left.

    It is drawn, and the loss read from the device, at most ``refresh_per_second`` times a second; what others print
    stands above it. Where standard output is not a terminal it prints one line for an epoch, no more often than
    ``seconds_between_lines``, and always the last.

    Args:
        monitor: The metric shown, as it is logged; None takes the one that the best checkpoint is chosen by.
        refresh_per_second: Drawings a second at most.
        seconds_between_lines: Where there is no terminal.

    Attributes:
        console: What is drawn on; the terminal when training starts, if there is one.
    """

    def __init__(
        self, monitor: str | None = None, *, refresh_per_second: float = 5.0, seconds_between_lines: float = 10.0
    ) -> None:
        super().__init__()
        if refresh_per_second <= 0:
            raise ValueError(
                f"callback.progress.refresh_per_second={refresh_per_second} is not positive; "
                "try 5, or callback.progress=null to disable the progress bar"
            )
        self.monitor = monitor
        self.interval, self.seconds_between_lines = 1 / refresh_per_second, seconds_between_lines
        self.enabled = True
        self.console: Console | None = None
        self._screen: StatusLine | None = None
        self._total: int | None = None  # optimizer steps; none if training has no end
        self._began, self._began_at = 0.0, 0  # time and step
        self._next = self._next_line = 0.0
        self._due = ""  # a line not printed, being too early
        self._samples, self._since = 0, 0.0
        self._speed: float | None = None  # in units a second
        self._unit = "samples"  # or batches, where these do not say how many samples they have
        self._loss: Any = None  # of the newest step, still on its device
        self._metric: Any = None  # likewise
        self._validated: str | None = None  # how far validation is, while it runs

    def disable(self) -> None:
        """Be silent: Lightning asks this of all ranks but the first."""
        self.enabled = False

    def enable(self) -> None:
        """Speak again."""
        self.enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the terminal, where there is one."""
        super().on_train_start(trainer, pl_module)
        self._began = self._since = time.monotonic()
        self._began_at = trainer.global_step
        self._samples, self._speed, self._loss, self._metric = 0, None, None, None
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if 0 < steps < math.inf else None
        # The terminal itself, past whatever keeps a log of standard output: a log of drawings is of no use.
        out = sys.__stdout__ or sys.stdout
        console = self.console or Console(file=out, force_terminal=out.isatty())
        if self.enabled and console.is_terminal and not console.is_dumb_terminal:
            self._screen = StatusLine(console)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw, if the last drawing is old enough."""
        if not self.enabled:
            return
        count = count_samples(batch)
        if count is None:
            self._unit = "batches"
        self._samples += count or 1
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._screen and time.monotonic() >= self._next:
            self._look(trainer)
            self._draw(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of training."""
        self._measure()
        self._validated = ""

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw how far validation is."""
        if self._screen and time.monotonic() >= self._next:
            batches = trainer.num_val_batches[dataloader_idx]
            self._validated = f"{batch_idx + 1}/{batches}" if batches < math.inf else f"{batch_idx + 1}"
            self._draw(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the metric; start the clock again."""
        self._validated = None
        self._since = time.monotonic()
        if not trainer.sanity_checking:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw; or without a terminal, print a line."""
        if self._screen:
            self._draw(trainer)
        elif self.enabled:
            self._due = "  ".join(f.text for f in self._fields(trainer) if f.weight > 1)
            if time.monotonic() >= self._next_line:
                self._print_line()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the last drawing standing."""
        if self._screen and trainer.current_epoch:
            self._draw(trainer, ended=True)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the terminal back, however training ended."""
        self._stop()

    def _stop(self) -> None:
        if self._due:
            self._print_line()
        if self._screen:
            self._screen.close()
            self._screen = None

    def _print_line(self) -> None:
        print(self._due, flush=True)
        self._due, self._next_line = "", time.monotonic() + self.seconds_between_lines

    def _look(self, trainer: L.Trainer) -> None:
        # Not at the end of an epoch: there Lightning would reduce over ranks, and the others do not ask.
        self._metric = trainer.callback_metrics.get(monitored_metric(self, trainer), self._metric)

    def _draw(self, trainer: L.Trainer, *, ended: bool = False) -> None:
        if self._screen:
            share = trainer.global_step / self._total if self._total else None
            self._screen.show(self._fields(trainer, ended=ended), share)
            self._next = time.monotonic() + self.interval

    def _measure(self) -> None:
        now = time.monotonic()
        seconds = now - self._since
        if self._samples and seconds > 0:
            newest = self._samples / seconds
            keep = math.exp(-seconds / SMOOTHING) if self._speed is not None else 0.0
            self._speed = keep * (self._speed or 0.0) + (1 - keep) * newest
            self._samples, self._since = 0, now

    def _fields(self, trainer: L.Trainer, *, ended: bool = False) -> list[Field]:
        """What is told, as far as it is known."""
        if self._validated is None:
            self._measure()
        step, total = trainer.global_step, self._total
        epoch = trainer.current_epoch + (not ended)
        ends = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        spent, done = time.monotonic() - self._began, step - self._began_at
        found = [Field("epoch", f"{epoch}{ends}", 9)]
        if total:
            found.append(Field("", f"{math.floor(100 * step / total):3d} %", 1))
        if self._loss is not None:
            # Lightning has divided it, so that accumulated gradients add up to a mean.
            found.append(Field("loss", format_number(self._loss * trainer.accumulate_grad_batches), 6))
        if self._metric is not None:
            found.append(Field(monitored_metric(self, trainer), format_number(self._metric), 5))
        if self._validated is not None:
            found.append(Field("validating", self._validated, 4))
        elif self._speed is not None:
            meters = (c for c in trainer.callbacks if isinstance(c, ThroughputMonitor))  # type: ignore[attr-defined]
            found += speed_fields(self._speed * data_parallel_size(trainer), next(meters, None), self._unit)
        found.append(Field("step", f"{step:,}/{total:,}" if total else f"{step:,}", 0 if total else 2))
        if ended or total == step:
            found.append(Field("in", format_duration(spent), 4))
        elif total and done:
            found.append(Field("", f"{format_duration(spent / done * (total - step))} left", 4))
        return found


def monitored_metric(bar: Progress, trainer: L.Trainer) -> str:
    """The metric that is shown."""
    kept = (c.monitor for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.save_top_k)
    return bar.monitor or next(filter(None, kept), "val/loss")


def speed_fields(samples: float, meter: ThroughputMonitor | None, unit: str = "samples") -> list[Field]:
    """Samples or tokens a second, and what else is measured."""
    tokens, rates = (meter.tokens, meter.rates) if meter else (0, dict[str, float]())
    found = [Field("", f"{samples * tokens:,.0f} tokens/s" if tokens else f"{samples:,.0f} {unit}/s", 3)]
    if "mfu" in rates:
        found.append(Field("MFU", f"{rates['mfu']:.0%}", 2))
    if rates.get("data_wait", 0.0) >= 0.05:
        found.append(Field("waiting for data", f"{rates['data_wait']:.0%}", 1))
    if "memory_gib" in rates:
        found.append(Field("", f"{rates['memory_gib']:.1f} GiB", 0))
    return found


def format_number(value: Any) -> str:
    """Four digits that tell, in a width that rarely changes."""
    number = float(value)
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e4 else f"{number:.2e}"


def format_duration(seconds: float) -> str:
    """As m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
