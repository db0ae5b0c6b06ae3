"""Shared by all tests: short runs of scripts/train.py."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = ["logger=null", "report=false", "test=false"]
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train() -> Train:
    """Train the baseline experiment, as changed by the given overrides, in its own process."""

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/train.py", "experiment=baseline", *QUICK, *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done

    return run
