import math

import pytest
import torch
from torch.optim import SGD

from boltcutter.task.schedule import warmup_cosine


def curve(total_steps: int, **options: float) -> list[float]:
    """Return the learning rate of each step, and after the last."""
    optimizer = SGD([torch.zeros(1)], lr=2.0)
    schedule = warmup_cosine(optimizer, total_steps=total_steps, **options)
    seen = [schedule.get_last_lr()[0]]
    for _ in range(total_steps):
        optimizer.step()
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    return seen


def test_linear_warmup_and_cosine_decay() -> None:
    seen = curve(100, warmup_ratio=0.1, min_lr_ratio=0.0)
    assert seen[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert seen[10] == 2.0
    assert seen[55] == pytest.approx(1.0)  # half way down
    assert seen[99] == pytest.approx(1 + math.cos(math.pi * 89 / 90))
    assert seen[100] == pytest.approx(0.0)
    assert seen[10:] == sorted(seen[10:], reverse=True)


def test_min_lr_ratio() -> None:
    seen = curve(20, warmup_ratio=0.0, min_lr_ratio=0.25)
    assert (seen[0], seen[10], seen[20]) == pytest.approx((2.0, 1.25, 0.5))
    assert curve(5, min_lr_ratio=1.0)[1:] == [2.0] * 5


def test_learning_rate_after_the_end() -> None:
    optimizer = SGD([torch.zeros(1)], lr=2.0)
    schedule = warmup_cosine(optimizer, total_steps=2, min_lr_ratio=0.5)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [1.0]


@pytest.mark.parametrize("total_steps", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5, 0.99])
def test_learning_rate_of_few_steps_is_positive(total_steps: int, ratio: float) -> None:
    seen = curve(total_steps, warmup_ratio=ratio)
    assert 0 < seen[0] <= 2
    assert all(0 <= rate <= 2 for rate in seen)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_warmup_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"^scheduler\.warmup_ratio={ratio} is not in \[0, 1\); try 0\.05$"):
        curve(10, warmup_ratio=ratio)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_min_lr_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"^scheduler\.min_lr_ratio={ratio} is not in \[0, 1\]; try 0$"):
        curve(10, min_lr_ratio=ratio)


def test_a_group_that_is_added_during_training_continues_with_its_learning_rate() -> None:
    optimizer = SGD([torch.zeros(1)], lr=2.0)
    schedule = warmup_cosine(optimizer, total_steps=100, warmup_ratio=0)
    for step in range(100):
        if step == 50:
            optimizer.add_param_group({"params": [torch.zeros(1)], "lr": optimizer.param_groups[0]["lr"] / 10})
        optimizer.step()
        schedule.step()
        first, *added = schedule.get_last_lr()
        assert added == pytest.approx([first / 10] if step >= 50 else [])
    resumed = SGD([torch.zeros(1)], lr=2.0)
    copy = warmup_cosine(resumed, total_steps=100, warmup_ratio=0)
    resumed.add_param_group({"params": [torch.zeros(1)]})
    resumed.load_state_dict(optimizer.state_dict())
    copy.load_state_dict(schedule.state_dict())
    for each in (resumed, copy, optimizer, schedule):
        each.step()
    assert copy.get_last_lr() == schedule.get_last_lr()
