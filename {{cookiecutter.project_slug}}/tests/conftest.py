"""Shared by all tests: short runs of this project."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boltcutter
import lightning as L
import pytest

ROOT = Path(__file__).parents[1]
QUICK = ["logger=null", "report=false", "test=false", "trainer.accelerator=cpu"]
Train = Callable[..., Path]


class Interrupt(L.Callback):
    """Do what Ctrl-C does, after the second batch of a run that is not resumed."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 1 and trainer.ckpt_path is None:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Do what ``python scripts/train.py …`` does, in this process, and return the folder of the run.

    ``experiment=null`` selects the library's defaults instead of the experiment in ``configs/train.yaml``.
    """

    def call(*overrides: str) -> Path:
        return boltcutter.train(*QUICK, f"runs={tmp_path}/runs", *overrides, project=ROOT)

    return call
