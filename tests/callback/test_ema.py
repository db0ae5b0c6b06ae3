import json
from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script

from boltcutter.callback.ema import EMA


def test_the_average_is_validated_saved_and_tested(script: Script, tmp_path: Path) -> None:
    overrides = ["callback=[default,ema]", "callback.ema.decay=0.95", "model=mlp", "model.norm=batchnorm"]
    done = script("train", *QUICK, *overrides, f"folder={tmp_path}/run")
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


def test_the_average_follows_short_training(script: Script, tmp_path: Path) -> None:
    # With a constant decay of 0.999, 60 % of the average would still be the initial weights.
    overrides = ["callback=[default,ema]", "model=mlp", "trainer.max_epochs=25", f"folder={tmp_path}/run"]
    assert script("train", *QUICK, *overrides).returncode == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text())["test"]["test/accuracy"] > 0.9


def test_averaging_can_start_later(script: Script, tmp_path: Path) -> None:
    overrides = [
        "callback=[default,ema]",
        "callback.ema.update_starting_at_step=1000",
        "model=mlp",
        f"folder={tmp_path}/run",
    ]
    assert script("train", *QUICK, *overrides).returncode == 0


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_invalid_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"callback.ema.decay="):
        EMA(decay)
