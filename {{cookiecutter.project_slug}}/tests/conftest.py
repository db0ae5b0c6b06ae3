"""Shared by all tests: short runs of the baseline experiment."""

from collections.abc import Callable
from pathlib import Path

import boltcutter
import pytest

ROOT = Path(__file__).parents[1]
QUICK = ["logger=null", "report=false", "test=false"]
Train = Callable[..., None]


@pytest.fixture
def train() -> Train:
    """Do what ``python scripts/train.py experiment=baseline …`` does, in this process."""

    def call(*overrides: str) -> None:
        boltcutter.train("experiment=baseline", *QUICK, *overrides, project=ROOT)

    return call
