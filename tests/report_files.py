"""Files of a run, as its report reads them, and what the report shows of them."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
CONFIG = """\
name: digits
seed: 0
data:
  _target_: boltcutter.data.digits.Digits
  split:
  - 0.7
  - 0.3
callback:
  best:
    monitor: val/loss
    mode: min
choices:
  data: digits
  model: convnet
"""
RECORD: dict[str, Any] = {
    "id": "20250102-030405-abcdef12",
    "name": "digits",
    "command": "scripts/train.py trainer.max_epochs=3 logger.api_key=hush",
    "config": {"logger": {"api_key": "hush"}},
    "seed": 0,
    "git": {"commit": "0123456789", "branch": "main", "remote": None, "dirty": True, "patch": "code.patch"},
    "packages": {"lightning": "2.6.4", "torch": "2.9.0"},
    "python": "3.12.1",
    "hardware": {"cpu": "Some CPU", "cores": 4, "gpus": ["NVIDIA H200"] * 8, "cuda": "12.8", "threads": 4},
    "reproduces": "runs/digits/earlier",
    "data": "fingerprint-of-data",
    "metrics": {"train/loss": 0.2, "val/loss": 0.3},
    "test": {"test/loss": 0.31, "test/accuracy": 0.875},
    "attempts": [
        {
            "start": "2025-01-02T03:04:05+00:00",
            "end": "2025-01-02T05:09:05+00:00",
            "reason": "interrupted",
            "host": "node-1",
            "pid": 7,
            "devices": 8,
            "resumed_from": None,
        },
        {"start": "2025-01-02T06:00:00+00:00", "end": "2025-01-02T06:00:40+00:00", "reason": "completed", "devices": 8},
    ],
}
FILES = ["record.json", "config.yaml", "metrics.csv"] + [
    f"evaluation/test/{name}"
    for name in ("metrics.json", "predictions.csv", "classes.csv", "confusion.csv", "worst.npz")
]


def write_run(folder: Path, name: str = "digits") -> Path:
    """A run folder with the files that all tasks write."""
    test = folder / "evaluation" / "test"
    test.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(RECORD | {"name": name}))
    (folder / "config.yaml").write_text(CONFIG)
    (test / "metrics.json").write_text(json.dumps(RECORD["test"]))
    lines = ["step,epoch,lr-AdamW,train/loss,val/loss,val/accuracy,train/loss_epoch,throughput/samples_per_second"]
    for step in range(9, 300, 10):
        loss = 2 / (1 + step / 50)
        lines.append(f"{step},{step // 100},{0.001 - step * 1e-6},{loss},,,,{1000 + step}")
        if step % 100 == 99:
            lines.append(f"{step + 1},{step // 100},,,{loss + 0.1},{1 - loss / 4},{loss},")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_classification(folder: Path, names: tuple[str, ...] = ("cat", "dog", "owl"), *, side: int = 8) -> Path:
    test = write_run(folder) / "evaluation" / "test"
    count = len(names)
    matrix = np.eye(count, dtype=int) * 5
    matrix[0, 1] = 2
    pd.DataFrame(matrix, names, names).to_csv(test / "confusion.csv", index_label="target")
    ones = np.ones(count)
    table = pd.DataFrame({"class": names, "precision": ones, "recall": ones / 2, "f1": ones / 4, "samples": 5})
    table.to_csv(test / "classes.csv", index=False)
    truth, predicted = np.array([0, 0, 1]), np.array([1, 1, 1])
    sure, loss = np.array([0.9, 0.8, 0.4]), np.array([3.0, 2.0, 1.0])
    columns = {"target": truth, "prediction": predicted, "confidence": sure, "loss": loss}
    index = np.arange(3)
    pd.DataFrame({"index": index, **columns}).to_csv(test / "predictions.csv", index=False)
    inputs = np.random.default_rng(0).integers(0, 256, (3, 3, side, side), dtype=np.uint8)
    np.savez_compressed(test / "worst.npz", inputs=inputs, index=index, **columns)
    return folder


def write_regression(folder: Path, *, samples: int = 50) -> Path:
    test = write_run(folder) / "evaluation" / "test"
    truth = np.linspace(0, 10, samples)
    columns = {"target": truth, "prediction": truth + np.sin(truth), "loss": np.sin(truth) ** 2}
    pd.DataFrame({"index": range(samples), **columns}).to_csv(test / "predictions.csv", index=False)
    worst = {name: values[:4].astype(np.float32) for name, values in columns.items()}
    np.savez_compressed(test / "worst.npz", inputs=np.ones((4, 10), np.float32), index=np.arange(4), **worst)
    return folder


def page_data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def first_picture(page: Path) -> Image.Image:
    found = re.search(r'<img src="data:image/\w+;base64,([^"]+)"', page.read_text())
    assert found
    return Image.open(io.BytesIO(base64.b64decode(html.unescape(found[1]))))
