import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import QUICK, Script, require, saved_weights

DP = ["trainer=dp", "trainer.accelerator=cpu"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors to a whole step.
OVERRIDES = [
    *QUICK,
    "model=mlp",
    "optimizer=sgd",
    "data.batch_size=50",
]  # 270 samples to validate and test: the last batch has 20


def table(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as rows:
        return list(csv.DictReader(rows))


@pytest.fixture(scope="module")
def spread(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread") / "run"
    done = script("train", *OVERRIDES, *DP, "trainer.devices=3", f"folder={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch recommends trainer=ddp") == 1
    return folder


def test_three_copies_train_as_one_device(alone: Path, spread: Path) -> None:
    ours, theirs = saved_weights(spread), saved_weights(alone)
    assert ours.keys() == theirs.keys()  # no prefix
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_what_is_logged_is_that_of_the_whole_batch(alone: Path, spread: Path) -> None:
    ours, theirs = table(spread / "metrics.csv"), table(alone / "metrics.csv")
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.keys() - {n for n in mine if n.startswith("throughput/")}:
            assert mine[name] == other[name] or float(mine[name]) == pytest.approx(float(other[name]), abs=1e-5), name


def test_predictions_come_in_order(alone: Path, spread: Path) -> None:
    ours, theirs = (table(folder / "evaluation" / "test" / "predictions.csv") for folder in (spread, alone))
    assert [(row["index"], row["prediction"]) for row in ours] == [(row["index"], row["prediction"]) for row in theirs]
    np.testing.assert_allclose(*([float(row["loss"]) for row in rows] for rows in (ours, theirs)), atol=1e-4)


def test_a_run_on_copies_goes_on_exactly_with_dropout(script: Script, tmp_path: Path) -> None:
    words = [*OVERRIDES, *DP, "trainer.devices=2", "model.dropout=0.3", "test=false", "scheduler=constant"]
    for name, epochs in (("whole", 2), ("parted", 1)):
        done = script("train", *words, f"folder={tmp_path}/{name}", f"trainer.max_epochs={epochs}")
        assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}/parted", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    whole, parted = saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "parted")
    assert all(torch.equal(whole[name], parted[name]) for name in whole)


def test_a_convnet_trains_in_bfloat16_on_copies(script: Script, tmp_path: Path) -> None:
    done = script(
        "train", *QUICK, *DP, "trainer.devices=2", "trainer.precision=bf16-mixed", "trainer.max_steps=3", "test=false",
        f"folder={tmp_path}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_compiled_model_is_refused_in_one_line(script: Script, tmp_path: Path) -> None:
    require("g++", install="apt-get install g++")
    done = script("train", *OVERRIDES, *DP, "trainer.devices=2", "task.compile=true", f"folder={tmp_path}/run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: task.compile=true: trainer=dp replicates the model at each step" in done.stderr
