"""Summaries printed before and after training."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from torch import nn
from torch.nn.parameter import is_lazy

from boltcutter import run_files
from boltcutter.config.errors import printable
from boltcutter.environment.output import BOLD, NORMAL
from boltcutter.formatting import aligned, format_duration, format_number, supports_color
from boltcutter.project import command
from boltcutter.protocols import NativeData, find_model
from boltcutter.run.folder import read_record
from boltcutter.run.remote.store import run_store
from boltcutter.topology import Topology


def print_start(folder: Path, trainer: L.Trainer, task: L.LightningModule) -> None:
    """Print run folder, model, data, devices, batch size and W&B run before training."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    known = [p for p in task.parameters() if not is_lazy(p)]  # lazy parameters get their shape from the first batch
    size = sum(p.numel() for p in known)
    trained = sum(p.numel() for p in known if p.requires_grad)
    is_native = isinstance(data, NativeData)
    batch = getattr(data, "batch_size", None)
    scope = "in total" if is_native else "per device"  # the convention of Lightning
    accumulated = trainer.accumulate_grad_batches
    if is_native and data.splits and isinstance(batch, int) and hasattr(data.splits.train, "__len__"):
        accumulated = max(1, min(accumulated, math.ceil(len(data.splits.train) / batch)))  # of an epoch, where it ends
    kind = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    devices = f"{Topology.of(trainer).total_devices} × {kind}, {type(trainer.strategy).__name__}"
    exact = trainer.precision == "32-true" and torch.get_float32_matmul_precision() == "highest"
    has_tf32 = exact and kind == "CUDA" and torch.cuda.get_device_capability() >= (8, 0)
    model = find_model(task)
    network = type(model if isinstance(model, nn.Module) else task).__name__
    rows = {
        "run": str(folder),
        "model": f"{network}, {size:,} parameters" + (f", {trained:,} trainable" if trained != size else ""),
        "data": (type(data).__name__ if data is not None else f"loaders of {type(task).__name__}")
        + (f", {_sizes(data.splits)}" if is_native and data.splits else ""),
        "devices": f"{devices}, {trainer.precision}" + ("; matmul_precision=high is faster" if has_tf32 else ""),
        "batch": f"{batch} samples {scope} × {accumulated} accumulated" if batch else None,
        "W&B": _wandb(trainer),
    }
    _show(rows)


def print_end(folder: Path, *, evaluates: bool = True, predicts: str | None = "input=<files>") -> None:
    """Print metrics, checkpoint, duration and the next commands after training.

    Args:
        folder: Run folder.
        evaluates: Whether the test split can be evaluated.
        predicts: Arguments of ``boltcutter predict``; None if prediction is not available.
    """
    record = read_record(folder)
    metrics = record.get("test") or record.get("metrics", {})
    after = {} if record.get("test") else record.get("measured_after", {})
    rows: dict[str, str | None] = {
        name: format_number(value) + _after(after.get(name)) for name, value in sorted(metrics.items())
    }
    if "recompiles" in record.get("metrics", {}):
        rows["recompiles"] = f"{record['metrics']['recompiles']:.0f} after the first compilation"
    checkpoint = record.get("best") or ""
    label = "best" if record.get("best_by") else "checkpoint"
    shown = checkpoint if "://" in checkpoint else str(folder / checkpoint)
    by = record.get("best_by") or {}
    score = "" if by.get("score") is None else f", {by.get('monitor')} {format_number(by['score'])}"
    rows[label] = checkpoint and shown.removeprefix(f"{Path.cwd()}/") + _after(record.get("best_after")) + score
    rows["time"] = format_duration(record["attempts"][-1]["seconds"])
    if _limit(record) == "max_time":
        rows["stopped by"] = f"trainer.max_time={record['config']['trainer']['max_time']}"
    report = folder / run_files.REPORT
    places = [place for place in (folder / "profile", folder) if any(place.glob("*.trace.json")) or place != folder]
    rows["profile"] = next((str(place) for place in places if place.is_dir()), None)  # of debug=profile, or a profiler
    rows["report"] = str(report) if report.is_file() else None
    if checkpoint:
        commands = [
            command("evaluate", f"run={folder}") if evaluates else "",
            f"{command('predict', f'run={folder}')} {predicts}".rstrip() if predicts is not None else "",
            f"{command('train', f'resume={folder}')} trainer.{_limit(record)}=<more>",
        ]
        if "built_in_python" in (record.get("config", {}).get("task") or {}):  # which no command can build
            commands = [f"boltcutter.train({f'resume={folder}'!r}, task=…, data=…)  # in Python, for longer"]
        rows["next"] = "\n".join(filter(None, commands))
    _show(rows)


def print_evaluation(
    folder: Path, scores: Mapping[str, float], tested: str | None = None, samples: str | None = None
) -> None:
    """Print metrics, over how many samples, how often the test split was evaluated, then metrics per class."""
    shown = {name: format_number(value) for name, value in scores.items()}
    _show({**shown, "samples": samples, "output": str(folder), "test split": tested and f"evaluated {tested}"})
    if (folder / "classes.csv").is_file():
        with open(folder / "classes.csv", newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        table = [header] + [[name, *map(format_number, scores), samples] for name, *scores, samples in rows]
        print(printable("\n".join(aligned(table, left=0))))


def _limit(record: Mapping[str, Any]) -> str:
    """The limit that ended training, and must be raised to continue."""
    if record.get("stopped_by") == "trainer.max_time":
        return "max_time"
    steps = record.get("config", {}).get("trainer", {}).get("max_steps", -1)
    return "max_epochs" if steps in (None, -1) else "max_steps"


def _after(steps: int | None) -> str:
    """Step at which a value was measured."""
    return "" if steps is None else f", after {steps:,} steps"


def _sizes(splits: Any) -> str:
    """Number of samples of each split, if known."""
    lengths = {name: sized_len(split) for name, split in splits._asdict().items() if split is not None}
    return ", ".join(
        f"{name} {length:,}" if length is not None else f"{name} of unknown length" for name, length in lengths.items()
    )


def _wandb(trainer: L.Trainer) -> str | None:
    # The dummy logger of fast_dev_run has every attribute, but no text.
    locations = (getattr(logger, "location", None) for logger in trainer.loggers)
    return next((location for location in locations if isinstance(location, str)), None)


def _show(rows: Mapping[str, str | None]) -> None:
    shown = {printable(name): printable(text) for name, text in rows.items() if text}
    width = max(map(len, shown))
    bold, reset = (BOLD, NORMAL) if supports_color(sys.stdout) else ("", "")
    for name, text in shown.items():
        first, *more = run_store().show(text).split("\n")
        print(f"{bold}{name:{width}}{reset}  {first}")
        for line in more:
            print(" " * (width + 2) + line)
