from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from boltcutter.diagnosis.rates import BODY, HEAD, _are_alike, schedule_repeated


def optimizer() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(("settings", "found"), [({"step_size": 1}, 1), ({"step_size": 3}, 0)])
def test_schedules_of_the_same_optimizer(settings: Any, found: int) -> None:
    one, other = optimizer(), optimizer()
    schedules = [StepLR(one, step_size=1), StepLR(one, **settings)]  # others are chained
    configs = [SimpleNamespace(scheduler=each) for each in schedules]
    seen: Any = SimpleNamespace(optimizers=[one, other], trainer=SimpleNamespace(lr_scheduler_configs=configs))
    assert len([*schedule_repeated(seen)]) == found
    assert _are_alike(*schedules) == bool(found)


def test_names_of_bodies_and_heads() -> None:
    assert all(BODY.search(name) for name in ("backbone.0.weight", "model.encoder.weight", "pretrained.fc.weight"))
    assert all(HEAD.search(name) for name in ("head.weight", "net.classifier.1.bias", "fc.weight"))
    assert not HEAD.search("backbone.0.weight")
