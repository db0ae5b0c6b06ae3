from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import Script
from third_party.own_data import NUM_PREDICT, NUM_TEST, make_raw


def test_own_loaders_of_a_data_module_are_used(script: Script, tmp_path: Path) -> None:
    own = ["data=synthetic", "data._target_=third_party.own_data.Own", "data.shape=[6]", "data.num_classes=2"]
    run, env = tmp_path / "run", {"PYTHONPATH": "tests"}
    done = script("train", *own, "model=linear", "logger=null", f"folder={run}", "trainer.max_epochs=1", env=env)
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(run / "evaluation" / "test" / "predictions.csv")) == NUM_TEST
    done = script("predict", f"run={run}", env=env)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(run / "predictions.csv")
    assert len(rows) == NUM_PREDICT
    np.save(tmp_path / "first.npy", make_raw()[0][0])
    done = script(
        "predict", f"run={run}", f"input={tmp_path / 'first.npy'}", f"output={tmp_path / 'file.csv'}", env=env
    )
    assert done.returncode == 0, done.stderr
    assert pd.read_csv(tmp_path / "file.csv").iloc[0, -2:].tolist() == pytest.approx(rows.iloc[0, -2:].tolist())
