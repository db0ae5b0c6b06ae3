import math

import pytest
import torch
from conftest import assert_learns
from torch import nn

from boltcutter.model.convnet import ConvNet, SameConv2d

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 5, 9), (1, 1, 1)]


@pytest.mark.parametrize("input_shape", SHAPES)
def test_shape_in_and_out(input_shape: tuple[int, ...]) -> None:
    model, (_, height, width) = ConvNet(input_shape, 7), input_shape
    x = torch.rand(5, *input_shape)
    assert model(x).shape == (5, 7)
    assert model.features(x).shape == (5, 32, math.ceil(height / 4), math.ceil(width / 4))


def test_three_convolutions_without_bias() -> None:
    found = [m for m in ConvNet((1, 28, 28), 10).features if isinstance(m, nn.Conv2d)]
    assert [(m.out_channels, m.kernel_size, m.stride) for m in found] == [
        (12, (3, 3), (1, 1)),
        (24, (6, 6), (2, 2)),
        (32, (6, 6), (2, 2)),
    ]
    assert all(m.bias is None for m in found)


def test_batch_norm_learns_a_shift_and_no_scale() -> None:
    model = ConvNet((1, 8, 8), 10)
    model(torch.rand(4, 1, 8, 8)).sum().backward()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [(m.num_features, m.eps, m.momentum) for m in norms] == [(12, 1e-3, 0.1), (24, 1e-3, 0.1), (32, 1e-3, 0.1)]
    for norm in norms:
        assert norm.weight.grad is None
        assert (norm.weight == 1).all()
        assert norm.bias.grad is not None


@pytest.mark.parametrize(("channels", "first"), [(1, 108), (3, 324)])
def test_parameter_count(channels: int, first: int) -> None:
    convolutions = first + 24 * 12 * 36 + 32 * 24 * 36
    dense = 32 * 256 + 256 + 256 * 10 + 10
    trainable = [p.numel() for p in ConvNet((channels, 28, 28), 10).parameters() if p.requires_grad]
    assert sum(trainable) == convolutions + 12 + 24 + 32 + dense


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (6, 1), (6, 2), (3, 2), (1, 2), (2, 3)])
def test_output_size_is_input_size_over_stride(size: int, kernel: int, stride: int) -> None:
    x = torch.rand(1, 1, size, size + 1)
    expected = (1, 1, math.ceil(size / stride), math.ceil((size + 1) / stride))
    assert SameConv2d(1, 1, kernel, stride=stride)(x).shape == expected


def test_odd_padding_is_on_the_right_and_bottom() -> None:
    convolution = SameConv2d(1, 1, 6, stride=2, bias=False)
    nn.init.ones_(convolution.weight)
    # A size of 5 is padded by 2 and 3 zeros; a size of 6 by 2 and 2.
    across = torch.arange(1.0, 6.0).view(1, 1, 1, 5).expand(1, 1, 6, 5)
    expected = torch.tensor([1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5, 3 + 4 + 5]).float()
    torch.testing.assert_close(convolution(across)[0, 0, 1], 6 * expected)
    torch.testing.assert_close(convolution(across.mT)[0, 0, :, 1], 6 * expected)


def test_same_padding_agrees_with_torch_for_stride_1() -> None:
    ours, theirs = SameConv2d(2, 3, (4, 5)), nn.Conv2d(2, 3, (4, 5), padding="same")
    theirs.load_state_dict(ours.state_dict())
    x = torch.rand(2, 2, 7, 8)
    with pytest.warns(UserWarning, match="even kernel lengths"):
        expected = theirs(x)
    torch.testing.assert_close(ours(x), expected)


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    model, x = ConvNet((1, 8, 8), 10), torch.rand(4, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_bytes_and_floats_agree() -> None:
    model, x = ConvNet((3, 8, 8), 10).eval(), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(x), model(x / 255))


def test_bfloat16() -> None:
    assert ConvNet((1, 8, 8), 10).bfloat16()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).dtype == torch.bfloat16


@pytest.mark.parametrize("input_shape", SHAPES[:3])
def test_export_with_any_batch_size(input_shape: tuple[int, ...]) -> None:
    model, x = ConvNet(input_shape, 10).eval(), torch.ones(3, *input_shape, dtype=torch.uint8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))


def test_it_learns_a_small_batch_and_every_trainable_parameter_has_a_gradient() -> None:
    torch.manual_seed(0)
    assert_learns(ConvNet((1, 8, 8), 3), lr=0.005, steps=40)


def test_input_shape_must_be_an_image() -> None:
    with pytest.raises(
        ValueError, match=r"^model\.input_shape=\(10,\): ConvNet needs \(channels, height, width\); try model=mlp$"
    ):
        ConvNet((10,), 2)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2.0])
def test_dropout_out_of_range(dropout: float) -> None:
    with pytest.raises(ValueError, match=rf"^model\.dropout={dropout} is not in \[0, 1\); try 0\.5$"):
        ConvNet((1, 8, 8), 2, dropout=dropout)


def test_no_classes() -> None:
    with pytest.raises(ValueError, match=r"^model\.num_classes=0 must be positive"):
        ConvNet((1, 8, 8), 0)
