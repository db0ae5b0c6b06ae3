from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import QUICK, Script, assert_same, assert_same_history, max_difference, require, saved_weights

DP = ["trainer=dp", "trainer.accelerator=cpu"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors. The last of the batches
# that validate and test 270 samples has 20.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "data.batch_size=50"]


@pytest.fixture(scope="module")
def replicated(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three replicas."""
    folder = tmp_path_factory.mktemp("replicated") / "run"
    done = script("train", *OVERRIDES, *DP, "trainer.devices=3", f"folder={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch recommends trainer=ddp") == 1
    return folder


@pytest.mark.slow
def test_three_replicas_train_and_test_as_one_device(reference: Path, replicated: Path) -> None:
    assert_same(reference, replicated)


def test_logged_values_are_those_of_the_whole_batch(reference: Path, replicated: Path) -> None:
    assert_same_history(reference, replicated)


def test_predictions_have_the_losses_of_one_device(reference: Path, replicated: Path) -> None:
    ours, theirs = (pd.read_csv(run / "evaluation/test/predictions.csv")["loss"] for run in (replicated, reference))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_with_dropout_is_bitwise_identical(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *DP, "trainer.devices=2", "model.dropout=0.3", "test=false", "scheduler=constant"]
    for name, epochs in (("uninterrupted", 2), ("resumed", 1)):
        done = script("train", *overrides, f"folder={tmp_path}/{name}", f"trainer.max_epochs={epochs}")
        assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}/resumed", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "uninterrupted", tmp_path / "resumed") == 0


def test_a_convnet_trains_in_bfloat16(script: Script, tmp_path: Path) -> None:
    done = script(
        "train", *QUICK, *DP, "trainer.devices=2", "trainer.precision=bf16-mixed", "trainer.max_steps=3", "test=false",
        f"folder={tmp_path}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(torch.isfinite(weight).all() for weight in saved_weights(tmp_path / "run").values())


def test_a_compiled_model_is_refused(script: Script, tmp_path: Path) -> None:
    require("g++", install="apt-get install g++")
    done = script("train", *OVERRIDES, *DP, "trainer.devices=2", "task.compile=true", f"folder={tmp_path}/run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: task.compile=true: trainer=dp replicates the model at each step" in done.stderr
