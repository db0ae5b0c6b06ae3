from typing import Any

import pytest
import torch
from conftest import assert_learns
from torch import nn
from torch.nn import functional as F

from boltcutter.model.mlp import ACTIVATIONS, MLP, NORMS


@pytest.mark.parametrize("input_shape", [(10,), (1, 8, 8), (3, 32, 32)])
def test_shape_in_and_out(input_shape: tuple[int, ...]) -> None:
    assert MLP(input_shape, 7)(torch.rand(5, *input_shape)).shape == (5, 7)


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        ("none", 64 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        ("batchnorm", 64 * 20 + 2 * 20 + 20 * 30 + 2 * 30 + 30 * 10 + 10),  # no bias before batch normalization
        ("layernorm", 64 * 20 + 20 + 2 * 20 + 20 * 30 + 30 + 2 * 30 + 30 * 10 + 10),
    ],
)
def test_parameter_count(norm: Any, count: int) -> None:
    model = MLP((1, 8, 8), 10, hidden_sizes=[20, 30], norm=norm)
    assert sum(p.numel() for p in model.parameters()) == count


def test_order_of_a_hidden_layer() -> None:
    model = MLP((4,), 2, hidden_sizes=[3], activation="silu", norm="batchnorm", dropout=0.25)
    assert [type(layer) for layer in model.hidden] == [nn.Linear, nn.BatchNorm1d, nn.SiLU, nn.Dropout]
    assert model.hidden[-1].p == 0.25


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: Any) -> None:
    model, x = MLP((4,), 2, hidden_sizes=[3], activation=activation), torch.randn(5, 4)
    function = torch.tanh if activation == "tanh" else getattr(F, activation)
    torch.testing.assert_close(model(x), model.head(function(model.hidden[0](x))))


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    model, x = MLP((4,), 2, dropout=0.5), torch.randn(5, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_bytes_and_floats_agree() -> None:
    model, x = MLP((1, 8, 8), 10), torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(x), model(x / 255))


@pytest.mark.parametrize("norm", NORMS)
def test_bfloat16(norm: Any) -> None:
    model = MLP((1, 8, 8), 10, norm=norm).bfloat16()
    assert model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).dtype == torch.bfloat16


@pytest.mark.parametrize("norm", NORMS)
def test_export_with_any_batch_size(norm: Any) -> None:
    model, x = MLP((1, 8, 8), 10, norm=norm, dropout=0.1).eval(), torch.ones(3, 1, 8, 8, dtype=torch.uint8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))


@pytest.mark.parametrize("norm", NORMS)
def test_it_learns_a_small_batch_and_every_parameter_has_a_gradient(norm: Any) -> None:
    torch.manual_seed(0)
    assert_learns(MLP((1, 8, 8), 3, norm=norm), lr=0.005, steps=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_sizes": []}, r"model\.hidden_sizes=\[\] has no hidden layer; try model=linear"),
        ({"hidden_sizes": [8, 0]}, r"model\.hidden_sizes=\[8, 0\] must be positive; try \[256, 128\]"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 is not in \[0, 1\); try 0\.1"),
        ({"dropout": -0.1}, r"model\.dropout=-0\.1 is not in \[0, 1\); try 0\.1"),
        ({"dropout": float("nan")}, r"model\.dropout=nan is not in \[0, 1\); try 0\.1"),
        ({"activation": "rely"}, r"model\.activation=rely is unknown; try one of relu, gelu, silu, tanh"),
        ({"norm": "group"}, r"model\.norm=group is unknown; try one of none, batchnorm, layernorm"),
        ({"num_classes": 0}, r"model\.num_classes=0 must be positive; .*"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        MLP(**{"input_shape": (4,), "num_classes": 2} | arguments)
