"""Trained objects of a run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, saved_weights

import boltcutter


def test_the_task_is_trained_and_the_data_is_set_up(trained: Path) -> None:
    task, data = boltcutter.load(trained, "data.batch_size=32", project=ROOT)
    weights = saved_weights(trained, "best")
    assert all(torch.equal(task.state_dict()[name], weights[name]) for name in weights)
    assert not task.training
    test = data.splits.test  # type: ignore[attr-defined]
    inputs, targets = test.__getitems__(boltcutter.Batch(range(len(test))))
    accuracy = (task(inputs).argmax(1) == targets).float().mean()  # type: ignore[operator]
    assert accuracy.item() == pytest.approx(json.loads((trained / "record.json").read_text())["test"]["test/accuracy"])


def test_a_mistake_is_one_line(trained: Path) -> None:
    with pytest.raises(boltcutter.ConfigError, match="ckpt=worst"):
        boltcutter.load(trained, project=ROOT, ckpt="worst")
    with pytest.raises(boltcutter.ConfigError, match="run=nowhere"):
        boltcutter.load("nowhere", project=ROOT)


def test_the_best_checkpoint_of_a_callback_of_the_user_is_loaded(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / trained.name
    shutil.copytree(trained, folder)
    own = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    own["state_dict"] = {name: torch.ones_like(value) for name, value in own["state_dict"].items()}
    torch.save(own, folder / "own.ckpt")
    record = json.loads((folder / "record.json").read_text())
    record |= {"best": str(folder / "own.ckpt"), "best_by": {"monitor": "val/loss"}}
    (folder / "record.json").write_text(json.dumps(record))
    task, _ = boltcutter.load(folder, project=ROOT)
    assert all(torch.equal(value, own["state_dict"][name]) for name, value in task.state_dict().items())
