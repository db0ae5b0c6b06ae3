"""Trained objects of a run."""

import json
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
    for given, expected in (({"device": "cuda:99"}, "device=cuda:99"), ({"ckpt": "worst"}, "ckpt=worst")):
        with pytest.raises(boltcutter.ConfigError, match=expected):
            boltcutter.load(trained, project=ROOT, **given)  # type: ignore[arg-type]
    with pytest.raises(boltcutter.ConfigError, match="run=nowhere"):
        boltcutter.load("nowhere", project=ROOT)
