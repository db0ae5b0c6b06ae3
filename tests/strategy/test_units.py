import re

import pytest
from conftest import Script
from torch import nn

from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.resnet import ResNet
from boltcutter.strategy.units import find_units

MODULES = """
import torch
from torch import nn
from torch.nn import functional as F

class TiedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return F.linear(self.lstm(self.embedding(x))[0], self.embedding.weight)

class TiedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.scale

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.decoder.weight.requires_grad_(False)

    def forward(self, x):
        return self.decoder(self.encoder(x).relu())
"""


def classes(module: nn.Module) -> list[str]:
    return [type(unit).__name__ for unit in find_units(module)]


def test_units_are_the_repeated_blocks_or_else_the_largest_children() -> None:
    gpt = GPT((8,), 16, num_layers=3, num_heads=2, hidden_size=8)
    assert find_units(gpt) == [*gpt.blocks]
    assert find_units(nn.ModuleDict({"wrapped": gpt})) == [*gpt.blocks]
    assert set(classes(ResNet((3, 8, 8), 4))) == {"Block"}
    assert classes(ConvNet((3, 8, 8), 4)) == ["SameConv2d", "BatchNorm2d"] * 3
    space: dict[str, type[nn.Module]] = {}
    exec(MODULES, space)
    assert classes(space["TiedLSTM"]()) == ["LSTM"]
    assert classes(space["Autoencoder"]()) == ["Linear", "Linear"]
    tied = space["TiedBlocks"]()
    assert find_units(tied) == [tied.blocks[1], tied.blocks[2]]  # type: ignore[index]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=2)
    assert classes(encoder) == ["TransformerEncoderLayer"] * 2
    assert classes(nn.Linear(2, 2)) == []


STEP = """
import copy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.linear import Linear
from boltcutter.model.mlp import MLP
from boltcutter.model.resnet import ResNet
from boltcutter.strategy.units import fully_shard_units

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
images, tokens, rows = torch.rand(4, 3, 8, 8), torch.arange(32).reshape(4, 8) % 16, torch.rand(4, 8)
CASES = [
    (ConvNet((3, 8, 8), 4, dropout=0).to(memory_format=torch.channels_last), images),
    (ResNet((3, 8, 8), 4), images),
    (Linear((3, 8, 8), 4), images),
    (MLP((8,), 4, norm="batchnorm"), rows),
    (GPT((8,), 16, num_layers=2, num_heads=2, hidden_size=8), tokens),
    (TiedLSTM(), tokens),
    (TiedBlocks(), rows),
    (Autoencoder(), rows),
    (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), num_layers=2), images[:, 0]),
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 3), nn.Flatten()), images),
]


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if "c10d" in name and ("gather" in name or "reduce_scatter" in name):
            largest = max((x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)), key=len)
            key = "gather" if "gather" in name else "reduce", largest.dtype
            self.bytes[key] = self.bytes.get(key, 0) + largest.nbytes
        return func(*args, **(kwargs or {}))
"""

EQUAL = """
for model, inputs in CASES:
    torch.manual_seed(0)
    plain, halves = copy.deepcopy(model), inputs.chunk(2)
    fully_shard_units(model, mesh)
    for _ in range(2):
        states = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        for other in (1 - rank, rank):  # statistics of batch norms are those of this rank
            plain.load_state_dict(states, strict=False)
            (plain(halves[other]).float().square().mean() / 2).backward()
        model(halves[rank]).float().square().mean().backward()
        for module in (plain, model):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.1 * parameter.grad
                    parameter.grad = None
    assert {type(p) for p in model.parameters()} == {DTensor}
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-5)
    print("same")
"""

MIXED = """
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
for model, inputs in CASES:
    fully_shard_units(model, mesh, mp_policy=policy)
    with Collectives() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs.chunk(2)[rank])
        outputs.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert ("reduce", torch.bfloat16) not in seen.bytes
    full = seen.bytes.get(("gather", torch.float32), 0)  # the batch norms
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    norms = sum(p.nbytes for norm in norms for p in norm.parameters())
    assert full <= 2.1 * norms + 64 * (norms > 0), (type(model), full, norms)
    assert seen.bytes["gather", torch.bfloat16] and seen.bytes["reduce", torch.float32]
    print("same")
"""


@pytest.mark.parametrize("code", [EQUAL, MIXED], ids=["float32", "bf16-mixed"])
@pytest.mark.slow
def test_models_train_as_on_one_device_in_full_and_mixed_precision(two_ranks: Script, code: str) -> None:
    assert two_ranks(MODULES + STEP + code).stdout.count("same") == 20


SCALAR = """
import sys

model = nn.Sequential(nn.Linear(8, 8))
model.scale = nn.Parameter(torch.ones(()))
try:
    fully_shard_units(model, mesh)
except ValueError as error:
    sys.stdout.write(f"refused: {error}\\n")
"""


def test_a_parameter_without_dimensions_is_refused_by_its_name(two_ranks: Script) -> None:
    found = two_ranks(MODULES + STEP + SCALAR).stdout
    assert len(re.findall(r"refused: .*\bscale to a 1D tensor", found)) == 2, found


def test_replicated_modules_have_the_same_gradients(two_ranks: Script) -> None:
    code = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from boltcutter.strategy.units import fully_shard_units
from boltcutter.model.transformer import replicate
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
norms = [nn.LayerNorm(4), nn.LayerNorm(4)]
for norm in norms:
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
replicate(norms[0], mesh["tensor"])
fully_shard_units(norms[0], mesh["data"])
x = torch.randn(3, 4)
for norm in norms:
    norm(x).square().sum().backward()
torch.testing.assert_close(norms[0].weight.grad.full_tensor(), norms[1].weight.grad)
print("same")
"""
    assert two_ranks(code).stdout.count("same") == 2
