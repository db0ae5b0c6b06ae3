from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import QUICK, Script, assert_same, assert_same_history, max_difference, require, saved_weights
from torch import Tensor, nn

from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.strategy.data_parallel import Replicas, chunk_sizes, gather, replicate

DP = ["trainer=dp", "trainer.accelerator=cpu"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors. The last of the batches
# that validate and test 270 samples has 20.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "data.batch_size=50"]


@pytest.fixture(scope="module")
def replicated(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three replicas."""
    folder = tmp_path_factory.mktemp("replicated") / "run"
    done = script("train", *OVERRIDES, *DP, "trainer.devices=3", f"folder={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch recommends trainer=ddp") == 1
    return folder


@pytest.mark.slow
def test_three_replicas_train_and_test_as_one_device(reference: Path, replicated: Path) -> None:
    assert_same(reference, replicated)


def test_logged_values_are_those_of_the_whole_batch(reference: Path, replicated: Path) -> None:
    assert_same_history(reference, replicated)


def test_predictions_have_the_losses_of_one_device(reference: Path, replicated: Path) -> None:
    ours, theirs = (pd.read_csv(run / "evaluation/test/predictions.csv")["loss"] for run in (replicated, reference))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_with_dropout_is_bitwise_identical(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *DP, "trainer.devices=2", "model.dropout=0.3", "test=false", "scheduler=constant"]
    for name, epochs in (("uninterrupted", 2), ("resumed", 1)):
        done = script("train", *overrides, f"folder={tmp_path}/{name}", f"trainer.max_epochs={epochs}")
        assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}/resumed", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "uninterrupted", tmp_path / "resumed") == 0


def test_a_convnet_trains_in_bfloat16(script: Script, tmp_path: Path) -> None:
    done = script(
        "train", *QUICK, *DP, "trainer.devices=2", "trainer.precision=bf16-mixed", "trainer.max_steps=3", "test=false",
        f"folder={tmp_path}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(torch.isfinite(weight).all() for weight in saved_weights(tmp_path / "run").values())


@pytest.mark.slow
def test_a_compiled_model_is_refused(script: Script, tmp_path: Path) -> None:
    require("g++", install="apt-get install g++")
    done = script("train", *OVERRIDES, *DP, "trainer.devices=2", "task.compile=true", f"folder={tmp_path}/run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: task.compile=true: trainer=dp replicates the model at each step" in done.stderr


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


def test_all_weights_of_a_replica_are_on_its_device() -> None:
    layers = nn.ModuleList([nn.LSTM(4, 4), nn.BatchNorm1d(4)])
    replica: Any = replicate(layers, torch.device("meta"), copies_buffers=True)
    outputs, _ = replica[0](torch.empty(3, 2, 4, device="meta"))  # which uses a list of its weights
    assert replica[1](outputs[0]).device.type == "meta"
