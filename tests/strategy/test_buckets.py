from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import run_forked
from forkserver import ForkServer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from boltcutter.model.mlp import MLP
from boltcutter.strategy.buckets import FixedBucketsDDP, unsynchronized_buffers

INPUT = torch.rand(4, 1, 8, 8)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((1, 8, 8), 10, hidden_sizes=[512] * 6),
    "encoder": lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoder(_layer(), 3, enable_nested_tensor=False)),
}


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 2048, batch_first=True)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def buckets(wrapped: DistributedDataParallel, steps: int) -> list[list[list[str]]]:
    """Names of the parameters in each bucket, in the order in which they are sent, of each step."""
    names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
    sent: list[list[str]] = []

    def record(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append([names[parameter] for parameter in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, record)
    found = []
    for _ in range(steps):
        sent.clear()
        wrapped(INPUT).sum().backward()
        found.append([*sent])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_buckets_of_the_first_step_are_those_that_torch_finds_in_it(group: None, name: str) -> None:
    _, sorted_by_torch = buckets(DistributedDataParallel(MODELS[name](), bucket_cap_mb=1), 2)
    assert len(sorted_by_torch) >= 3
    first, second = buckets(FixedBucketsDDP(MODELS[name](), overlaps=True, bucket_cap_mb=1), 2)
    assert first == second
    large = [[{name for name in bucket if "norm" not in name} for bucket in step] for step in (first, sorted_by_torch)]
    assert large[0] == large[1]


def test_without_overlap_the_first_bucket_is_complete_last(group: None) -> None:
    model = MODELS["mlp"]()
    first, second = buckets(FixedBucketsDDP(model, overlaps=False, bucket_cap_mb=1), 2)
    assert first == second
    assert [name for bucket in first for name in bucket] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_other_modes_train(group: None, options: dict[str, bool]) -> None:
    wrapped = FixedBucketsDDP(MODELS["mlp"](), overlaps=True, **options)
    for _ in range(2):
        wrapped(INPUT).sum().backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())


RESUMED = """
import torch, torch.distributed as dist
from torch import nn
from boltcutter.environment.process import distributed_shutdown
from boltcutter.strategy.buckets import FixedBucketsDDP, unsynchronized_buffers

def train(steps, state=None):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(20)])
    model.load_state_dict(state or model.state_dict())
    wrapped = FixedBucketsDDP(model, overlaps=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        wrapped(torch.randn(16, 128, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}

with distributed_shutdown():
    dist.init_process_group("gloo")
    whole, resumed = train(range(4)), train(range(2, 4), train(range(2)))
    if dist.get_rank() == 0:
        print(sum(not torch.equal(whole[name], resumed[name]) for name in whole))
"""


def test_a_resumed_run_of_three_ranks_rounds_as_an_uninterrupted_one(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "resumed.py").write_text(RESUMED)
    done = run_forked(forks, [str(tmp_path / "resumed.py")], ranks=3)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # of torch 2.10
    assert (done.returncode, lines) == (0, ["0"]), done.stderr


def test_constant_buffers_and_batch_norm_statistics_are_not_broadcast() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(3))
            self.register_buffer("constant", torch.ones(1), persistent=False)
            self.norm = nn.BatchNorm1d(3)

    statistics = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(unsynchronized_buffers(Codebook())) == {"constant", *statistics}
    assert unsynchronized_buffers(nn.Linear(3, 3)) == []
