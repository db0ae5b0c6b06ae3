"""Each model takes a training step, and a resumed run equals an uninterrupted one."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, Train


@pytest.mark.parametrize("model", sorted(file.stem for file in (ROOT / "configs" / "model").glob("*.yaml")))
def test_model_takes_a_step(model: str, train: Train, tmp_path: Path) -> None:
    train(f"model={model}", "trainer.max_steps=1", f"folder={tmp_path}/run")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


def test_resumed_run_equals_uninterrupted_run(train: Train, tmp_path: Path) -> None:
    # Without a scheduler, because its length depends on max_epochs.
    train("scheduler=null", "trainer.max_epochs=2", f"folder={tmp_path}/uninterrupted")
    train("scheduler=null", "trainer.max_epochs=1", f"folder={tmp_path}/resumed")
    train(f"resume={tmp_path}/resumed", "trainer.max_epochs=2")
    expected, weights = (
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in ("uninterrupted", "resumed")
    )
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
