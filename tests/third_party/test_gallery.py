"""Each module of the gallery is trained on two ranks, tested, killed, resumed, evaluated, and used for predictions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Script, run_forked
from forkserver import ForkServer
from third_party.gallery import DATA, PREDICT, TESTED, overrides

ENV = {"PYTHONPATH": "tests"}
QUICK = ["logger=null", "trainer.log_every_n_steps=2"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
REPRESENTATIVE = {"forecast", "mpnn"}

Run = Callable[[str], Path]


def cases(names: set[str]) -> list[Any]:
    """Return representative cases, and all others as slow tests."""
    return [
        pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.slow) for name in DATA if name in names
    ]


def scores(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "evaluation" / "test" / "metrics.json").read_text()))


def record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "record.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_two_ranks_train_test_and_report(script: Script, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    arguments = [*overrides(name), *QUICK, *TWO, "trainer.max_epochs=2", f"folder={folder}"]
    done = script("train", *arguments, ranks=2, env=ENV)
    assert done.returncode == 0, done.stderr
    assert record(folder)["attempts"][0]["reason"] == "completed"
    assert done.stdout.count("does not use all parameters") == (name in ("gan", "dqn", "vae"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert len(pd.read_csv(folder / "metrics.csv"))
    assert "</html>" in (folder / "report.html").read_text()
    if name in TESTED:
        assert scores(folder)
        assert record(folder)["test"] == scores(folder)
    else:
        assert "test=true: " in done.stdout


@pytest.fixture(scope="module")
def resumed(forks: ForkServer, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train in one process, kill and resume; return the run folder."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "run"
            settings = [*overrides(name), *QUICK, "trainer.max_epochs=4", f"folder={folder}"]
            killed = run_forked(forks, ["tests/faulty.py", "SIGKILL", "saved", "scripts/train.py", *settings], env=ENV)
            assert killed.returncode == -9, killed.stderr
            done = script("train", f"resume={folder}", env=ENV)
            assert done.returncode == 0, done.stderr
            made[name] = folder
        return made[name]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(set(DATA)))
def test_a_killed_run_is_resumed(resumed: Run, name: str) -> None:
    attempts = record(resumed(name))["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["killed", "completed"]
    epochs = pd.read_csv(resumed(name) / "metrics.csv")["epoch"].dropna()
    assert set(epochs) >= {0, 1, 2, 3}


@pytest.mark.parametrize("name", cases(TESTED))
def test_evaluate_equals_the_test_after_training(resumed: Run, script: Script, tmp_path: Path, name: str) -> None:
    folder = resumed(name)
    done = script("evaluate", f"run={folder}", f"output={tmp_path}", env=ENV)
    assert done.returncode == 0, done.stderr
    if name not in ("simsiam", "vae"):  # add random noise
        assert json.loads((tmp_path / "metrics.json").read_text()) == pytest.approx(scores(folder), abs=1e-6)


@pytest.mark.parametrize("name", cases(PREDICT))
def test_predict(resumed: Run, script: Script, tmp_path: Path, name: str) -> None:
    done = script("predict", f"run={resumed(name)}", f"output={tmp_path}/out.csv", env=ENV)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    if file.suffix == ".csv":
        assert len(pd.read_csv(file)) in (27, 32)  # one row per sample
