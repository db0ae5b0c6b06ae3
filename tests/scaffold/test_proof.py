import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
L.seed_everything(1)
L.Trainer(max_epochs=1, logger=False, limit_train_batches=4).fit(BoringModel())
print("after")
"""


@pytest.mark.slow
def test_a_script_is_ended_after_some_steps(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "boltcutter.scaffold.proof", "steps.json", "6", "1", "own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "after" not in done.stdout
    found = json.loads((tmp_path / "steps.json").read_text())
    assert len(found) == 6
    assert not list(tmp_path.rglob("*.ckpt"))
