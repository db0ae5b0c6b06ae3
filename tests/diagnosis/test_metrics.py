"""Planted bugs of what metrics get are named, and functions are themselves again afterwards."""

import copy
import pickle
from pathlib import Path

import programs.planted.tenth as own
import pytest
import sklearn.metrics
import torch
from programs import Program
from programs.running import assert_named, bugs_of
from torch import nn
from torchmetrics.classification import BinaryAUROC

from boltcutter.diagnosis.metrics import MetricCalls
from boltcutter.diagnosis.trial import Trial


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("metrics", probed=True))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial(with_data=True))


def test_a_layer_is_copied_and_pickled_meanwhile() -> None:
    calls = MetricCalls(layer := nn.Linear(2, 1))
    x = torch.eye(2)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied.eval()(x), layer(x))
    calls.close()
    assert not layer._forward_hooks


def test_calls_are_recorded_until_it_is_closed() -> None:
    function, metric = own.roc_auc_score, BinaryAUROC()
    scores, labels = torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0, 1, 1])
    calls = MetricCalls(nn.ModuleList([metric]))
    assert function not in (own.roc_auc_score, sklearn.metrics.roc_auc_score)
    own.roc_auc_score(labels.numpy(), scores.numpy())
    own.roc_auc_score(y_score=scores.numpy(), y_true=labels.numpy())
    metric(scores, labels)
    calls.close()
    assert own.roc_auc_score is sklearn.metrics.roc_auc_score is function
    metric(scores, labels)
    assert {name: len(found) for name, found in calls.calls.items()} == {"roc_auc_score": 2, "BinaryAUROC": 1}
    for found in calls.calls.values():
        assert all(torch.equal(c.target, labels.double()) for c in found)
        assert all(torch.allclose(c.prediction, scores.double()) for c in found)


def test_copies_of_a_layer_have_an_idle_hook() -> None:
    layer = nn.Linear(2, 2)
    calls = MetricCalls(nn.Sequential(layer))
    copy.deepcopy(layer).eval()(torch.eye(2))
    assert not calls.varies
    pickle.loads(pickle.dumps(layer)).eval()(torch.eye(2))
    assert not calls.varies
    layer.eval()(torch.eye(2))
    assert calls.varies
    calls.close()
    assert not layer._forward_hooks
