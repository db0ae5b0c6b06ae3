"""A custom job of Vertex AI as its nodes run it: two machines with the variables that it documents."""

import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import QUICK, Script, saved_weights
from gcsfs.core import GCSFileSystem
from lightning.pytorch.plugins.environments import LightningEnvironment
from object_storage import google_storage

from boltcutter.strategy.ddp import DDPStrategy

from ..google_server import google_server
from ..nodes import Machine, Process, nodes

JOB = "projects/123/locations/us-central1/customJobs/4242"
RESOURCE = {"type": "ml_job", "labels": {"task_name": "service"}}
ENTRY = {"insertId": "1", "timestamp": "2026-11-22T12:00:00Z", "textPayload": "Job is running.", "resource": RESOURCE}
HOSTS = [f"cmle-training-workerpool{pool}-1a2b3c4d5e-0" for pool in (0, 1)]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_backend_follows_from_the_device(device: str, backend: str) -> None:
    strategy = DDPStrategy(parallel_devices=[torch.device(device, 0)], cluster_environment=LightningEnvironment())
    assert strategy._get_process_group_backend() == backend


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_job_resumes(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes train as Vertex AI starts them, one is stopped, and the job that is restarted continues."""
    overrides = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]
    with (
        google_storage("0.0.0.0") as variables,
        google_server(tmp_path) as (server, env),
        nodes(2, hosts=HOSTS) as machines,
    ):
        for name, value in (env | variables).items():
            monkeypatch.setenv(name, value)
        store = GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
        server.answers["POST /v1/projects/my-project/locations/us-central1/customJobs"] = [(200, {"name": JOB})]
        server.answers[f"GET /v1/{JOB}"] = [(200, {"name": JOB, "state": "JOB_STATE_PENDING"})]
        settings = ["launch=vertex", "launch.project=my-project", "launch.region=us-central1", "launch.image=image:1"]
        settings += ["launch.storage=gs://bucket/runs", "launch.machine_type=n2-standard-8", "launch.spot=true"]
        settings += [f"launch.python={sys.executable}", f"runs={tmp_path}", "name=digits"]
        settings += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads
        submitted = script("launch", *settings, *overrides, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1")
        assert submitted.returncode == 0, submitted.stderr
        assert "job 4242, JOB_STATE_PENDING" in submitted.stdout
        (folder,) = (tmp_path / "digits").iterdir()
        pools = yaml.safe_load((folder / "job.yaml").read_text())["workerPoolSpecs"]
        place = f"bucket/runs/digits/{folder.name}"

        def start() -> list[Process]:
            return [start_replica(machine, pools, pool, variables) for pool, machine in enumerate(machines)]

        first, second = start()
        second.wait_until(lambda: store.exists(f"{place}/checkpoints/last.ckpt"))
        second.signal("TERM")
        for process in (first, second):
            assert process.wait() == signal.SIGTERM + 128, process.output
        last = torch.load(io.BytesIO(store.cat(f"{place}/checkpoints/last.ckpt")), weights_only=True)
        assert last["epoch"] < 4
        for process in start():
            assert process.wait() == 0, process.output
        server.answers[f"POST /v1/{JOB}:cancel"] = [(200, {})]
        server.answers["POST /v2/entries:list"] = [(200, {"entries": [ENTRY]})]
        found = {verb: script("launch", verb, f"run={folder}") for verb in ("status", "logs", "cancel")}
        assert {verb: done.returncode for verb, done in found.items()} == dict.fromkeys(found, 0)
        assert "completed" in found["status"].stdout
        assert found["logs"].stdout == "service: Job is running.\n"
        assert server.requests[-2].path == f"/v1/{JOB}:cancel"
        fetched = script("launch", "fetch", f"run={folder}")
        assert fetched.returncode == 0, fetched.stderr
    record = json.loads((folder / "record.json").read_text())
    assert [attempt["reason"].partition(",")[0] for attempt in record["attempts"]][1:] == ["completed"]
    whole = script("train", *overrides, "trainer.devices=2", f"folder={tmp_path}/whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    ours, theirs = saved_weights(folder), saved_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def start_replica(machine: Machine, pools: list[dict[str, Any]], pool: int, variables: dict[str, str]) -> Process:
    """Start the container of a replica, with the variables that its documentation lists.

    https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables,
    https://cloud.google.com/ai-platform/training/docs/distributed-pytorch#environment-variables; the address of the
    storage is that of the server.
    """
    cluster = {f"workerpool{number}": [f"{host}:2222"] for number, host in enumerate(HOSTS)}
    task = {"type": f"workerpool{pool}", "index": 0}
    spec = {"cluster": cluster, "environment": "cloud", "task": task, "job": json.dumps({"worker_pool_specs": pools})}
    own = {"CLUSTER_SPEC": json.dumps(spec), "CLOUD_ML_JOB_ID": "4242", "CLOUD_ML_PROJECT_ID": "my-project"}
    own |= {
        "RANK": str(pool),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": HOSTS[0],
        "MASTER_PORT": "3333",
        "PATH": "/usr/bin:/bin",
    }
    own |= {name: re.sub("0.0.0.0", machine.gateway, value) for name, value in variables.items()}
    container = pools[pool]["containerSpec"]
    assert pools[pool]["replicaCount"] == 1
    return machine.start(container["command"], own | {entry["name"]: entry["value"] for entry in container["env"]})
