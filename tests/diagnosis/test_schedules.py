"""Planted bugs of schedules and monitors are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Program
from programs.running import assert_named, bugs_of
from torch.optim.lr_scheduler import LambdaLR

from boltcutter.diagnosis.schedules import schedule_dead


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("schedules"))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(("end", "is_dead"), [(100, False), (40, True)])
def test_a_schedule_of_a_resumed_run_is_computed_from_its_step(end: int, is_dead: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / end))
    for _ in range(30):
        scheduler.step()
    config = SimpleNamespace(scheduler=scheduler, interval="step", frequency=1)
    trainer = SimpleNamespace(num_training_batches=10, max_epochs=10, lr_scheduler_configs=[config])
    module = SimpleNamespace(automatic_optimization=True)
    seen: Any = SimpleNamespace(trainer=trainer, total_steps=100, module=module)
    assert bool([*schedule_dead(seen)]) == is_dead
