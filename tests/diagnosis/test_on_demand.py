"""Checks that no training asks are registered when they are needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from boltcutter.diagnosis import CHECKS, Invariants, on_demand


def test_a_training_can_ignore_them() -> None:
    code = (
        "from boltcutter.diagnosis import CHECKS, Invariants; Invariants(ignore=['decay']); print('mixing' in CHECKS); "
    )
    code += "Invariants(ignore=['mixing'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]
    with pytest.raises(ValueError, match=r"callback\.invariants\.ignore=mixng: .*mixing"):
        Invariants(ignore=["mixng"])


def test_none_is_missing() -> None:
    files = {file.stem for file in Path(on_demand.__file__).parent.glob("*.py") if "\n@check(" in file.read_text()}
    asked = {c.decide.__module__.rpartition(".")[2] for group in CHECKS.values() for c in group}
    assert files - {"checks"} == asked - {"test_trial", "test_checks"}
