import torch
from torch.nn import functional as F

from boltcutter.diagnosis.calls import Call, LossCalls


def test_calls_and_remarks_are_recorded() -> None:
    target = torch.zeros(8)
    with LossCalls([target]) as seen:
        prediction = torch.rand(8, 1, requires_grad=True)
        (prediction - target).square()
        F.mse_loss(prediction[:, 0], target)
        torch.rand(2, 3).reshape(3, 2)
    assert [call.name for call in seen.calls] == ["mse_loss"]
    assert [remark.check for remark in seen.remarks] == ["broadcasting", "reshape-not-transpose"]


def test_each_target_has_a_row() -> None:
    logits, labels = torch.rand(2, 5, 3), torch.zeros(2, 3, dtype=torch.long)
    p, t = Call("cross_entropy", logits, labels).rows() or (logits, labels)
    assert (p.shape, t.shape) == ((6, 5), (6, 1))
    assert torch.equal(p[1], logits[0, :, 1])
    assert Call("mse_loss", torch.rand(3, 1), torch.rand(3)).rows() is None


def test_calls_after_an_update_are_left_out() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    with LossCalls([], [weight]) as seen, torch.no_grad():
        F.mse_loss(weight, torch.ones(1))
        weight.add_(1)
        F.mse_loss(weight, torch.ones(1))
    assert len(seen.calls) == 1
