import pytest
from conftest import Script

from boltcutter.model.sharding import section_permutation


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_even_chunks_have_a_part_of_each_section(ranks: int) -> None:
    order = section_permutation([8, 4, 4], ranks)
    assert sorted(order.tolist()) == list(range(16))
    for rank, chunk in enumerate(order.chunk(ranks)):
        for first, rows in ((0, 8), (8, 4), (12, 4)):
            rows_of_rank = [row for row in chunk.tolist() if first <= row < first + rows]
            assert rows_of_rank == list(range(first + rank * rows // ranks, first + (rank + 1) * rows // ranks))


def test_replicated_modules_have_the_same_gradients(two_ranks: Script) -> None:
    code = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from boltcutter.model.sharding import replicate, fully_shard_modules
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
