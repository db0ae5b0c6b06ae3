"""Each experiment takes a training step, and a resumed run equals an uninterrupted one."""

from pathlib import Path

import boltcutter
import pytest
import torch
from conftest import ROOT, Train

EXPERIMENTS = sorted(file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_takes_a_step(experiment: str, train: Train) -> None:
    run = train(f"experiment={experiment}", "trainer.devices=1", "trainer.max_steps=1")
    assert (run / "record.json").is_file()


def test_resumed_run_equals_uninterrupted_run(train: Train, tmp_path: Path) -> None:
    steps = "trainer.max_steps=4"
    uninterrupted = train(steps)
    with pytest.raises(KeyboardInterrupt):
        train(steps, "+callback.interrupt._target_=conftest.Interrupt", f"folder={tmp_path}/resumed")
    resumed = train(f"resume={tmp_path}/resumed")
    expected, weights = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (uninterrupted, resumed)
    )
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_each_step_is_as_it_was() -> None:
    boltcutter.check_golden("tests/golden/baseline.ledger", project=ROOT)  # boltcutter golden writes another one
