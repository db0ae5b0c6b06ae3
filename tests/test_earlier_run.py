"""A run that was trained before classes moved to parts: a language model whose record names the old modules.

``earlier_run`` holds it as an earlier version of the library wrote it, without a signature:

    boltcutter train data=text data.path=corpus.txt data.shape=[16] data.batch_size=8 data.split=[0.5,0.25,0.25] \
        model=gpt model.num_layers=1 model.num_heads=2 model.hidden_size=8 task=language trainer.max_epochs=2 \
        folder=run callback.progress=null logger=null report=false
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Boltcutter = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(Path(__file__).with_name("earlier_run"), tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def boltcutter(folder: Path) -> Boltcutter:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "boltcutter", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_names_modules_that_are_elsewhere_now(folder: Path) -> None:
    config = json.loads((folder / "run" / "record.json").read_text())["config"]
    targets = [config[group]["_target_"] for group in ("data", "model", "task")]
    assert targets == [
        "boltcutter.data.text.Text",
        "boltcutter.model.gpt.GPT",
        "boltcutter.task.language.LanguageModeling",
    ]


@pytest.mark.slow
def test_it_is_evaluated_with_the_same_result(folder: Path, boltcutter: Boltcutter) -> None:
    boltcutter("evaluate", "run=run", "ckpt=last")
    (file,) = (folder / "run" / "evaluation").glob("*/metrics.json")
    recorded = json.loads((folder / "run" / "record.json").read_text())["test"]
    assert json.loads(file.read_text()) == pytest.approx(recorded, rel=1e-5)


@pytest.mark.slow
def test_it_continues_and_is_reproduced(folder: Path, boltcutter: Boltcutter) -> None:
    boltcutter("train", "resume=run", "trainer.max_epochs=3")
    record = json.loads((folder / "run" / "record.json").read_text())
    assert [attempt["reason"] for attempt in record["attempts"]] == ["completed", "completed"]
    assert record["measured_after"]["val/loss"] == 51  # the third epoch, of 17 steps
    boltcutter("train", "reproduce=run", "trainer.max_epochs=1", "folder=again")
    assert (folder / "again" / "checkpoints" / "last.ckpt").is_file()
