"""Run folders as training writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]
CONFIG: dict[str, Any] = {
    "name": "${choices.data}-${choices.model}",
    "seed": 0,
    "folder": "?",
    "checkpoints": "${folder}/checkpoints",
    "data": {"batch_size": 64, "seed": "${seed}", "shape": [1, 8, 8]},
    "model": {"dropout": 0.5, "input_shape": "${data.shape}"},
    "task": {"model": "${model}", "token": "${oc.env:SECRET_TOKEN}"},
    "optimizer": {"lr": 0.1},
    "callback": {"best": {"monitor": "val/accuracy", "mode": "max"}},
    "choices": {"data": "digits", "model": "convnet"},
}


def write_run(folder: Path, *, day: int = 1, reason: str | None = "completed", **facts: Any) -> Path:
    """Write the record of a run; ``settings`` replaces top-level entries of the configuration."""
    config = CONFIG | {"folder": str(folder)} | facts.pop("settings", {})
    attempt = {"start": f"2026-01-{day:02}T12:00:00+00:00", "reason": reason, "seconds": 90.0}
    attempt |= {"end": None, "host": "h", "pid": 1, "devices": 2, "device": "cpu"}
    record = {"config": config, "id": folder.name, "name": "digits-convnet", "attempts": [attempt] if reason else []}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record | facts))
    return folder


@pytest.fixture
def write() -> Write:
    return write_run
