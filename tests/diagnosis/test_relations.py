import pytest
import torch

from boltcutter.diagnosis.graph import Loss
from boltcutter.diagnosis.relations import Output, _sources


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (torch.log, [0]),
        (lambda y: (y - y.mean()) / y.std(), [0]),
        (lambda y: y, []),  # it is the part itself
        (lambda y: -y, []),  # it falls
        (lambda y: torch.rand(len(y)), []),
    ],
)
def test_a_target_that_is_a_rising_function_of_a_part(function: object, found: list[int]) -> None:
    torch.manual_seed(0)
    y = 1 + torch.rand(32)
    call = Loss("mse_loss", torch.zeros(32), function(y))  # type: ignore[operator]
    assert [*_sources(call, [y, torch.rand(32)])] == found


def test_the_sign_of_gradients() -> None:
    one = Output("judge", torch.zeros(2), [], has_gradient=False)
    assert one.sign == 0
    one.gradients.append(torch.tensor([-0.5, -1.0]))
    assert one.sign == -1
    one.gradients[0] = torch.tensor([-0.5, 1.0])
    assert one.sign == 0
