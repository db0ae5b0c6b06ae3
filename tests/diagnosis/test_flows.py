import pytest
import torch
from programs.planted.ninth import Coupling

from boltcutter.diagnosis.flows import Step, _keep, _sign_of_determinant, _wrong_steps


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_sign_of_a_log_determinant_is_found(flip: bool, sign: float) -> None:
    x, layer, steps = torch.randn(8, 2), Coupling(flip, sign), list[Step]()
    before = [p.detach().clone() for p in layer.parameters()]
    _keep(steps, "net.0", layer, (x,), {}, layer(x))
    assert _sign_of_determinant(steps[0]) == sign
    (step,) = steps
    assert bool(_wrong_steps(steps, -step.log_det.mean(), 1.0)) == (sign < 0)
    assert bool(_wrong_steps(steps, step.log_det.mean(), 1.0)) == (sign > 0)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert layer.training


def test_other_pairs_are_no_flow() -> None:
    class Split(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, self.head(x)[:, 0]

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 1)

    x, layer, steps = torch.randn(8, 2), Split(), list[Step]()
    _keep(steps, "net", layer, (x,), {}, layer(x))
    assert _sign_of_determinant(steps[0]) == 0
    assert not _wrong_steps(steps, steps[0].log_det.mean(), 1.0)
