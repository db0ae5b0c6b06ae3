"""Every precision that this machine can train in, over 32 bits: accuracy and speed on real digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from boltcutter.bench import harness
from boltcutter.bench.strategy import compare
from boltcutter.project import Project

WORK = ["model=convnet", "logger=null", "report=false"]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")


def main(project: Project, words: list[str]) -> None:
    """Train each; ``epochs=5 folder=runs/bench`` choose how long, and where the result goes.

    Raises:
        BenchmarkError: A run did.
    """
    chosen = harness.parse_options(words, {"epochs": "5", "folder": "runs/bench"})
    cuda = torch.cuda.is_available()
    eight = cuda and torch.cuda.get_device_capability() >= (8, 9) and find_spec("torchao") is not None
    compare("precision", rows(cuda=cuda, eight=eight), WORK, int(chosen["epochs"]), Path(chosen["folder"]))


def rows(*, cuda: bool, eight: bool) -> dict[str, list[str]]:
    """What is trained, by name; TF32 where there is a GPU, 8 bits where it has them."""
    found = {name: [f"trainer.precision={name}"] for name in PRECISIONS}
    found["16-true"].append("+optimizer.eps=1e-4")
    found |= {"TF32": ["matmul_precision=high"]} if cuda else {}
    return found | ({"float8": ["trainer.precision=float8"]} if eight else {})
