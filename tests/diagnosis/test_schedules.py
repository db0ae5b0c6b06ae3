"""Planted bugs of schedules and monitors are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from programs import Base, Program, digits
from programs.running import assert_named, bugs_of, trainer_of
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from boltcutter.diagnosis.schedules import schedule_dead
from boltcutter.diagnosis.trial import Trial


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("schedules"))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", bugs_of("schedules", probed=True))
def test_a_bug_of_a_schedule_that_only_a_trial_calls_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial())


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(("end", "is_dead"), [(100, False), (40, True)])
def test_a_schedule_of_a_resumed_run_is_computed_from_its_step(end: int, is_dead: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / end))
    for _ in range(30):
        scheduler.step()
    assert bool([*schedule_dead(evidence(scheduler, L.LightningModule()))]) == is_dead


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(("done", "is_early"), [(0, True), (50, False)])
def test_milestones_of_a_resumed_run_count_from_its_beginning(done: int, is_early: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = MultiStepLR(optimizer, [done + 4], 0.1)
    for _ in range(done):
        scheduler.step()
    assert bool([*schedule_dead(evidence(scheduler, L.LightningModule()))]) == is_early


class Own:
    """A scheduler that holds what it changes in attributes of any name."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: L.LightningModule) -> None:
        self.optimizer, self.held, self.module, self.calls = optimizer, [optimizer], module, 0

    def step(self) -> None:
        self.calls += 1
        self.held[0].param_groups[0]["lr"] *= 0.1
        self.module.calls = self.calls  # type: ignore[assignment]


@pytest.mark.parametrize("has_module", [False, True])
def test_a_scheduler_of_somebody_else_is_not_stepped(has_module: bool) -> None:
    module = L.LightningModule()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = Own(optimizer, module if has_module else L.LightningModule())
    found = [*schedule_dead(evidence(scheduler, module))]
    assert bool(found) != has_module  # a copy is stepped, unless it would need the module
    assert (scheduler.calls, optimizer.param_groups[0]["lr"], hasattr(module, "calls")) == (0, 1.0, False)


@pytest.mark.parametrize("kind", ["nonlocal", "list", "method"])
def test_a_function_that_keeps_a_state_is_not_called(kind: str) -> None:
    count, calls = 0, list[int]()

    class Holder:
        def factor(self, step: int) -> float:
            calls.append(step)
            return 0.1 ** len(calls)

    def counts(step: int) -> float:
        nonlocal count
        count += 1
        return 0.1**count

    holder = Holder()
    functions = {
        "nonlocal": counts,
        "list": lambda step: calls.append(step) or 0.1 ** len(calls),
        "method": holder.factor,
    }
    module = L.LightningModule()
    scheduler = LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), functions[kind])
    before = count, len(calls)
    assert [*schedule_dead(evidence(scheduler, module))] == []
    assert (count, len(calls)) == before


def evidence(scheduler: Any, module: L.LightningModule) -> Any:
    config = SimpleNamespace(scheduler=scheduler, interval="step", frequency=1)
    trainer = SimpleNamespace(num_training_batches=10, max_epochs=10, lr_scheduler_configs=[config])
    trainer.optimizers = [scheduler.optimizer]
    return SimpleNamespace(probe=None, trainer=trainer, total_steps=100, module=module)


class Counts(Base):
    """Counts how often its schedule asks for a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def rate(self, step: int) -> float:
        self.asked.append(step)
        return max(0.0, 1 - step / self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, self.rate), "interval": "step"}]


@pytest.mark.filterwarnings("ignore")
def test_a_trial_that_calls_a_function_of_the_module_leaves_nothing_changed(tmp_path: Path) -> None:
    asked = []
    for callback in (Trial(), L.pytorch.callbacks.Timer()):
        module = Counts()
        trainer_of(tmp_path, callback, max_epochs=1, limit_train_batches=8).fit(module, *digits())
        asked.append(module.asked)
    assert asked[0] == asked[1]
