import pytest
import torch
from conftest import Script
from torch import nn

from boltcutter.task.penalty import PenaltyError, penalty

SHARDED = """
import copy
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from boltcutter.task.penalty import PenaltyError, penalty

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
sharded, flat = copy.deepcopy(plain), copy.deepcopy(plain)
mesh = init_device_mesh("cpu", (2,))
for module in (sharded[0], sharded):
    fully_shard(module, mesh=mesh)
x = torch.rand(3, 4)
losses = [module(x).square().mean() + penalty(module, 0.3, 0.7, 2) for module in (plain, sharded)]
torch.testing.assert_close(losses[1], losses[0])
for loss in losses:
    loss.backward()
found = [parameter.grad.full_tensor() for parameter in sharded.parameters()]
torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()])
flat = FullyShardedDataParallel(flat, device_id=torch.device("cpu"), use_orig_params=True)
flat(x)
try:
    penalty(flat, 0.3, 0.7, 2)
except PenaltyError as error:
    sys.stdout.write(f"refused: {error}\\n")  # in one piece, as ranks share the pipe
"""


def test_the_penalty_of_shards_is_that_of_the_full_weights_or_refused(two_ranks: Script) -> None:
    assert two_ranks(SHARDED).stdout.count("refused: task.l1=0.3, task.l2=0.7") == 2


def test_hidden_weights_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    torch.testing.assert_close(penalty(model, 0.0, 0.5, 2), 0.5 * sum(m.weight.square().sum() for m in model))
    with pytest.raises(PenaltyError, match=r"task\.l2=0\.5.*optimizer\.weight_decay"):
        penalty(model, 0.0, 0.5, 3)
