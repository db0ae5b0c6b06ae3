import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Program
from programs.running import assert_named, bugs_of
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from boltcutter.diagnosis.rates import BODY, HEAD, _are_alike, _how_compounded, schedule_repeated
from boltcutter.diagnosis.trial import Trial


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("rates", probed=True))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial(with_data=True))


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


def _multiplied(factors: list[float]) -> list[float]:
    rates = [0.1]
    for factor in factors:
        rates.append(rates[-1] * factor)
    return rates


@pytest.mark.parametrize(
    ("factors", "found"),
    [
        ([(k + 1) / 20 for k in range(8)], True),
        ([min(1.0, (k + 1) / 4) for k in range(8)], True),
        ([1 - k / 100 for k in range(8)], True),
        ([0.99**k for k in range(8)], True),
        ([0.97] * 8, False),
        ([(99 - k) / (100 - k) for k in range(8)], False),  # a line to 0
        ([(1 + math.cos((k + 1) / 40)) / (1 + math.cos(k / 40)) for k in range(8)], False),
        ([(k + 2) / (k + 1) for k in range(8)], False),  # a warm-up
        ([1.0] * 8, False),
    ],
)
def test_factors_that_are_made_for_the_initial_rate(factors: list[float], found: bool) -> None:
    assert bool(_how_compounded(_multiplied(factors))) == found
