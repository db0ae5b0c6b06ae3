import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.config.errors import ConfigError
from boltcutter.launch.command import check_job
from boltcutter.project import Project
from boltcutter.topology import Topology, check_batch_size, count_devices


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (3, 3),
        ("3", 3),
        ([0, 2], 2),
        ("0,2", 2),
        ("0, 2, 5", 3),
        ([5], 1),
        ("5,", 1),
        ("auto", 0),
        (-1, 0),
        ("-1", 0),
        ([], 0),
        (None, 0),
        (0.5, 0),  # which is refused later
    ],
)
def test_devices_are_counted_as_lightning_does(devices: Any, count: int) -> None:
    assert count_devices({"devices": devices}) == count


def test_without_a_setting_the_machine_decides() -> None:
    assert count_devices({}) == 0


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"devices": 4}, Topology(1, 4, 4, 4, 4)),
        ({"devices": [0, 3], "num_nodes": 3}, Topology(3, 2, 2, 6, 6)),
    ],
)
def test_a_job_has_a_rank_for_each_device(trainer: dict[str, Any], expected: Topology) -> None:
    assert Topology.requested(trainer) == expected
    assert expected.total_devices == expected.world_size


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({}, "trainer.devices=auto: a job needs an explicit number; try trainer.devices=1"),
        ({"devices": -1}, "trainer.devices=-1: a job needs an explicit number; try trainer.devices=1"),
        ({"devices": 2, "num_nodes": 0}, "trainer.num_nodes=0 is not a number of nodes; try trainer.num_nodes=1"),
        ({"devices": 2, "num_nodes": "two"}, "trainer.num_nodes=two is not a number of nodes; try trainer.num_nodes=1"),
    ],
)
def test_a_job_needs_explicit_numbers(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Topology.requested(trainer)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Topology(1, 1, 1, 1, 1)),
        (["trainer=ddp", "trainer.devices=4"], Topology(1, 4, 4, 4, 4)),
        (["trainer=dp", "trainer.devices=2"], Topology(1, 2, 1, 1, 1)),  # one process drives both
        (["trainer=fsdp2", "trainer.devices=4", "trainer.strategy.tensor_parallel_size=2"], Topology(1, 4, 4, 4, 2)),
    ],
)
def test_the_topology_of_a_run(overrides: list[str], expected: Topology) -> None:
    cfg = read_config(Project.find(), [*overrides, "trainer.accelerator=cpu", "logger=null", "callback=null"])
    found = assemble(cfg, with_callbacks=False).topology
    assert found == expected
    assert str(found) == f"trainer.devices={expected.num_devices}, trainer.num_nodes=1"


def test_a_batch_divides_over_the_ranks() -> None:
    check_batch_size(66, 3)
    with pytest.raises(ValueError, match=r"data\.batch_size=64 does not divide over 3 ranks; try 66"):
        check_batch_size(64, 3)
    with pytest.raises(ValueError, match=r"data\.batch_size=0 must be 1 or more; try 64"):
        check_batch_size(0, 1)


def test_jobs_are_described_without_torch() -> None:
    code = "import sys, boltcutter.topology; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


REFUSED: list[Any] = [
    (["trainer=dp", "task.compile=true"], "task.compile=true: trainer=dp .*use trainer=ddp"),
    (["trainer=ddp", "+trainer.strategy.static_graph=true", "trainer.accumulate_grad_batches=2"], "static_graph="),
    (["trainer=ddp", "trainer.strategy.process_group_backend=nccl"], "nccl: it needs CUDA devices.*; try gloo"),
    (["trainer=dp", "trainer.strategy.module=net"], "trainer.strategy.module=net: the task has no such module"),
    (["trainer=pipeline", "trainer.strategy.module=net"], "trainer.strategy.module=net: the task has no such module"),
    (["trainer=pipeline", "task.compile=true"], "task.compile=true: stages are not compiled"),
    (["trainer=pipeline", "model=convnet"], "ConvNet has no method stages"),
    (["trainer=pipeline", "data.batch_size=62"], "data.batch_size=62 does not divide .*; try data.batch_size=64"),
    (["trainer=pipeline", "trainer.strategy.num_microbatches=1"], "num_microbatches=1: fewer than the 2 stages"),
    (["trainer=pipeline", "trainer.precision=16-mixed"], "trainer.precision=16-mixed: loss scaling"),
    (["trainer=fsdp2", "trainer.strategy.cpu_offload=true"], "cpu_offload=true: on CPUs .*; set it to false"),
    (["trainer=fsdp2", "trainer.strategy.tensor_parallel_size=3"], "their product is not 2"),
    (["trainer=fsdp2", "model=convnet", "trainer.strategy.tensor_parallel_size=2"], r"has no method shard\(mesh\)"),
    (["trainer=pipeline", "model=gpt", "data=text", "model.num_layers=1", "task=language"], "model.num_layers=1"),
    (["trainer=fsdp2", "model=mlp", "model.dropout=0.1", "trainer.strategy.tensor_parallel_size=2"], "set model.norm="),
    (["task.compile=xla", "trainer=fsdp2"], "does not support ModelParallelStrategy"),
    (["task.compile=xla", "trainer.precision=bf16-mixed"], "does not support trainer.precision=bf16-mixed"),
]


@pytest.mark.parametrize(("overrides", "text"), REFUSED)
def test_what_is_not_supported_is_found_before_processes_start(overrides: list[str], text: str, tmp_path: Path) -> None:
    where = ["trainer.accelerator=cpu", "trainer.devices=2", "logger=null", f"folder={tmp_path}/run"]
    cfg = read_config(Project.find(__file__), [*overrides, *where])
    for check in (assemble, check_job):
        with pytest.raises(ConfigError, match=text):
            check(cfg)
