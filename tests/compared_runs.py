"""Run folders to compare, as training writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "seed": 0,
    "data": {"_target_": "boltcutter.data.digits.Digits", "batch_size": 64, "seed": "${seed}", "split": [0.7, 0.3]},
    "model": {"_target_": "boltcutter.model.mlp.MLP", "hidden_sizes": [32]},
    "task": {"metrics": {"accuracy": {"_target_": "torchmetrics.Accuracy", "average": "micro"}}},
    "optimizer": {"lr": 0.1},
    "callback": {
        "best": {"monitor": "val/loss", "mode": "min"},
        "reseed": {"_target_": "boltcutter.callback.reseed.Reseed", "seed": "${seed}"},
    },
    "choices": {"data": "digits", "model": "mlp"},
}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        k: merged(first[k], v) if isinstance(v, Mapping) and isinstance(first.get(k), Mapping) else v
        for k, v in second.items()
    }
    return {**first, **both}


def write_run(
    folder: Path,
    value: float | None,
    *,
    seed: int = 0,
    metric: str = "test/accuracy",
    settings: Mapping[str, Any] | None = None,
    reason: str = "completed",
    right: Sequence[bool] | None = None,
    **facts: Any,
) -> Path:
    """Write the record of a run, and its predictions of ten classes.

    Args:
        folder: Folder of the run.
        value: Value of the metric.
        seed: Seed of the run.
        metric: Name of the metric.
        settings: Changes of the configuration, nested.
        reason: How the run ended.
        right: For each sample, whether the prediction is right.
        facts: Further entries of the record.
    """
    config = merged(CONFIG, {**(settings or {}), "seed": seed, "folder": str(folder)})
    attempt = {"start": "2026-01-01T12:00:00+00:00", "end": "2026-01-01T12:01:00+00:00", "reason": reason}
    attempt |= {"seconds": 60.0, "devices": 1, "device": "cpu", "deterministic": True, "resumed_from": None}
    record = {"config": config, "id": folder.name, "name": "digits-mlp", "attempts": [attempt]}
    record |= {"data": f"fingerprint of seed {seed}", "measured_after": {"val/loss": 100}, "metrics": {"val/loss": 1.0}}
    if value is not None:
        record["test" if metric.startswith("test") else "metrics"] = {metric: value}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record | facts))
    if right is not None:
        rows = [f"{i},0.5,{i % 10},{i % 10 if is_right else (i + 1) % 10},0.9" for i, is_right in enumerate(right)]
        predictions = folder / "evaluation" / "test" / "predictions.csv"
        predictions.parent.mkdir(parents=True, exist_ok=True)
        predictions.write_text("\n".join(["index,loss,target,prediction,confidence", *rows, ""]))
    return folder


def write_group(root: Path, name: str, values: Sequence[float], *, seed: int = 0, **options: Any) -> Path:
    """Write runs of consecutive seeds below ``root / name``, whose model has this name."""
    settings = merged(options.pop("settings", {}), {"choices": {"model": name}, "model": {"name": name}})
    for number, value in enumerate(values):
        run = root / name / f"{name}-{seed + number}"
        write_run(run, value, seed=seed + number, settings=settings, **options)
    return root / name


def write_search(folder: Path, values: Sequence[float], *, seeds: int = 0, **options: Any) -> Path:
    """Write a search whose trials have these values of ``val/loss`` and, one minus it, of ``test/accuracy``."""
    record = {
        "settings": {
            "space": {} if seeds else {"optimizer.lr": "uniform(0, 1)"},
            "metric": options.pop("searched", None),
        },
        "metrics": [["val/loss", "min"]],
        "fixed": [{"seed": seed} for seed in range(seeds)] or [{}],
        "created": "2026-01-01T12:00:00+00:00",
    }
    folder.mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps(record))
    for number, value in enumerate(values):
        facts = {"metrics": {"val/loss": value}, "settings": {"optimizer": {"lr": 0.1 * (number + 1)}}}
        write_run(folder / "trials" / f"{number:04d}", 1 - value, **{**facts, **options})
    (folder / "trials.csv").write_text("trial,state\n")
    return folder
