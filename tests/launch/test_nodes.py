"""The machines that other tests use."""

import io
import os
import sys
from pathlib import Path

import boto3
import pytest
import torch
from conftest import ROOT, Script

from .aws_server import aws_server
from .nodes import nodes

# No dropout, BatchNorm or Adam, so that the number of processes changes only rounding.
OVERRIDES = ["data=digits", "model=mlp", "optimizer=sgd", "optimizer.lr=0.02", "logger=null", "report=false"]
OVERRIDES += ["trainer.accelerator=cpu", "trainer.max_steps=20"]


@pytest.mark.slow
def test_machines_have_a_network_files_and_processes_of_their_own(tmp_path: Path) -> None:
    with nodes(2, hosts=["first", "second other.name"]) as machines:
        first, second = machines
        show = first.start(
            ["sh", "-c", "env; hostname; cat /opt/ml/x; echo seen >/tmp/seen"],
            {"PATH": os.environ["PATH"], "A": "b  c"},
            files={"/opt/ml/x": "written\n"},
            cwd="/usr",
        )
        assert show.wait(30) == 0
        variables = {line.partition("=")[0] for line in show.output.splitlines() if "=" in line}
        assert variables <= {"PATH", "A", "PWD"}
        assert "A=b  c\n" in show.output
        assert show.output.endswith("first\nwritten\n")
        assert first.read("/tmp/seen") == b"seen\n"
        assert second.run("ls", "/tmp") == ""
        assert not Path("/opt/ml/x").exists()
        serve = [sys.executable, "-u", "-m", "http.server", "8000", "--bind", first.address]
        server = first.start(serve, {}, cwd="/opt/ml")
        server.wait_for("Serving")
        fetch = "import urllib.request; print(urllib.request.urlopen('http://first:8000/x').read())"
        assert "written" in second.run(sys.executable, "-c", fetch)
        assert "http.server" in first.run("sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null; true")
        assert "http.server" not in second.run("sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null; true")
        server.signal("INT")
        server.wait(30)
    assert not server.is_running
    assert not Path(f"/proc/{first.pid}").exists()


@pytest.mark.slow
def test_two_machines_train_as_one_process(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share no disk, only a bucket, and get the plain variables of their ranks."""
    overrides = [*OVERRIDES, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1"]
    with aws_server("0.0.0.0") as server, nodes(2) as machines:
        url = server["AWS_ENDPOINT_URL"].replace("0.0.0.0", machines[0].gateway)
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        s3 = boto3.client("s3", endpoint_url=url)
        s3.create_bucket(Bucket="bucket")
        variables = server | {"AWS_ENDPOINT_URL": url, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29500"}
        processes = [
            machine.start(
                [sys.executable, "scripts/train.py", *overrides, "folder=s3://bucket/runs/digits/one"],
                variables | {"NODE_RANK": str(rank)},
                cwd=str(ROOT),
            )
            for rank, machine in enumerate(machines)
        ]
        for process in processes:
            assert process.wait() == 0, process.output
        content = s3.get_object(Bucket="bucket", Key="runs/digits/one/checkpoints/last.ckpt")["Body"].read()
    ours = torch.load(io.BytesIO(content), weights_only=True)["state_dict"]
    single = script("train", *OVERRIDES, f"folder={tmp_path}/run")
    assert single.returncode == 0, single.stderr
    theirs = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert ours.keys() == theirs.keys()
    # Ranks sum their gradients in another order than one process sums over the batch.
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 1e-6
