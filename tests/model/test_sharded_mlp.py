import pytest
import torch
from conftest import Script
from torch import Tensor

from boltcutter.model.mlp import MLP


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_in_sequence_equal_the_model(count: int) -> None:
    model = MLP((1, 2, 3), 4, hidden_sizes=[5, 6])
    x = torch.randint(4, (7, 1, 2, 3), dtype=torch.uint8)
    y: Tensor = x
    for stage in model.stages(count):
        assert any(True for _ in stage.parameters())
        y = stage(y)
    assert torch.equal(y, model(x))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.devices=3 exceeds the 2 layers .* try trainer.devices=2"):
        MLP((6,), 3, hidden_sizes=[5]).stages(3)


@pytest.mark.parametrize("sizes", [[4], [4, 6]])  # an even and an odd number of layers
def test_a_sharded_model_has_the_same_outputs(two_ranks: Script, sizes: list[int]) -> None:
    code = f"""
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from boltcutter.model.mlp import MLP
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
torch.manual_seed(0)
model, x = MLP((6,), 4, hidden_sizes={sizes}), torch.randn(3, 6)
expected = model(x)
model.shard(mesh)
torch.testing.assert_close(model(x), expected)
assert model.hidden[0].weight.to_local().shape == (2, 6)
print("same")
"""
    assert two_ranks(code).stdout.count("same") == 2
