import json
from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script

from boltcutter.callback.ema import EMA


def test_what_is_validated_kept_and_tested_is_the_average(script: Script, tmp_path: Path) -> None:
    words = ["callback=[default,ema]", "callback.ema.decay=0.95", "model=mlp", "model.norm=batchnorm"]
    done = script("train", *QUICK, *words, f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    again = script("evaluate", f"run={tmp_path}/run")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run" / "evaluation" / "test" / "metrics.json").read_text()) == record["test"]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    average, plain = saved["state_dict"], saved["current_model_state"]
    same = {name for name in average if torch.equal(average[name], plain[name])}
    assert same == {name for name in average if "running" in name or "num_batches" in name or "shift" in name}
    val = script("evaluate", f"run={tmp_path}/run", "ckpt=last", "split=val")
    assert val.returncode == 0, val.stderr
    found = json.loads((tmp_path / "run" / "evaluation" / "val" / "metrics.json").read_text())
    assert found["val/loss"] == pytest.approx(record["metrics"]["val/loss"], rel=1e-6)


def test_averaging_may_begin_later(script: Script, tmp_path: Path) -> None:
    words = [
        "callback=[default,ema]",
        "callback.ema.update_starting_at_step=1000",
        "model=mlp",
        f"folder={tmp_path}/run",
    ]
    assert script("train", *QUICK, *words).returncode == 0


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_share_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"callback.ema.decay="):
        EMA(decay)
