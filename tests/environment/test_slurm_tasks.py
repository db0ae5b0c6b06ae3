"""The variables are those that SLURM sets."""

import os
import re
from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter.environment.process import in_slurm_step
from boltcutter.environment.slurm_tasks import mismatch, prepare, tasks_per_node
from boltcutter.topology import Topology

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "try", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def script_of(tasks: int, **changed: str) -> dict[str, str]:
    """Variables of a batch script."""
    return JOB | {"SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks), "SLURM_NNODES": "1"} | changed


def task_of(*each: int, **changed: str) -> dict[str, str]:
    """Variables of a task of srun, given the number of tasks on each node."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, each)), "SLURM_NNODES": str(len(each))}
    return script_of(sum(each)) | step | changed


def test_tasks_per_node() -> None:
    assert tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("env", "is_task"),
    [
        ({}, False),
        (script_of(2), False),
        (task_of(2), True),
        (task_of(1), True),
        (task_of(2, SLURM_JOB_NAME="interactive"), True),
        (task_of(1, SLURM_JOB_NAME="bash"), False),
        (script_of(2, SLURM_STEP_ID="4294967290"), False),
    ],
    ids=["nowhere", "batch script", "srun", "one task", "srun in salloc", "srun --pty bash", "interactive step"],
)
def test_lightning_detects_tasks_of_srun_only(env: dict[str, str], is_task: bool) -> None:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    prepared = dict(env)
    prepare(prepared)
    assert in_slurm_step(prepared) is is_task
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        for name, value in prepared.items():
            patch.setenv(name, value)
        patch.setenv("PATH", "")  # Lightning warns if it finds srun
        assert SLURMEnvironment.detect() is is_task
        if is_task:
            SLURMEnvironment()


def test_processes_of_other_launchers_are_not_changed() -> None:
    env = task_of(2, RANK="0")
    prepare(env)
    assert env == task_of(2, RANK="0")
    assert mismatch(Topology(1, 4, 4, 4, 4), env) is None


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (task_of(1), (2, 2, 1), r"1 task on 1 node; try trainer.devices=1 trainer.num_nodes=1, or srun .*per-node=2"),
        (task_of(2), (1, 1, 1), r"2 tasks on 1 node; try trainer.devices=2 trainer.num_nodes=1, or srun"),
        (task_of(2, 2), (2, 2, 1), r"4 tasks on 2 nodes; try trainer.devices=2 trainer.num_nodes=2"),
        (task_of(2, 1), (2, 2, 2), r"3 tasks on 2 nodes; try srun --nodes=2 --ntasks-per-node=2"),
        (task_of(2), (2, 1, 1), r"2 tasks on 1 node; try srun --nodes=1 --ntasks-per-node=1"),
        (script_of(2), (2, 2, 1), "without srun; .* put srun before python"),
        (script_of(1), (2, 2, 1), "without srun; .* --nodes=1 --ntasks-per-node=2, and put srun"),
        (script_of(2, SLURM_JOB_NAME="interactive"), (1, 1, 2), "--nodes=2 --ntasks-per-node=1, and put srun"),
        (task_of(2), (2, 2, 1), None),
        (task_of(2, 2, 2), (2, 2, 3), None),
        (script_of(1), (1, 1, 1), None),
        (JOB, (2, 2, 1), None),
        (script_of(2, SLURM_JOB_NAME="interactive"), (2, 2, 1), None),
        ({}, (2, 2, 2), None),
    ],
)
def test_mismatches(env: dict[str, str], settings: tuple[int, int, int], message: str | None) -> None:
    env = dict(env)
    prepare(env)
    devices, processes, nodes = settings
    found = mismatch(Topology(nodes, devices, processes, nodes * processes, nodes * processes), env)
    assert (found and re.search(message, found)) if message else found is None
    assert not found or found.startswith(f"trainer.devices={settings[0]}, trainer.num_nodes={settings[2]}: ")


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        (
            task_of(1),
            ["trainer=ddp", "trainer.devices=2"],
            "error: trainer.devices=2, trainer.num_nodes=1: srun started",
        ),
        (task_of(2), [], "error: trainer.devices=1, trainer.num_nodes=1: srun started 2 tasks on 1 node"),
        (script_of(2), ["trainer=ddp", "trainer.devices=2"], "put srun before python"),
    ],
    ids=["fewer tasks", "more tasks", "no srun"],
)
def test_training_does_not_start_after_a_mismatch(
    script: Script, tmp_path: Path, env: dict[str, str], overrides: list[str], message: str
) -> None:
    overrides = [*QUICK, "model=linear", "trainer.accelerator=cpu", f"folder={tmp_path}/run", *overrides]
    done = script("train", *overrides, env=env, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
