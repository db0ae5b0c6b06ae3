import sys

import pytest
import torch
from conftest import assert_learns, require

if sys.version_info < (3, 11):
    pytest.skip("Keras needs Python 3.11", allow_module_level=True)
require(install="pip install -c constraints.txt -e '.[keras]'", package="keras")

from boltcutter.model.convnet import ConvNet  # noqa: E402
from boltcutter.model.keras_convnet import KerasConvNet  # noqa: E402


@pytest.mark.parametrize("input_shape", [(1, 8, 8), (3, 28, 20)])
def test_output_shape_and_parameter_count_match_the_torch_convnet(input_shape: tuple[int, int, int]) -> None:
    model, other = KerasConvNet(input_shape, 7), ConvNet(input_shape, 7)
    assert model(torch.rand(5, *input_shape)).shape == (5, 7)
    ours, theirs = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, other))
    assert ours == theirs


def test_outputs_match_the_torch_convnet() -> None:
    model, other, x = KerasConvNet((1, 8, 8), 3).eval(), ConvNet((1, 8, 8), 3).eval(), torch.rand(4, 1, 8, 8)
    convolutions = [name for name, p in model.named_parameters() if p.ndim == 4]
    with torch.no_grad():
        for name, place in zip(convolutions, (0, 3, 6), strict=True):
            other.features[place].weight.copy_(model.get_parameter(name).permute(3, 2, 0, 1))
        for name, layer in (("dense", other.dense), ("dense_1", other.head)):
            layer.weight.copy_(model.get_parameter(f"{name}/kernel").T)
            layer.bias.copy_(model.get_parameter(f"{name}/bias"))
    torch.testing.assert_close(model(x), other(x))


def test_bytes_and_floats_agree() -> None:
    model, x = KerasConvNet((3, 8, 8), 10).eval(), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(x), model(x / 255))


def test_it_learns_a_small_batch_and_every_parameter_has_a_gradient() -> None:
    torch.manual_seed(0)
    assert_learns(KerasConvNet((1, 8, 8), 3), lr=0.005, steps=40)


def test_autocast_to_bfloat16() -> None:
    model, x = KerasConvNet((1, 8, 8), 10).eval(), torch.rand(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
    outputs.float().sum().backward()
    assert not torch.equal(outputs, model(x))
    torch.testing.assert_close(outputs, model(x), rtol=0.05, atol=0.02, check_dtype=False)
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (10,)}, r"model\.input_shape=\(10,\): KerasConvNet needs .*; try model=mlp"),
        ({"num_classes": 0}, r"model\.num_classes=0 must be positive.*"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 is not in \[0, 1\); try 0\.5"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        KerasConvNet(**{"input_shape": (1, 8, 8), "num_classes": 2} | arguments)  # type: ignore[arg-type]
