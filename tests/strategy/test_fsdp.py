import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Script
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.fsdp import FSDPStrategy


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.fixture
def strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FSDPStrategy:
    monkeypatch.chdir(tmp_path)
    strategy = FSDPStrategy(checkpoint_io=AtomicCheckpointIO())
    strategy.model, strategy._lightning_module = nn.Linear(1, 1), mock.Mock()
    monkeypatch.setattr(strategy, "broadcast", lambda value, src=0: value)  # a single process
    return strategy


@pytest.mark.parametrize(
    "content", [{"state_dict": {}, "x": Malicious()}, {"state_dict": Malicious()}], ids=["extra key", "weights"]
)
def test_a_checkpoint_is_not_executed(strategy: FSDPStrategy, content: Any) -> None:
    torch.save(content, "last.ckpt")
    with pytest.raises(CheckpointError, match="would execute code"):
        strategy.load_checkpoint("last.ckpt")
    assert not Path("executed").exists()


def test_a_folder_is_refused(strategy: FSDPStrategy) -> None:
    Path("last.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"^trainer\.strategy\.state_dict_type=sharded: last\.ckpt is a folder"):
        strategy.load_checkpoint("last.ckpt")


SHARDED = """
import copy
from types import SimpleNamespace
import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from boltcutter.callback.guard import Guard, NonFiniteGradientError
from boltcutter.strategy.fsdp import FSDPStrategy
sys.path.insert(0, "tests")
from conftest import Synchronizations

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
model = FullyShardedDataParallel(copy.deepcopy(plain), device_id=torch.device("cpu"), use_orig_params=True)
strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")] * 2)
strategy.model = model
optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for module in (plain, model)]
for module in (plain, model):
    module(torch.ones(2, 4)).square().sum().backward()
norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
shards = [p for p in model.parameters() if p.grad is not None]
with Synchronizations() as waits:
    over_ranks = strategy.global_grad_norm(shards, torch.stack(torch._foreach_norm([p.grad for p in shards])))
assert not waits.counted
torch.testing.assert_close(over_ranks, norm)
strategy._clip(optimizers[1], 0.1)
for optimizer in optimizers:
    optimizer.step()
with FullyShardedDataParallel.summon_full_params(model):
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))

task = L.LightningModule()
task.model = model
trainer = SimpleNamespace(strategy=strategy, precision_plugin=None, current_epoch=0, global_step=1, global_rank=rank)
if rank == 1:  # the other rank has only finite shards
    shards[-1].grad.fill_(float("nan"))
try:
    guard = Guard(sys.argv[1], save_batch=False)
    guard.setup(trainer, task, "fit")
    guard.check_gradients(trainer, task, optimizers[1])
except NonFiniteGradientError as error:
    print(rank, error, flush=True)
torch.distributed.barrier()
"""


BLOCKS = """
import copy
from unittest import mock
import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from boltcutter.model.gpt import GPT
from boltcutter.strategy.fsdp import FSDPStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT((8,), 16, num_layers=3, num_heads=2, hidden_size=8)

    def forward(self, x):
        return self.model(x)

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1)

torch.distributed.init_process_group("gloo")
plain, module = Module(), Module()
expected = [len(group["params"]) for group in plain.model.parameter_groups()]
strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")] * 2)
strategy.cluster_environment = mock.Mock(local_rank=lambda: torch.distributed.get_rank())
strategy._lightning_module = strategy.model = module
trainer = module._trainer = mock.MagicMock(strategy=strategy, lightning_module=module)
trainer.state.fn = TrainerFn.FITTING
with mock.patch.object(FSDPStrategy, "root_device", mock.Mock(index=torch.device("cpu"))):
    wrapped = strategy._setup_model(module)
strategy.setup_optimizers(trainer)
(sharded,) = strategy.optimizers
assert sum(isinstance(part, FullyShardedDataParallel) for part in wrapped.modules()) == 4  # three blocks and the root
assert [len(group["params"]) for group in module.model.parameter_groups()] == expected
optimizer = plain.configure_optimizers()
assert [len(group["params"]) for group in sharded.param_groups] == [len(g["params"]) for g in optimizer.param_groups]
for _ in range(2):
    for owner, one in ((plain, optimizer), (wrapped, sharded)):
        owner(torch.arange(16).reshape(2, 8)).square().mean().backward()
        one.step()
        one.zero_grad()
with FullyShardedDataParallel.summon_full_params(wrapped):
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))
print("same")
"""


def test_blocks_are_units_and_groups_are_those_of_the_original_shapes(two_ranks: Script) -> None:
    assert two_ranks(BLOCKS).stdout.count("same") == 2


def test_gradient_norms_are_global(two_ranks: Script, tmp_path: Path) -> None:
    done = two_ranks(f"import sys\n{SHARDED}", str(tmp_path))
    assert done.stdout.count("the gradient of model.2.") == 2, done.stdout  # on both ranks


def test_lightning_clips_by_the_global_norm(strategy: FSDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPStrategy.__mro__[1], "setup", lambda self, trainer: None)  # it needs a GPU
    strategy.precision_plugin = FSDPPrecision("32-true")
    strategy.setup(mock.Mock())
    strategy.model = mock.Mock(spec=FullyShardedDataParallel)
    strategy.precision_plugin.clip_gradients(mock.Mock(), 0.5, GradClipAlgorithmType.NORM)
    strategy.model.clip_grad_norm_.assert_called_once_with(0.5)
    strategy.model = nn.Linear(1, 1)
    with pytest.raises(StrategyError, match=r"^trainer\.gradient_clip_val=0\.5.*trainer\.gradient_clip_val=null"):
        strategy.precision_plugin.clip_gradients(mock.Mock(), 0.5, GradClipAlgorithmType.NORM)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy=fsdp, trainer\.accelerator=cpu: .*trainer=fsdp2"):
        FSDPStrategy().accelerator = CPUAccelerator()
