"""What a person reads before and after a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from rich.console import Console
from rich.markup import escape
from torch import nn
from torch.nn.parameter import is_lazy

from boltcutter.adapt import is_native_data
from boltcutter.project import command
from boltcutter.run import read_record


def print_start(folder: Path, trainer: L.Trainer, task: L.LightningModule) -> None:
    """What is about to happen: where, what, on what, with what."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    splits = getattr(data, "splits", None)
    known = [p for p in task.parameters() if not is_lazy(p)]  # others get their shape from the first batch
    size = sum(p.numel() for p in known)
    trained = sum(p.numel() for p in known if p.requires_grad)
    batch = getattr(data, "batch_size", None)
    spread = "over all devices" if is_native_data(data) else "on each device"  # as Lightning's users count
    kind = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    devices = f"{trainer.num_devices * trainer.num_nodes} × {kind}, {type(trainer.strategy).__name__}"
    model = type(task.model if isinstance(getattr(task, "model", None), nn.Module) else task).__name__
    rows = {
        "run": str(folder),
        "model": f"{model}, {size:,} parameters" + (f", {trained:,} of them trained" if trained != size else ""),
        "data": type(data).__name__ + (f", {_sizes(splits)}" if hasattr(splits, "_asdict") else ""),
        "devices": f"{devices}, {trainer.precision}",
        "batch": f"{batch} samples {spread} × {trainer.accumulate_grad_batches} accumulated" if batch else None,
        "W&B": _wandb(trainer),
    }
    _show(rows)


def print_end(folder: Path, *, evaluates: bool = True, predicts: str | None = "input=<files>") -> None:
    """How it went, and what to do next.

    Args:
        folder: Of the run.
        evaluates: Whether the test split can be measured.
        predicts: What ``predict.py`` is to be given; None where there is nothing to predict for.
    """
    record = read_record(folder)
    last = record["attempts"][-1]
    metrics = record.get("test") or record.get("metrics", {})
    after = {} if record.get("test") else record.get("measured_after", {})
    rows: dict[str, str | None] = {
        name: _number(value) + _after(after.get(name)) for name, value in sorted(metrics.items())
    }
    if "recompiles" in record.get("metrics", {}):
        rows["recompiles"] = f"{record['metrics']['recompiles']:.0f} of the model, after it was first compiled"
    kept = record.get("best") or ""
    named = "best" if kept.rpartition("/")[2].startswith("best") else "checkpoint"
    rows[named] = kept and kept + _after(record.get("best_after"))
    rows["time"] = str(timedelta(seconds=round(last["seconds"])))
    report = folder / "report.html"
    rows["report"] = str(report) if report.is_file() else None
    if kept:
        commands = [
            f"{command('evaluate')} run={folder}" if evaluates else "",
            f"{command('predict')} run={folder} {predicts}".rstrip() if predicts is not None else "",
            f"{command('train')} resume={folder} trainer.{_limit(record)}=<more>",
        ]
        rows["next"] = "\n".join(filter(None, commands))
    _show(rows)


def print_evaluation(folder: Path, scores: Mapping[str, float]) -> None:
    """Metrics over all samples, then for each class."""
    _show({**{name: _number(value) for name, value in scores.items()}, "written": str(folder)})
    if (folder / "classes.csv").is_file():
        import pandas as pd  # not needed before a training, where its import would hold up the first step

        classes = pd.read_csv(folder / "classes.csv", dtype={"class": str}, keep_default_na=False)
        print(classes.to_string(index=False, float_format=_number))


def _limit(record: Mapping[str, Any]) -> str:
    """What ended the training, and has to be raised for it to go on."""
    steps = record.get("config", {}).get("trainer", {}).get("max_steps", -1)
    return "max_epochs" if steps in (None, -1) else "max_steps"


def _after(steps: int | None) -> str:
    """When a value was measured."""
    return "" if steps is None else f", after {steps:,} steps"


def _sizes(splits: Any) -> str:
    """Samples of each split, of a stream of unknown length none."""
    lengths = {name: sized_len(split) for name, split in splits._asdict().items() if split is not None}
    return ", ".join(
        f"{name} {length:,}" if length is not None else f"{name} a stream" for name, length in lengths.items()
    )


def _wandb(trainer: L.Trainer) -> str | None:
    # The logger of fast_dev_run has any attribute.
    return next(
        (where for logger in trainer.loggers if isinstance(where := getattr(logger, "location", None), str)), None
    )


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:g}"


def _show(rows: Mapping[str, str | None]) -> None:
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown))
    console = Console(highlight=False, soft_wrap=True)
    for name, text in shown.items():
        first, *more = text.split("\n")
        console.print(f"[bold]{escape(f'{name:{width}}')}[/]  {escape(first)}")
        for line in more:
            console.print(" " * (width + 1), line, markup=False)
