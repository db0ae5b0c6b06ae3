from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.diagnosis.called import Call, _problem_of_returns, _rates_perfect_higher, _tried


def dice(p: Tensor, y: Tensor) -> Tensor:
    return 2 * (p * y).sum() / (p.sum() + y.sum())


@pytest.mark.parametrize(
    ("function", "is_score"),
    [
        (dice, True),
        (lambda p, y: 1 - dice(p, y), False),
        (lambda p, y: dice(p.sigmoid(), y), True),
        (F.mse_loss, False),
    ],
)
def test_a_score_is_higher_for_perfect_predictions(function: Any, is_score: bool) -> None:
    torch.manual_seed(0)
    y = (torch.rand(64) > 0.5).float()
    p = torch.randn(64) if "sigmoid" in getattr(function, "__code__", dice.__code__).co_names else torch.rand(64)
    assert _rates_perfect_higher(Call("f", function, (p, y), {}, function(p, y))) == is_score


def test_a_score_of_classes() -> None:
    torch.manual_seed(0)
    y = torch.randint(0, 3, (4, 5, 5))

    def overlap(logits: Tensor, y: Tensor) -> Tensor:
        return (logits.softmax(1) * nn.functional.one_hot(y, 3).movedim(-1, 1)).sum(1).mean()

    p = torch.randn(4, 3, 5, 5)
    assert _rates_perfect_higher(Call("overlap", overlap, (p, y), {}, overlap(p, y)))


def cumulated(rewards: Any, gamma: float = 0.5) -> list[float]:
    found, total = [], 0.0
    for reward in rewards:
        total = float(reward) + gamma * total
        found.append(total)
    return found


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 2.0, 1.0, 3.0], torch.arange(6.0)])
def test_sums_are_of_later_rewards(rewards: Any) -> None:
    def returns(rewards: Any) -> list[float]:
        return cumulated([*rewards][::-1])[::-1]

    def in_reverse(rewards: Any) -> list[float]:
        return cumulated([*rewards][::-1])

    for function, adds_past in ((cumulated, True), (in_reverse, True), (returns, False)):
        assert bool(_problem_of_returns(Call("f", function, (rewards,), {}, function(rewards)))) == adds_past
    assert not _problem_of_returns(Call("f", lambda r: 3.0, (rewards,), {}, 3.0))


def discounted(rewards: Any, gamma: float) -> list[float]:
    return cumulated(rewards, gamma)


def returns_of_a_portfolio(prices: Any) -> list[float]:
    raise AssertionError


def plot_returns(rewards: Any) -> None:
    print(rewards)
    raise AssertionError


class Owner(nn.Module):
    """A class of the user's, whose file is this one."""


def test_only_functions_of_rewards_that_show_nothing_are_tried() -> None:
    assert [call.name for call in _tried(Owner())] == ["discounted"] * 2
