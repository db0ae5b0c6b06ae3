import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning import Trainer

from boltcutter.scaffold.proof import run_briefly, run_script

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


def test_a_module_of_a_package_is_run_as_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder := tmp_path / "proven" / "cli").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (tmp_path / "proven" / "__init__.py").write_text("WORD = 'called'\n")
    (folder / "beside_main.py").write_text("")
    (folder / "main.py").write_text("import beside_main\nfrom .. import WORD\ndef main(): print(WORD)\n")
    run_script(folder / "main.py")
    (folder / "alone.py").write_text("from .. import WORD\ndef main(): ...\nif __name__ == '__main__': print(WORD)\n")
    run_script(folder / "alone.py")
    assert capsys.readouterr().out == "called\ncalled\n"


def test_fit_keeps_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "fit", Trainer.fit)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text("")
    run_briefly("steps.json", "2", "1", str(tmp_path / "own.py"))
    assert "ckpt_path" in inspect.signature(Trainer.fit).parameters  # which Lightning CLI reads
