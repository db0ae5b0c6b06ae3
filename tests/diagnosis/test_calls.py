from typing import Any

import pytest
import torch
from torch.nn import functional as F

from boltcutter.diagnosis.calls import LossCalls, is_function, rows_of
from boltcutter.diagnosis.graph import Loss


def test_calls_and_remarks_are_recorded() -> None:
    target = torch.zeros(8)
    with LossCalls([target]) as seen:
        prediction = torch.rand(8, 1, requires_grad=True)
        (prediction - target).square()
        F.mse_loss(prediction[:, 0], target)
        torch.rand(2, 3).reshape(3, 2)
    assert [call.kind for call in seen.calls] == ["mse_loss"]
    assert [remark.check for remark in seen.remarks] == ["broadcasting", "reshape-not-transpose"]


def test_each_target_has_a_row() -> None:
    logits, labels = torch.rand(2, 5, 3), torch.zeros(2, 3, dtype=torch.long)
    p, t = rows_of(Loss("cross_entropy", logits, labels)) or (logits, labels)
    assert (p.shape, t.shape) == ((6, 5), (6, 1))
    assert torch.equal(p[1], logits[0, :, 1])
    assert rows_of(Loss("mse_loss", torch.rand(3, 1), torch.rand(3))) is None


def test_calls_after_an_update_are_left_out() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    with LossCalls([], [weight]) as seen, torch.no_grad():
        F.mse_loss(weight, torch.ones(1))
        weight.add_(1)
        F.mse_loss(weight, torch.ones(1))
    assert len(seen.calls) == 1


def test_only_an_equality_that_is_averaged_is_an_accuracy() -> None:
    labels = torch.arange(8)
    with LossCalls() as seen:
        (labels[:, None] == labels).float().mean()  # pairs of a batch
        (labels[:, None] == labels.flip(0)).sum(1)  # pairs of two batches
    assert not seen.remarks
    with LossCalls() as seen:
        (torch.zeros(8, 1) == labels).float().mean()
    assert [remark.check for remark in seen.remarks] == ["broadcasting"]


def test_heads_are_split_at_the_end() -> None:
    x = torch.rand(2, 6, 8)
    with LossCalls() as seen:
        x.view(2, 6, 4, 2).transpose(1, 2)
        x.transpose(1, 2).reshape(2, 8, 2, 3)  # of a picture
    assert not seen.remarks
    with LossCalls() as seen:
        x.view(2, 4, 6, 2)
    assert [remark.check for remark in seen.remarks] == ["reshape-not-transpose"]


def test_what_feeds_a_loss_and_its_options_are_kept() -> None:
    out = torch.zeros(3, requires_grad=True).exp()[:, None]
    with LossCalls() as seen:
        F.poisson_nll_loss(out[:, 0], torch.ones(3), log_input=False)
    (call,) = seen.calls
    assert call.source == "Exp"
    assert call.options["log_input"] is False


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.log, True),
        (lambda y: (y - y.mean()) / y.std(), True),
        (lambda y: y, True),
        (lambda y: -y, True),
        (lambda y: torch.rand(len(y)), False),
        (lambda y: torch.ones(len(y)), False),
    ],
)
def test_a_target_that_is_a_function_of_a_part(function: Any, expected: bool) -> None:
    torch.manual_seed(0)
    y = 1 + torch.rand(32)
    assert is_function(y, function(y)) == expected
