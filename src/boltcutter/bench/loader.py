"""Bytes a second that a loader gives, over NumPy's indexing of the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from pydoc import locate
from typing import Any

import numpy as np

from boltcutter.bench import harness
from boltcutter.bench.harness import ratio

WORKS = {
    "28 x 28 bytes, batch 64": {"shape": (1, 28, 28), "length": 20_000, "batch_size": 64},
    "3 x 32 x 32 bytes, batch 128": {"shape": (3, 32, 32), "length": 10_000, "batch_size": 128},
    "3 x 64 x 64 floats, batch 64": {"shape": (3, 64, 64), "length": 5_000, "batch_size": 64, "dtype": "float32"},
}


def main(configs: Path, words: list[str]) -> None:
    """Measure in one process; ``rounds=5 batches=70 folder=runs/bench`` choose how.

    Raises:
        Failed: A setting is unknown.
    """
    chosen = harness.options(words, {"rounds": "5", "batches": "70", "folder": "runs/bench"})
    synthetic: Any = locate("boltcutter.data.synthetic.Synthetic")
    ratios, details = [], {}
    for name, settings in WORKS.items():
        data = synthetic(**settings)
        data.setup("fit")
        ours, theirs = compare(data, int(chosen["rounds"]), int(chosen["batches"]))
        ratios.append(ratio(name, ours, "numpy", theirs, least=True))
        details[name] = {"boltcutter": ours, "numpy": theirs}
    harness.report("loader", Path(chosen["folder"]), ratios, details)


def compare(data: Any, rounds: int, batches: int) -> tuple[list[float], list[float]]:
    """Bytes a second of the module's training loader, and of NumPy, in turn."""
    samples = data.splits.train
    inputs, targets = samples.inputs.numpy(), samples.targets.numpy()
    chosen = [np.asarray(batch) for batch in islice(data.train_dataloader().batch_sampler, batches)]
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        loader = data.train_dataloader()
        ours.append(rate(lambda loader=loader: [_bytes(x) + _bytes(y) for x, y in islice(loader, batches)]))  # type: ignore[misc]
        theirs.append(rate(lambda: [inputs[at].nbytes + targets[at].nbytes for at in chosen]))
    return ours, theirs


def rate(read: Callable[[], list[int]]) -> float:
    """Bytes a second of what gives the bytes of each batch that it reads."""
    began = time.perf_counter()
    total = sum(read())
    return total / (time.perf_counter() - began)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
