import pytest
import torch
from conftest import assert_learns

from boltcutter.model.linear import Linear


@pytest.mark.parametrize("input_shape", [(10,), (1, 8, 8), (3, 32, 32)])
def test_shape_in_and_out(input_shape: tuple[int, ...]) -> None:
    assert Linear(input_shape, 7)(torch.rand(5, *input_shape)).shape == (5, 7)


def test_parameters_are_one_matrix_and_one_bias() -> None:
    state = {name: tuple(value.shape) for name, value in Linear((1, 8, 8), 10).state_dict().items()}
    assert state == {"head.weight": (10, 64), "head.bias": (10,)}


def test_it_is_linear() -> None:
    model, x, y = Linear((4,), 3), torch.randn(2, 4), torch.randn(2, 4)
    bias = model(torch.zeros(2, 4))
    torch.testing.assert_close(model(x + 2 * y) - bias, (model(x) - bias) + 2 * (model(y) - bias))


def test_bytes_and_floats_agree() -> None:
    model, x = Linear((1, 8, 8), 10), torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(x), model(x / 255))


def test_bfloat16() -> None:
    assert Linear((1, 8, 8), 10).bfloat16()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_export_with_any_batch_size(dtype: torch.dtype) -> None:
    model, x = Linear((1, 8, 8), 10).eval(), torch.ones(3, 1, 8, 8, dtype=dtype)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))


def test_it_learns_a_small_batch() -> None:
    torch.manual_seed(0)
    assert_learns(Linear((1, 8, 8), 3), lr=0.05, steps=60)


@pytest.mark.parametrize(("input_shape", "num_classes"), [((), 10), ((0,), 10), ((4,), 0)])
def test_sizes_must_be_positive(input_shape: tuple[int, ...], num_classes: int) -> None:
    with pytest.raises(ValueError, match=r"^model\.(input_shape|num_classes)=.* must be positive"):
        Linear(input_shape, num_classes)
