"""Jobs of SageMaker and AWS Batch as they run there: two machines with the files and variables that are documented."""

import io
import json
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
import torch
from conftest import QUICK, Script, saved_weights

from ..launch.aws_server import ACCOUNT, aws_server
from ..launch.nodes import Machine, Process, nodes, reachable

OVERRIDES = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]
SETTINGS = {
    "sagemaker": [
        f"launch.role=arn:aws:iam::{ACCOUNT}:role/train",
        f"launch.image={ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train:1.0",
        "launch.spot=true",
    ],
    "aws_batch": ["launch.queue=queue", "launch.job_definition=train"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("platform", SETTINGS)
def test_an_interrupted_job_resumes(
    platform: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is stopped, both save, and the job that is started again continues."""
    with aws_server("0.0.0.0") as variables, nodes(2, hosts=["algo-1", "algo-2"]) as machines:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        store.mkdir("bucket")
        if platform == "aws_batch":
            create_queue(variables["AWS_ENDPOINT_URL"])
        settings = [f"launch={platform}", *SETTINGS[platform], "launch.storage=s3://bucket/runs"]
        settings += [f"launch.python={sys.executable}", f"runs={tmp_path}", "name=digits"]
        settings += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads
        submitted = script("launch", *settings, *OVERRIDES, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1")
        assert submitted.returncode == 0, submitted.stderr
        (folder,) = (tmp_path / "digits").iterdir()
        request = json.loads((folder / "job.json").read_text())
        place = f"bucket/runs/digits/{folder.name}"

        def start() -> list[Process]:
            return [START[platform](machines, rank, request, variables) for rank in range(2)]

        first, second = start()
        second.wait_until(lambda: store.exists(f"{place}/checkpoints/last.ckpt"))
        second.signal("TERM")
        for process in (first, second):
            assert process.wait() == signal.SIGTERM + 128, process.output
        last = torch.load(io.BytesIO(store.cat(f"{place}/checkpoints/last.ckpt")), weights_only=True)
        assert last["epoch"] < 4
        for process in start():
            assert process.wait() == 0, process.output
        fetched = script("launch", "fetch", f"run={folder}")
        assert fetched.returncode == 0, fetched.stderr
    record = json.loads((folder / "record.json").read_text())
    assert [attempt["reason"].partition(",")[0] for attempt in record["attempts"]][1:] == ["completed"]
    whole = script("train", *OVERRIDES, "trainer.devices=2", f"folder={tmp_path}/whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    ours, theirs = saved_weights(folder), saved_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def start_sagemaker(machines: list[Machine], rank: int, request: dict[str, Any], variables: dict[str, str]) -> Process:
    """Start a container with the files and variables of an instance; the credentials are those of the server.

    Source: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html.
    """
    machine = machines[rank]
    config = {"current_host": machine.host, "current_instance_type": request["ResourceConfig"]["InstanceType"]}
    config |= {"hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
    arn = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{request['TrainingJobName']}"
    own = {"TRAINING_JOB_NAME": request["TrainingJobName"], "TRAINING_JOB_ARN": arn}
    algorithm = request["AlgorithmSpecification"]
    return machine.start(
        [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]],
        own | reachable(variables, machine) | request["Environment"],
        files={"/opt/ml/input/config/resourceconfig.json": json.dumps(config)},
    )


def start_batch(machines: list[Machine], rank: int, request: dict[str, Any], variables: dict[str, str]) -> Process:
    """Start a container with the variables of a node.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html.
    """
    job = "6f3a0c9e-0000-4000-8000-000000000000"
    own = {"AWS_BATCH_JOB_ID": f"{job}#{rank}", "AWS_BATCH_JOB_ATTEMPT": "1", "AWS_BATCH_JQ_NAME": "queue"}
    own |= {"AWS_BATCH_CE_NAME": "machines", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": str(rank)}
    own |= {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    if rank:
        own["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = machines[0].address
    (override,) = request["nodeOverrides"]["nodePropertyOverrides"]
    container = override["containerOverrides"]
    own |= {variable["name"]: variable["value"] for variable in container["environment"]}
    return machines[rank].start(container["command"], own | reachable(variables, machines[rank]))


START = {"sagemaker": start_sagemaker, "aws_batch": start_batch}


def create_queue(url: str) -> None:
    """Create a queue and a job definition of the server, whose jobs do nothing."""
    content, header = json.dumps({"batch": {"use_docker": False}}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/config", content, header), timeout=30).close()
    role = boto3.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    batch = boto3.client("batch")
    machines = batch.create_compute_environment(
        computeEnvironmentName="machines", type="UNMANAGED", state="ENABLED", serviceRole=role
    )["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": machines}]
    batch.create_job_queue(jobQueueName="queue", state="ENABLED", priority=1, computeEnvironmentOrder=order)
    resources = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "2000"}]
    container = {"image": "train", "command": ["true"], "resourceRequirements": resources}
    ranges = [{"targetNodes": "0:", "container": container}]
    properties = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": ranges}
    batch.register_job_definition(jobDefinitionName="train", type="multinode", nodeProperties=properties)
