import pytest
import torch

from boltcutter.model.rescaling import Rescaling, check_image, check_sizes

PIXELS = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)


def test_bytes_become_floats_from_zero_to_one() -> None:
    rescaled = Rescaling()(PIXELS)
    assert rescaled.dtype == torch.float32
    torch.testing.assert_close(rescaled, PIXELS.float() / 255)
    assert (rescaled.min(), rescaled.max()) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bytes_become_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    rescaled = Rescaling().to(dtype)(PIXELS)
    assert rescaled.dtype == dtype
    assert torch.equal(rescaled, PIXELS.to(dtype) / 255)
    assert rescaled.max() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_floats_are_unchanged(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, dtype=dtype) * 300
    assert Rescaling()(x) is x


def test_state_dict_is_empty() -> None:
    assert not Rescaling().state_dict()


def test_wide_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.dtype=torch\.int64 has no known range; ") as caught:
        Rescaling()(torch.ones(2, 3, dtype=torch.int64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("input_shape", [(), (0,), (1, -2, 3)])
def test_sizes_are_positive(input_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^model\.input_shape=\(.*\) must be positive sizes; try .*$"):
        check_sizes(input_shape, 10)


def test_num_classes_must_be_positive() -> None:
    check_sizes((1,), 1)
    with pytest.raises(ValueError, match=r"^model\.num_classes=0 must be positive; .*$"):
        check_sizes((1,), 0)


def test_an_image_has_three_dimensions() -> None:
    check_image("ConvNet", (1, 8, 8))
    with pytest.raises(
        ValueError, match=r"^model\.input_shape=\(10,\): ConvNet needs \(channels, height, width\); try model=mlp$"
    ):
        check_image("ConvNet", (10,))
