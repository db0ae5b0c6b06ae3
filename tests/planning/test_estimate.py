import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from boltcutter.assembly.assemble import complete_config
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.planning.estimate import EstimationError, estimate_step, read_batch
from boltcutter.project import Project

Script = Callable[..., subprocess.CompletedProcess[str]]

GPT = ["model=gpt", "data=text", "task=language", "model.num_layers=2", "data.batch_size=8"]
DIGITS = (torch.empty(1, 1, 8, 8, dtype=torch.uint8), torch.empty(1, dtype=torch.int64))
TOKENS = (torch.empty(1, 256, dtype=torch.int64),) * 2
WORKS = {
    "mlp": ["model=mlp", "model.hidden_sizes=[512,512]"],
    "convnet": ["model=convnet"],
    "mlp, bf16-mixed": ["model=mlp", "model.hidden_sizes=[512,512]", "trainer.precision=bf16-mixed"],
    "gpt": GPT,
    "gpt, bf16-mixed": [*GPT, "trainer.precision=bf16-mixed"],
    "gpt, bf16-true": [*GPT, "trainer.precision=bf16-true", "optimizer.fused=false"],
}
SLOW = ("mlp, bf16-mixed", "gpt", "gpt, bf16-mixed", "gpt, bf16-true")

PROJECT = Project.find(__file__)


def config(*overrides: str) -> Settings:
    return complete_config(compose(PROJECT, [*overrides, "logger=null"]))


def sample(overrides: list[str]) -> tuple[Tensor, ...]:
    return TOKENS if "model=gpt" in overrides else DIGITS


def measured_peak(overrides: list[str], batch: tuple[Tensor, ...]) -> int:
    """Return the peak allocation in bytes of two real steps, including the state between them."""
    cfg = config(*overrides)
    trainer = L.Trainer(accelerator="cpu", devices=1, barebones=True)
    precision = str(cfg.trainer["precision"])
    cast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task = build(cfg.task, "task")
        task.scheduler, task.trainer = None, trainer
        if precision == "bf16-true":
            task.to(torch.bfloat16)
        held = tuple(part.clone() for part in batch)
        optimizer = task.configure_optimizers()
        for _ in range(2):
            with cast:
                loss = task.training_step(held, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    alive = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10, without cycles too
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WORKS]
)
def test_the_estimate_equals_two_real_steps(name: str) -> None:
    overrides = WORKS[name]
    spec = sample(overrides)
    size = 128 if spec is DIGITS else 8
    batch = tuple(torch.zeros((size, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in spec)
    found = estimate_step(config(*overrides), spec, size)
    assert found.peak == pytest.approx(measured_peak(overrides, batch), rel=0.08)


def test_components_of_the_estimate() -> None:
    found = estimate_step(config("model=mlp"), DIGITS, 64)
    weights = 4 * (64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10)
    assert found.weights == pytest.approx(weights, rel=0.01)  # buffers, too
    assert found.gradients == weights
    assert found.optimizer == pytest.approx(2 * weights, rel=0.001)  # and a step for each
    model = build(config("model=mlp").model, "model")
    persistent = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in persistent:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        nn.functional.cross_entropy(model(inputs), torch.zeros(64, dtype=torch.int64))
    assert found.activations == pytest.approx(sum(saved.values()), rel=0.1)


def test_models_without_a_method_shard_are_sharded_by_blocks() -> None:
    one = estimate_step(config("model=convnet"), DIGITS, 4)
    many = estimate_step(config("model=convnet"), DIGITS, 4, data_ranks=4, tensor_ranks=1)
    assert many.optimizer == pytest.approx(one.optimizer / 4, rel=0.05)
    assert many.weights < 0.4 * one.weights


def test_activations_of_a_pipeline_are_without_weights() -> None:
    found = estimate_step(config("model=mlp", "model.hidden_sizes=[512,512]"), DIGITS, 8, stages=2)
    assert 0 < found.activations < 0.1 * found.weights  # of eight samples; views of weights were counted
    assert found.weights + found.gradients + found.optimizer < found.peak


def test_estimation_errors_give_the_reason() -> None:
    with pytest.raises(EstimationError, match=r"ConvNet cannot be sharded by tensors; add a method shard\(mesh\)"):
        estimate_step(config("model=convnet"), DIGITS, 4, data_ranks=1, tensor_ranks=2)
    with pytest.raises(EstimationError, match=r"ConvNet has no pipeline stages; add a method stages\(count\)"):
        estimate_step(config("model=convnet"), DIGITS, 4, stages=2)
    with pytest.raises(EstimationError, match="must have same reduction dim"):
        estimate_step(config("model=mlp"), (torch.empty(1, 3, dtype=torch.uint8), DIGITS[1]), 4)


def test_a_batch_of_the_data(tmp_path: Path) -> None:
    found = read_batch(build(config().data, "data"))
    assert [tensor.shape for tensor in found] == [(64, 1, 8, 8), (64,)]
    data = SimpleNamespace(prepare_data=int, setup=lambda stage: None, train_dataloader=lambda: [{"x": torch.zeros(2)}])
    assert torch.equal(read_batch(data)["x"], torch.zeros(2))  # type: ignore[arg-type]
    data.train_dataloader = lambda: [(torch.zeros(2), torch.zeros(3))]
    with pytest.raises(
        ConfigError, match="data: memory can be estimated only for batches whose tensors have the samples"
    ):
        read_batch(data)  # type: ignore[arg-type]


REAL = """
import gc
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from boltcutter.config.instantiate import build
from boltcutter.assembly.assemble import complete_config
from boltcutter.config.compose import compose
from boltcutter.project import Project
from boltcutter.strategy.units import fully_shard_units

PROJECT = Project.find(Path.cwd())
dist.init_process_group("gloo")
ranks = tuple(map(int, sys.argv[1].split(",")))
mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("data_parallel", "tensor_parallel"))
cfg = complete_config(compose(PROJECT, [*sys.argv[2:], "logger=null"]))
trainer = L.Trainer(accelerator="cpu", devices=1, barebones=True)

def steps():
    task = build(cfg.task, "task")
    task.scheduler, task.trainer = None, trainer
    task.model.shard(mesh)
    fully_shard_units(task.model, mesh["data_parallel"])
    optimizer = task.configure_optimizers()
    batch = (torch.zeros(8 // ranks[0], 256, dtype=torch.int64),) * 2
    for _ in range(2):
        task.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

steps()  # allocates what is created once
gc.collect()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    steps()
alive = most = 0
for event in profiler.profiler.kineto_results.events():
    if event.name() == "[memory]":
        alive += event.nbytes()
        most = max(most, alive)
if dist.get_rank() == 0:
    print(most)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_the_estimate_of_a_sharded_model_equals_two_real_ranks(ranks: tuple[int, int], two_ranks: Script) -> None:
    most = int(two_ranks(REAL, ",".join(map(str, ranks)), *GPT).stdout)
    found = estimate_step(config(*GPT), TOKENS, 8 // ranks[0], data_ranks=ranks[0], tensor_ranks=ranks[1])
    assert found.peak == pytest.approx(most, rel=0.15)  # gloo keeps the tensors of its last collectives
