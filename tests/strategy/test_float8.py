from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.model.mlp import MLP
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.float8 import Float8Precision


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # within torchao
def test_linear_layers_are_converted_and_keep_their_names() -> None:
    torch.manual_seed(0)
    model = MLP((1, 8, 8), 10, hidden_sizes=[64, 32])  # the last layer has ten rows, which is not a multiple of 16
    names, inputs, targets = list(model.state_dict()), torch.rand(48, 1, 8, 8), torch.randint(10, (48,))
    plugin, exact = Float8Precision("cpu", emulate=True), model(inputs).detach()
    converted: Any = plugin.convert_module(plugin.convert_module(model))
    assert converted is model
    assert list(model.state_dict()) == names
    types = [type(part).__name__ for part in model.modules() if isinstance(part, nn.Linear)]
    assert types == ["Float8Linear", "Float8Linear", "Linear"]
    with plugin.forward_context():
        difference = float((model(inputs) - exact).detach().abs().max())
    assert 1e-4 < difference < 0.1  # rounded
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        with plugin.forward_context():
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert model.head.weight.dtype == torch.float32


def test_a_model_without_convertible_layers_is_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"^trainer.precision=float8: the model has no linear layer whose dimensions are mult"
    ):
        Float8Precision("cpu").convert_module(nn.Linear(16, 10))
