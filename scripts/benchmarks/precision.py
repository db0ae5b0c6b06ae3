"""Accuracy and speed of each precision that this machine supports, relative to 32 bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.strategy import compare
from boltcutter.project import Project

WORK = ["model=convnet", "logger=null", "report=false"]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")


def main(project: Project, overrides: list[str]) -> None:
    """Train with each precision; options: ``epochs=5 folder=runs/bench``.

    Raises:
        BenchmarkError: A run failed.
    """
    chosen = harness.parse_options(overrides, {"epochs": "5", "folder": "runs/bench"})
    cuda = torch.cuda.is_available()
    eight = cuda and torch.cuda.get_device_capability() >= (8, 9) and find_spec("torchao") is not None
    compare("precision", rows(cuda=cuda, eight=eight), WORK, int(chosen["epochs"]), Path(chosen["folder"]))


def rows(*, cuda: bool, eight: bool) -> dict[str, list[str]]:
    """Return the overrides of each run; TF32 only with a GPU, float8 only if the GPU supports it."""
    found = {name: [f"trainer.precision={name}"] for name in PRECISIONS}
    found["16-true"].append("+optimizer.eps=1e-4")
    found |= {"TF32": ["matmul_precision=high"]} if cuda else {}
    return found | ({"float8": ["trainer.precision=float8"]} if eight else {})
