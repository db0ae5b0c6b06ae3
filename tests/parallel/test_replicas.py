from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boltcutter.model.mlp import MLP
from boltcutter_language.gpt import GPT
from boltcutter_parallel.replicas import Replicas, chunk_sizes, gather

CPU = torch.device("cpu")


def replicas(module: nn.Module, devices: int) -> Replicas:
    return Replicas(module, [CPU] * devices)


class Recorder(nn.Module):
    """Records the batch size of each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.batch_sizes: list[int] = []  # shared by all replicas

    def forward(self, x: Tensor) -> Tensor:
        self.batch_sizes.append(len(x))
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_replicas_have_the_outputs_and_gradients_of_one_device(devices: int, count: int) -> None:
    model = MLP((6,), 3, hidden_sizes=[8])
    inputs, weight = torch.randn(count, 6), torch.randn(count, 3)
    found = []
    for call in (model, replicas(model, devices)):
        outputs = call(inputs)
        (outputs * weight).sum().backward()
        found.append([outputs, *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*found)


def test_each_replica_runs_on_its_chunk() -> None:
    model = Recorder()
    replicas(model, 3)(torch.randn(8, 4))
    assert sorted(model.batch_sizes) == [2, 3, 3]


def test_no_chunk_has_a_single_sample_unless_the_batch_has() -> None:
    for count, devices in product(range(1, 40), range(1, 9)):
        sizes = chunk_sizes(count, devices)
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 1 or count == 1


def test_batch_norm_trains_on_a_batch_that_does_not_divide_evenly() -> None:
    model = MLP((6,), 3, hidden_sizes=[8], norm="batchnorm")
    norm = model.hidden[1]
    replicas(model, 2)(torch.randn(3, 6))
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked == 1  # the statistics of the first replica


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_run_under_autocast(dtype: torch.dtype) -> None:
    call = replicas(Recorder(), 2)
    with torch.autocast("cpu", dtype):
        assert call(torch.randn(4, 4)).dtype == dtype
    assert call(torch.randn(4, 4)).dtype == torch.float32


def test_replicas_record_no_graph_without_gradients() -> None:
    call = replicas(Recorder(), 2)
    with torch.no_grad():
        assert not call(torch.randn(4, 4)).requires_grad
    with torch.inference_mode():
        assert call(torch.randn(4, 4)).is_inference()
    assert call(torch.randn(4, 4)).requires_grad


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model, tokens = GPT((8,), 11, num_layers=1, hidden_size=16, num_heads=2), torch.randint(11, (5, 8))
    found = []
    for call in (model, replicas(model, 2)):
        call(tokens).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*found)


def test_dropout_is_reproducible() -> None:
    call, inputs = replicas(MLP((6,), 3, hidden_sizes=[64], dropout=0.5), 4), torch.randn(64, 6)
    drawn = []
    for _ in range(5):
        torch.manual_seed(1)
        drawn.append(call(inputs))
    assert all(torch.equal(drawn[0], again) for again in drawn)


def test_an_exception_in_a_replica_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        replicas(Recorder(), 2)(torch.randn(4, 5))


def test_nested_outputs_are_gathered() -> None:
    one, two = torch.zeros(2), torch.ones(1)
    parts: list[Any] = [{"a": one, "b": (one, [one], None)}, {"a": two, "b": (two, [two], None)}]
    both = torch.cat([one, two])
    joined = gather(parts, CPU)
    assert torch.equal(joined["a"], both)
    assert torch.equal(joined["b"][0], both)
    assert torch.equal(joined["b"][1][0], both)
    assert joined["b"][2] is None
    with pytest.raises(TypeError, match="trainer=dp: the model returns a str"):
        gather(["a", "b"], CPU)
