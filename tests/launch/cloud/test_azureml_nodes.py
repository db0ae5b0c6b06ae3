"""A command job of Azure ML as its nodes run it: two machines with the variables that it documents."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, Script, saved_weights

from ..azure_server import WORKSPACE, BlobStorage, azure, clean_environment
from ..nodes import Machine, Process, nodes

OVERRIDES = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]
PLACE = WORKSPACE.split("/")
SETTINGS = [f"launch.subscription={PLACE[2]}", f"launch.resource_group={PLACE[4]}", f"launch.workspace={PLACE[-1]}"]
SETTINGS += ["launch.storage=abfss://models@account.dfs.core.windows.net/runs", "launch.image=registry.example.com/p:1"]
SETTINGS += ["launch.compute=cluster", f"launch.python={sys.executable}"]
SETTINGS += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads


def start_process(machine: Machine, first: Machine, rank: int, job: dict[str, Any], storage: BlobStorage) -> Process:
    """Start a process as Azure ML does on a node.

    https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu; the address and the key of the
    storage are those of the server, in place of the managed identity.
    """
    each = job["distribution"]["processCountPerInstance"]
    env = {
        "PATH": "/usr/bin:/bin",
        "AZUREML_RUN_ID": "digits",
        "AZUREML_NODE_COUNT": str(job["resources"]["instanceCount"]),
        "NODE_RANK": str(rank // each),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % each),
        "WORLD_SIZE": str(job["resources"]["instanceCount"] * each),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": "6105",
    }
    env |= storage.env(machine.gateway) | job["environmentVariables"]
    return machine.start(["bash", "-c", job["command"]], env)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_job_resumes(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of one node is stopped, and the job that is started again continues to the weights of another job."""
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    with azure(tmp_path) as (server, storage), nodes(2) as machines:
        for name, value in {**server.env, **storage.env()}.items():
            monkeypatch.setenv(name, value)
        server.clusters["cluster"] = {"properties": {"vmSize": "STANDARD_D8S_V5"}}

        def launch(name: str) -> tuple[Path, dict[str, Any]]:
            given = ["launch=azureml", f"launch.resource_manager={server.url}", *SETTINGS, *OVERRIDES, f"name={name}"]
            given += [f"runs={tmp_path}", "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=2"]
            done = script("launch", *given)
            assert done.returncode == 0, done.stderr
            (folder,) = (tmp_path / name).iterdir()
            return folder, server.jobs[f"{name}-{folder.name}"]

        def start(job: dict[str, Any]) -> list[Process]:
            return [start_process(machines[rank // 2], machines[0], rank, job, storage) for rank in range(4)]

        folder, job = launch("interrupted")
        processes = start(job)
        prefix = f"models/runs/interrupted/{folder.name}"
        processes[3].wait_until(lambda: f"{prefix}/checkpoints/last.ckpt" in storage.blobs)
        processes[3].signal("TERM")
        for process in processes:
            assert process.wait() != 0, process.output
        for process in start(job):
            assert process.wait() == 0, process.output
        job["status"] = "Completed"
        status = script("launch", "status", f"run={folder}")
        logs = script("launch", "logs", f"run={folder}", "--wait")
        whole, job = launch("whole")
        for process in start(job):
            assert process.wait() == 0, process.output
        for place in (folder, whole):
            fetched = script("launch", "fetch", f"run={place}")
            assert fetched.returncode == 0, fetched.stderr
    first, second = json.loads((folder / "record.json").read_text())["attempts"]
    saved = (
        f"abfss://models@account.dfs.core.windows.net/runs/interrupted/{folder.name}/checkpoints/last-preempted.ckpt"
    )
    assert first["reason"] == f"preempted by SIGTERM, saved {saved}"
    assert (second["reason"], second["resumed_from"]) == ("completed", saved)
    assert f"job interrupted-{folder.name}, Completed\n  {first['start']}  {first['reason']}\n" in status.stdout
    assert logs.stdout.count("epoch 5/5") == 1
    ours, theirs = saved_weights(folder), saved_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    alone = script("train", *OVERRIDES, "trainer.devices=1", f"folder={tmp_path}/alone")
    assert alone.returncode == 0, alone.stderr
    theirs = saved_weights(tmp_path / "alone")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
