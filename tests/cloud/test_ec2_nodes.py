"""A job on EC2 as its instances run it: the user data is executed on machines with a metadata server."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
import torch
import yaml
from conftest import QUICK, Script, saved_weights

from ..launch.aws_server import aws_server
from ..launch.nodes import Machine, nodes
from .test_ec2 import job as job_without_folder
from .test_ec2 import launcher

LOG = "/var/log/boltcutter.log"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# In place of systemd, which starts a unit in an environment of its own, and stops it by SIGTERM to its first process.
SYSTEMCTL = rf"""#!/bin/bash
unit=/etc/systemd/system/boltcutter.service
case "$*" in
"enable --now --no-block boltcutter.service" | start)
    read -ra command < <(sed -n 's/^ExecStart=//p' $unit)
    log=$(sed -n 's/^StandardOutput=append://p' $unit)
    env -i PATH={PATH} setsid "${{command[@]}}" >>"$log" 2>&1 </dev/null &
    echo $! >/run/unit.pid
    ;;
stop) kill -TERM "$(cat /run/unit.pid)" ;;
daemon-reload) ;;
*) exit 1 ;;
esac
"""
SHUTDOWN = '#!/bin/sh\necho "$@" >>/run/shutdown\n'


class Instance:
    """An instance of EC2 on a machine."""

    def __init__(self, machine: Machine, number: str) -> None:
        self.machine, self.number = machine, number
        machine.run("ip", "addr", "add", "169.254.169.254/32", "dev", "lo")
        machine.write("/usr/local/bin/systemctl", SYSTEMCTL, "755")
        machine.write("/usr/local/sbin/shutdown", SHUTDOWN, "755")
        machine.run("ln", "-s", str(Path(sys.executable).with_name("aws")), "/usr/local/bin/aws")
        machine.run("mkdir", "-p", "/etc/systemd/system")
        server = [sys.executable, str(Path(__file__).with_name("instance_metadata.py")), number, machine.address]
        machine.start(server, {}).wait_for("ready")

    def boot(self, user_data: str) -> None:
        """Run the user data, as cloud-init does at the first boot."""
        self.machine.write("/user-data", user_data, "755")
        process = self.machine.start(["/user-data"], {"PATH": PATH})
        assert process.wait(30) == 0, process.output

    @property
    def log(self) -> str:
        return self.machine.run("sh", "-c", f"cat {LOG} 2>/dev/null || true")

    @property
    def shutdowns(self) -> list[str]:
        return self.machine.run("sh", "-c", "cat /run/shutdown 2>/dev/null || true").splitlines()

    def wait_until(self, is_done: Callable[[], object], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > end:
                pytest.fail(f"{self.number}: not within {seconds} s:\n{self.log}")
            time.sleep(0.2)

    def wait_for_termination(self) -> str:
        """Wait until the instance has shut itself down; returns its log."""
        self.wait_until(lambda: "-h now" in self.shutdowns)
        return self.log


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with aws_server("0.0.0.0") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("0.0.0.0", "127.0.0.1"))
        yield variables


class Job:
    """A job that was submitted to the server."""

    def __init__(
        self, script: Script, folder: Path, server: dict[str, str], machine: Machine, *overrides: str, **variables: str
    ) -> None:
        boto3.client("s3").create_bucket(Bucket="bucket")
        boto3.client("iam").create_instance_profile(InstanceProfileName="train")
        images = boto3.client("ec2").describe_images()["Images"]
        image = next(one["ImageId"] for one in images if one["RootDeviceName"] == "/dev/sda1")
        endpoint = server["AWS_ENDPOINT_URL"].replace("0.0.0.0", machine.gateway)
        variables |= {"AWS_ENDPOINT_URL": endpoint, "OMP_NUM_THREADS": "1"}  # sums depend on the number of threads
        settings = ["launch=ec2", "launch.storage=s3://bucket/runs", "launch.instance_type=m5.large"]
        settings += [f"launch.ami={image}", "launch.instance_profile=train", f"runs={folder}", "name=digits"]
        settings += [f"launch.environment={json.dumps(variables)}"]
        done = script("launch", *settings, *QUICK, "model=mlp", "trainer.accelerator=cpu", "test=false", *overrides)
        assert done.returncode == 0, done.stderr
        (self.folder,) = (folder / "digits").iterdir()
        self.store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        self.place = f"bucket/runs/digits/{self.folder.name}"
        self.user_data = yaml.safe_load((self.folder / "job.yaml").read_text())["UserData"]

    def read(self, name: str) -> bytes:
        return self.store.cat_file(f"{self.place}/{name}")  # type: ignore[no-any-return]

    def attempts(self) -> list[str]:
        record: Any = json.loads(self.read("record.json"))
        return [attempt["reason"].partition(",")[0] for attempt in record["attempts"]]


@pytest.mark.slow
def test_a_set_up_that_fails_terminates_the_instance(script: Script, tmp_path: Path, server: dict[str, str]) -> None:
    with nodes(1) as machines:
        job = Job(
            *(script, tmp_path, server, machines[0], "trainer.devices=1", "launch.time=2:00:00"),
            "launch.setup=[echo preparing, apt-get install nothing-of-this-name]",
        )
        instance = Instance(machines[0], "i-0123")
        instance.boot(job.user_data)
        log = instance.wait_for_termination()
        assert "ec2: set up i-0123\n" in log
        assert "\npreparing\n" in log
        assert "ec2: set-up failed; terminate" in log
        assert "venv" not in log
        assert instance.shutdowns[:2] == ["-h +120", "-h +120"]  # at the latest
        assert job.read("logs/ec2-i-0123.log").decode() in log
        assert b"set-up failed; terminate" in job.read("logs/ec2-i-0123.log")
        shown = script("launch", "logs", f"run={job.folder}")
        assert "set-up failed; terminate" in shown.stdout, shown.stderr
        # The server does not know that the instance has terminated.
        again = script("launch", f"resume={job.folder}")
        assert f"job digits-{job.folder.name}, 1 running; cancel it first" in again.stderr
        assert script("launch", "cancel", f"run={job.folder}").returncode == 0
        again = script("launch", f"resume={job.folder}", "launch.time=3:00:00")
        assert again.returncode == 0, again.stderr
        request = yaml.safe_load((job.folder / "job.yaml").read_text())
        assert request["ClientToken"].startswith(f"digits-{job.folder.name}-")
        assert request["InstanceType"] == "m5.large"
        assert "+ 10800)) >deadline" in request["UserData"]


@pytest.mark.slow
def test_an_instance_always_terminates(server: dict[str, str]) -> None:
    """After too many restarts, after a mistake, and when its time is over, unless it is stopped before."""
    boto3.client("s3").create_bucket(Bucket="bucket")
    with nodes(1) as machines:
        endpoint = server["AWS_ENDPOINT_URL"].replace("0.0.0.0", machines[0].gateway)
        own = launcher(install=False, python="/node", max_restarts=1, environment={"AWS_ENDPOINT_URL": endpoint})
        instance = Instance(machines[0], "i-0123")
        instance.machine.write("/node", "#!/bin/sh\nexec $(cat /behaviour)\n", "755")
        instance.machine.write("/mistake", "#!/bin/sh\nexit 2\n", "755")

        def start(behaviour: str, *, is_first: bool = False) -> None:
            instance.machine.write("/behaviour", behaviour)
            instance.machine.run("rm", "-f", "/run/shutdown", LOG)
            if is_first:
                instance.boot(yaml.safe_load(own.render(job_without_folder()))["UserData"])
            else:
                instance.machine.run("systemctl", "start")

        start("false", is_first=True)
        log = instance.wait_for_termination()
        assert log.count("ec2: start ") == 2
        assert "ec2: ended with status 1, launch.max_restarts=1 reached; terminate" in log
        start("/mistake")
        log = instance.wait_for_termination()
        assert log.count("ec2: start ") == 1
        assert "ec2: ended with status 2; terminate" in log
        start("sleep 1000")
        instance.wait_until(lambda: "ec2: start 0" in instance.log)
        instance.machine.run("systemctl", "stop")
        instance.wait_until(lambda: "stopped; the run continues if the instance starts again" in instance.log)
        assert "-h now" not in instance.shutdowns
        instance.machine.write("/opt/boltcutter/deadline", "0")
        start("sleep 1000")
        assert "ec2: launch.time=1-00:00:00 reached; terminate" in instance.wait_for_termination()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_instance_installs_the_project(script: Script, tmp_path: Path, server: dict[str, str]) -> None:
    # Without an index, pip finds the packages of this environment.
    packages = Path(torch.__file__).parents[1]
    offline = {"PYTHONPATH": str(packages), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    with nodes(1) as machines:
        overrides = ["trainer.devices=1", "trainer.max_epochs=1", f"launch.python={sys.executable}"]
        job = Job(script, tmp_path, server, machines[0], *overrides, **offline)
        instance = Instance(machines[0], "i-0123")
        instance.boot(job.user_data)
        log = instance.wait_for_termination()
        assert "ec2: completed; terminate" in log
        assert machines[0].run("sh", "-c", "ls /opt/boltcutter/venv/lib/*/site-packages").count("boltcutter") >= 2
        assert job.attempts() == ["completed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_spot_instance_continues(script: Script, tmp_path: Path, server: dict[str, str]) -> None:
    """EC2 interrupts an instance and starts it again, and the run continues as if nothing had happened."""
    overrides = ["trainer.max_epochs=60", "trainer.devices=1"]
    with nodes(1) as machines:
        settings = ["launch.spot=true", "launch.install=false", f"launch.python={sys.executable}"]
        job = Job(script, tmp_path, server, machines[0], *overrides, *settings)
        ec2 = boto3.client("ec2")
        image = ec2.describe_images()["Images"][0]["ImageId"]
        specification = {"ImageId": image, "InstanceType": "m5.large"}
        ec2.request_spot_instances(SpotPrice="1", LaunchSpecification=specification)
        (request,) = ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        instance = Instance(machines[0], request["InstanceId"])
        instance.boot(job.user_data)
        instance.wait_until(lambda: job.store.exists(f"{job.place}/checkpoints/last.ckpt"))

        instance.machine.write("/run/interruption", "")
        instance.wait_until(lambda: "wait until EC2 stops this instance" in instance.log)
        assert 'EC2 announces an interruption: {"action": "stop"' in instance.log
        assert "completed" not in job.attempts()
        instance.machine.run("systemctl", "stop")
        instance.wait_until(lambda: "stopped; the run continues if the instance starts again" in instance.log)
        assert "-h now" not in instance.shutdowns
        instance.machine.run("sh", "-c", "rm /run/interruption /run/boltcutter-notice")  # /run is empty after a boot
        instance.machine.run("systemctl", "start")
        log = instance.wait_for_termination()
        assert "ec2: completed; terminate" in log
        assert "the spot request was not cancelled" not in log
        assert not ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        assert job.attempts() == ["preempted by SIGTERM", "completed"]
        fetched = script("launch", "fetch", f"run={job.folder}")
        assert fetched.returncode == 0, fetched.stderr
    whole = script(
        "train", *QUICK, "model=mlp", "trainer.accelerator=cpu", "test=false", "trainer.max_epochs=60",
        *("trainer.devices=1", f"folder={tmp_path}/whole"),
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    ours, theirs = saved_weights(job.folder), saved_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
