import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, Script, max_difference, run_command
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from boltcutter.strategy import ddp

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors.
OVERRIDES = [*QUICK, "model=mlp", "test=false", "optimizer=sgd"]
NON_FINITE = ["optimizer.lr=1e38", "trainer.gradient_clip_val=null"]


@pytest.mark.slow
def test_a_static_graph_trains_as_one_process(script: Script, reference: Path, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, *TWO, "+trainer.strategy.static_graph=true", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 0, done.stderr
    assert max_difference(reference, tmp_path) < 1e-6


def test_gradient_accumulation_gives_the_weights_of_one_process(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "trainer.accumulate_grad_batches=3"]
    for name, more in (("one", []), ("two", TWO)):
        done = script("train", *overrides, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


@pytest.mark.slow
def test_compressed_gradients_differ_by_their_rounding(script: Script, reference: Path, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, *TWO, "trainer.strategy.compress=bf16", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 0, done.stderr
    assert 1e-5 < max_difference(reference, tmp_path) < 1e-2


@pytest.mark.slow  # it waits half a minute for the other rank
def test_incomplete_rank_variables_are_refused(script: Script, tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    done = script("train", *OVERRIDES, *TWO, f"folder={tmp_path}/run", env=env)
    assert done.returncode == 2
    assert "error: RANK=0, WORLD_SIZE=2 are set, but LOCAL_RANK is not" in done.stderr


OPTIONAL = """
import sys
from boltcutter.strategy.ddp import DDPStrategy
DDPStrategy(process_group_backend="gloo")
engines = ("horovod", "mpi4py", "torchao", "torch_xla", "torchax", "torch.distributed.pipelining")
ours = [f"boltcutter.strategy.{name}" for name in ("mpi", "horovod", "pipeline", "float8", "tpu", "fsdp")]
print([name for name in (*engines, *ours) if name in sys.modules])
"""


@pytest.mark.slow
def test_optional_engines_are_imported_only_if_they_are_chosen() -> None:
    done = run_command([sys.executable, "-c", OPTIONAL])
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(("device", "is_used"), [("cpu", True), ("cuda", False)])
def test_shared_memory_averages_gradients_of_cpus_only(
    device: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    environment = LightningEnvironment()
    environment.set_world_size(2)
    strategy = ddp.DDPStrategy(parallel_devices=[torch.device(device, 0)] * 2, cluster_environment=environment)
    model = nn.Linear(2, 2)
    model.register_comm_hook = lambda state, hook: registered.append(state)  # type: ignore[assignment]
    strategy._model = model
    memory = SimpleNamespace(supports=lambda model: True)
    monkeypatch.setattr(ddp.strategies.DDPStrategy, "_register_ddp_hooks", lambda strategy: None)
    monkeypatch.setattr(ddp.dist, "get_backend", lambda: "gloo" if device == "cpu" else "nccl")
    monkeypatch.setattr(ddp.SharedMemory, "create", lambda *args: memory)
    strategy._register_ddp_hooks()
    assert strategy._memory is memory  # signals are agreed on through it on any device
    assert registered == [memory] * is_used


@pytest.mark.slow
def test_a_resumed_run_of_four_ranks_without_shared_memory_is_bitwise_identical(script: Script, tmp_path: Path) -> None:
    """Gloo adds the gradients of more than two ranks in an order that depends on their place in the bucket."""
    overrides = [*OVERRIDES, "scheduler=null", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=4"]
    overrides.append("trainer.strategy.shared_memory=false")
    for arguments in (
        [*overrides, f"folder={tmp_path}/whole"],
        [*overrides, f"folder={tmp_path}/resumed", "trainer.max_steps=10"],
        [f"resume={tmp_path}/resumed", "trainer.max_steps=-1"],
    ):
        done = script("train", *arguments, ranks=4)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "whole", tmp_path / "resumed") == 0
