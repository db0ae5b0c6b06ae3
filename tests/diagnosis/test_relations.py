import torch

from boltcutter.diagnosis.relations import Output


def test_the_sign_of_gradients() -> None:
    one = Output("judge", torch.zeros(2), [], has_gradient=False)
    assert one.sign == 0
    one.gradients.append(torch.tensor([-0.5, -1.0]))
    assert one.sign == -1
    one.gradients[0] = torch.tensor([-0.5, 1.0])
    assert one.sign == 0
