"""A training job of SageMaker as its instances run it: two machines with the files and variables that it documents."""

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import QUICK, Script, saved_weights

from .aws_server import ACCOUNT, aws_server
from .nodes import Machine, Process, nodes

ROLE = f"arn:aws:iam::{ACCOUNT}:role/train"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train:1.0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_job_resumes(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances train as SageMaker starts them, one is stopped, and the job that is restarted continues."""
    overrides = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]
    with aws_server("0.0.0.0") as variables, nodes(2, hosts=["algo-1", "algo-2"]) as machines:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        store.mkdir("bucket")
        settings = [
            "launch=sagemaker",
            "launch.storage=s3://bucket/runs",
            f"launch.role={ROLE}",
            f"launch.image={IMAGE}",
        ]
        settings += [f"launch.python={sys.executable}", "launch.spot=true", f"runs={tmp_path}", "name=digits"]
        settings += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads
        submitted = script("launch", *settings, *overrides, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1")
        assert submitted.returncode == 0, submitted.stderr
        (folder,) = (tmp_path / "digits").iterdir()
        request = json.loads((folder / "job.json").read_text())
        place = f"bucket/runs/digits/{folder.name}"

        def start() -> list[Process]:
            return [start_instance(machine, request, variables) for machine in machines]

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
    whole = script("train", *overrides, "trainer.devices=2", f"folder={tmp_path}/whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    ours, theirs = saved_weights(folder), saved_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def start_instance(machine: Machine, request: dict[str, Any], variables: dict[str, str]) -> Process:
    """Start the container of an instance, with what its documentation says is there.

    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html; the role's
    credentials and the endpoints are those of the server.
    """
    config = {"current_host": machine.host, "current_instance_type": request["ResourceConfig"]["InstanceType"]}
    config |= {"hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
    own = {
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/digits",
        "PATH": "/usr/bin:/bin",
    }
    own |= {name: value.replace("0.0.0.0", machine.gateway) for name, value in variables.items()}
    algorithm = request["AlgorithmSpecification"]
    return machine.start(
        [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]],
        own | request["Environment"],
        files={"/opt/ml/input/config/resourceconfig.json": json.dumps(config)},
    )
