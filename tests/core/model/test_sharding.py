from conftest import Script


def test_replicated_modules_have_the_same_gradients(two_ranks: Script) -> None:
    code = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from boltcutter.model.sharding import fully_shard_modules
from boltcutter_language.sharding import replicate
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
norms = [nn.LayerNorm(4), nn.LayerNorm(4)]
for norm in norms:
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
replicate(norms[0], mesh["tensor"])
fully_shard_modules(mesh["data"], [norms[0]])
x = torch.randn(3, 4)
for norm in norms:
    norm(x).square().sum().backward()
torch.testing.assert_close(norms[0].weight.grad.full_tensor(), norms[1].weight.grad)
print("same")
"""
    assert two_ranks(code).stdout.count("same") == 2
