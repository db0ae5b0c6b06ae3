import pytest
import torch
from torch import Tensor, nn

from boltcutter.assembly.pixels import accept_pixels
from boltcutter.model.mlp import MLP

PIXELS = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A network such as torchvision's ResNet: convolutions of floats, with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        outputs: Tensor = self.head((x + self.block(x)).mean(dim=(2, 3)))
        return outputs


class Scales(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 127 - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_floats_gets_pixels_as_floats(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    model = Residual().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    accept_pixels(model, (3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert before.keys() == model.state_dict().keys()
    model.eval()
    for _ in range(2):
        assert torch.equal(model(PIXELS), model(PIXELS.to(dtype) / 255))
    assert capsys.readouterr().out.count("Residual takes no uint8") == 1


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Scales(), (3, 8, 8)),
        (nn.Embedding(256, 2), (5,)),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), (9,)),
        (nn.Linear(5, 2), (4,)),
        (MLP((3, 8, 8), 2), (3, 8, 8)),
    ],
)
def test_other_models_are_not_changed(model: nn.Module, shape: tuple[int, ...]) -> None:
    uninitialized = any(isinstance(each, nn.UninitializedParameter) for each in model.parameters())
    accept_pixels(model, shape)
    is_lazy = any(isinstance(each, nn.UninitializedParameter) for each in model.parameters())
    assert is_lazy == uninitialized
    assert is_lazy or not model._forward_pre_hooks


def test_the_conversion_is_part_of_a_captured_graph() -> None:
    model = Residual().eval()
    accept_pixels(model, (3, 8, 8))
    exported = torch.export.export(model, (PIXELS,)).module()
    torch.testing.assert_close(exported(PIXELS), model(PIXELS))
