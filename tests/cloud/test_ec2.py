"""Jobs on EC2: the requests that leave, and what happens when EC2 rejects one."""

import base64
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
import yaml
from botocore.awsrequest import AWSResponse
from conftest import require

from boltcutter_cloud import aws
from boltcutter_cloud import ec2 as ec2_launcher
from boltcutter_cloud.ec2 import AMI, TAG, EC2Launcher
from boltcutter_launch.bundle import BUNDLE
from boltcutter_launch.job import Job, UnclearSubmissionError

from ..launch.aws_server import CREDENTIALS, aws_server
from ..launch.test_library import git
from .golden import check_job_file

ID = "20260101-120000-0a1b2c3d"
TOKEN = f"digits-{ID}"
Requests = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    checks = ("MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION", "MOTO_ENABLE_AMI_VALIDATION")
    with aws_server(**dict.fromkeys(checks, "true")) as variables:
        yield variables


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, server: dict[str, str]) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (CREDENTIALS | server).items():
        monkeypatch.setenv(name, value)
    reset = urllib.request.Request(f"{server['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=20).close()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Operation and parameters of each request to EC2, in order."""
    sent: Requests = []
    make = aws.client

    def recorded(service: str, region: str | None) -> Any:
        client = make(service, region)
        if service == "ec2":
            client.meta.events.register_first(
                "before-parameter-build.ec2.*", lambda params, model, **_: sent.append((model.name, dict(params)))
            )
        return client

    monkeypatch.setattr(aws, "client", recorded)
    return sent


def launcher(**settings: Any) -> EC2Launcher:
    defaults = {"storage": "s3://bucket/runs", "instance_type": "m5.xlarge", "instance_profile": "train"}
    return EC2Launcher(**defaults | settings)


def job(root: Path = Path("/p"), **facts: Any) -> Job:
    folder = root / "runs" / "digits" / ID
    facts = {"root": root, "code": folder / "code", "nodes": 1, "trusted": True} | facts
    return Job("digits", folder, folder / "code" / "scripts" / "train.py", **facts)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A run of a project with one file."""
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    code = job(tmp_path).code
    assert code
    code.mkdir(parents=True)
    (code / "a.py").write_text("a = 1\n")
    (code.parent / "record.json").write_text('{"attempts": []}')
    return tmp_path


def write_job(root: Path, own: EC2Launcher, **facts: Any) -> tuple[Job, Path]:
    submitted = job(root, **facts)
    own.check(submitted)
    file = submitted.folder / own.job_file
    file.write_text(own.render(submitted))
    return submitted, file


def image(ec2: Any) -> dict[str, Any]:
    """An AMI that moto has, with the root device of Ubuntu."""
    found = ec2.describe_images()["Images"]
    return next(one for one in found if one["RootDeviceName"] == "/dev/sda1")  # type: ignore[no-any-return]


@pytest.fixture
def profile() -> str:
    boto3.client("iam").create_instance_profile(InstanceProfileName="train")
    return "train"


@pytest.fixture
def bucket() -> str:
    boto3.client("s3").create_bucket(Bucket="bucket")
    fsspec.filesystem("s3").clear_instance_cache()
    return "bucket"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ec2.yaml": ({}, {}),
    "ec2-spot.yaml": (
        {
            **{"instance_type": "g5.12xlarge", "spot": True, "region": "eu-west-1", "time": "1:30:00"},
            "extra": {"KeyName": "mine", "SubnetId": "subnet-0123456789abcdef0"},
            **{"ami": "ami-0123456789abcdef0", "disk_gb": 500, "root_device": "/dev/xvda", "max_restarts": 3},
            **{"tags": {"project": "digits"}, "environment": {"A": "it's 1"}, "setup": ["dnf install -y git"]},
            **{"python": "python3.12", "instance_profile": "arn:aws:iam::123456789012:instance-profile/train"},
        },
        {"gpus": True, "devices": 4, "environment": {"WANDB_MODE": "offline"}},
    ),
    "ec2-image.yaml": (
        {"instance_type": "g5.xlarge", "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1.0"},
        {"gpus": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_job_files(name: str, tmp_path: Path) -> None:
    settings, facts = CASES[name]
    own = launcher(**settings)
    own.check(job(tmp_path, **facts))
    check_job_file(own.render(job(**facts)), name, None if name == "ec2.yaml" else "ec2.yaml")


@pytest.mark.parametrize(
    ("settings", "facts", "fault"),
    [
        ({"storage": None}, {}, r"launch\.storage: not set; .*s3://"),
        ({"storage": "gs://bucket/runs"}, {}, r"launch\.storage=gs://bucket/runs: .*use s3://"),
        ({"storage": "/mnt/runs"}, {}, r"launch\.storage=/mnt/runs: .*use s3://"),
        ({"instance_type": None}, {"gpus": True}, r"launch\.instance_type: not set; .*g5\.xlarge"),
        ({"instance_type": "g5.xlarge"}, {"gpus": True, "devices": 8}, r"trainer\.devices=8: .* has 1 A10G"),
        ({}, {"gpus": True}, r"launch\.instance_type=m5\.xlarge has no GPUs"),
        ({"instance_profile": None}, {}, r"launch\.instance_profile: not set"),
        ({"region": "us-east-1a"}, {}, r"launch\.region=us-east-1a .*try launch\.region=us-east-1"),
        ({"time": "0:05:00"}, {}, r"launch\.time=0:05:00 is less than 0:06:00; try launch\.time=0:06:00"),
        ({"disk_gb": 1}, {}, r"launch\.disk_gb=1 is less than 8"),
        ({"idle_minutes": 0}, {}, r"launch\.idle_minutes=0 is less than 1; try launch\.idle_minutes=1"),
        ({}, {"nodes": 2}, r"trainer\.num_nodes=2: launch=ec2 starts one instance; use launch=sky or launch=aws_"),
        ({"setup": ["echo\x07"]}, {}, r"launch\.setup='echo\\x07' has the control character"),
    ],
    ids=str,
)
def test_jobs_are_checked(settings: dict[str, Any], facts: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{fault}") as error:
        launcher(**settings).check(job(tmp_path, **facts))
    assert "\n" not in str(error.value)


def test_a_script_that_is_too_long_is_refused(tmp_path: Path) -> None:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html: 16 KB, before it is encoded
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    long = launcher(setup=["# " + "x" * 5000] * 2)
    long.check(job(tmp_path))
    with pytest.raises(ValueError, match=r"^launch\.setup: .* has \d+ bytes .*, but EC2 takes 16384; move its lines"):
        launcher(setup=["# " + "x" * 5000] * 3).check(job(tmp_path))


def test_a_job_is_submitted_and_cancelled(requests: Requests, project: Path, profile: str, bucket: str) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"], region="us-east-1")
    submitted, file = write_job(project, own)
    (job_id,) = own.submit(submitted, file)
    assert job_id == f"us-east-1/{TOKEN}"
    stored = {path.rpartition("/")[2] for path in fsspec.filesystem("s3").ls(f"bucket/runs/digits/{ID}")}
    assert stored == {BUNDLE, "job.yaml", "record.json"}

    names = [name for name, _ in requests]
    assert names[0] == "RunInstances"
    assert set(names[1:]) <= {"DescribeInstances"}  # until it is visible
    sent = dict(requests)
    expected = yaml.safe_load(file.read_text())
    assert sent["RunInstances"] == expected
    reservations = ec2.describe_instances(Filters=[{"Name": f"tag:{TAG}", "Values": [TOKEN]}])["Reservations"]
    instances = [one for found in reservations for one in found["Instances"]]
    assert len(instances) == 1
    for one in instances:
        assert one["InstanceType"] == "m5.xlarge"
        assert one["MetadataOptions"]["HttpTokens"] == "required"
        assert {tag["Key"]: tag["Value"] for tag in one["Tags"]} == {"Name": TOKEN, TAG: TOKEN}
        text = ec2.describe_instance_attribute(InstanceId=one["InstanceId"], Attribute="userData")
        decoded = base64.b64decode(text["UserData"]["Value"]).decode()
        assert decoded == expected["UserData"]
        assert not re.search("secret|AKIA", decoded, re.IGNORECASE)
        shutdown = ec2.describe_instance_attribute(
            InstanceId=one["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert shutdown["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    (volume,) = {block["Ebs"]["VolumeId"] for block in instances[0]["BlockDeviceMappings"]}
    (disk,) = ec2.describe_volumes(VolumeIds=[volume])["Volumes"]
    assert (disk["Size"], disk["Encrypted"], disk["VolumeType"]) == (100, True, "gp3")

    status = own.status(job_id)
    assert (status.state, status.text) == ("running", f"job {TOKEN}, 1 running")
    own.cancel(job_id)
    status = own.status(job_id)
    assert (status.state, status.text) == ("ended", f"job {TOKEN}, 1 terminated")
    own.cancel(job_id)  # which has ended
    with pytest.raises(ValueError, match=r"^record\.json has the job id --help"):
        own.status("--help")


@pytest.mark.slow
def test_spot_requests_end_with_the_job(
    requests: Requests,
    project: Path,
    profile: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"], spot=True, time="2:00:00")
    submitted, file = write_job(project, own)
    begin = datetime.now(timezone.utc)
    job_id = own.create(submitted, file)
    sent = dict(requests)["RunInstances"]
    assert sent["ImageId"] == image(ec2)["ImageId"]
    options = sent["InstanceMarketOptions"]["SpotOptions"]
    assert options.pop("ValidUntil") - begin == pytest.approx(timedelta(hours=2), abs=timedelta(minutes=1))
    assert options == {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
    assert sent["InstanceMarketOptions"]["MarketType"] == "spot"
    assert [one["ResourceType"] for one in sent["TagSpecifications"]] == [
        "instance",
        "volume",
        "spot-instances-request",
    ]

    # moto creates no Spot request for the instance, so this one stands for it.
    (tags,) = (one["Tags"] for one in sent["TagSpecifications"] if one["ResourceType"] == "spot-instances-request")
    made = ec2.request_spot_instances(
        SpotPrice="1",
        Type="persistent",
        LaunchSpecification={"ImageId": sent["ImageId"], "InstanceType": "m5.large"},
        TagSpecifications=[{"ResourceType": "spot-instances-request", "Tags": tags}],
    )
    request = made["SpotInstanceRequests"][0]["SpotInstanceRequestId"]
    (one,) = ec2.describe_instances(Filters=[{"Name": f"tag:{TAG}", "Values": [TOKEN]}])["Reservations"]
    ec2.stop_instances(InstanceIds=[one["Instances"][0]["InstanceId"]])  # as EC2 does to interrupt it
    status = own.status(job_id)
    assert (status.state, status.text) == ("pending", f"job {TOKEN}, 1 stopped, waits for Spot capacity")
    assert launcher().status(job_id).text == f"job {TOKEN}, 1 stopped"

    # Past its validity, and after a cancellation, a request starts no instance, and a stopped one stays:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-requests.html
    with monkeypatch.context() as patch:
        patch.setattr(ec2_launcher, "_spot_requests", lambda *_: [])
        status = own.status(job_id)
    assert status.state == "ended"
    assert "its Spot request has expired, so it does not start again; cancel or resume the run" in status.text
    requests.clear()
    own.cancel(job_id)
    names = [name for name, _ in requests if name != "DescribeInstances"]
    assert names == ["DescribeSpotInstanceRequests", "CancelSpotInstanceRequests", "TerminateInstances"]
    assert dict(requests)["CancelSpotInstanceRequests"] == {"SpotInstanceRequestIds": [request]}
    assert not ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
    assert own.status(job_id).state == "ended"


@pytest.mark.slow
def test_a_resumed_run_leaves_no_stopped_instance_behind(project: Path, profile: str, bucket: str) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"], spot=True)
    submitted, file = write_job(project, own)
    first = own.create(submitted, file)
    (number,) = (one["InstanceId"] for found in ec2.describe_instances()["Reservations"] for one in found["Instances"])
    ec2.stop_instances(InstanceIds=[number])  # interrupted, and its Spot request has expired since
    (submitted.folder / "record.json").write_text(json.dumps({"attempts": [], "launch": {"id": first}}))
    file.write_text(own.render(submitted))
    second = own.create(submitted, file)
    assert second != first
    assert own.status(first).text == f"job {first.partition('/')[2]}, 1 terminated"
    assert own.status(second).state == "running"


def fail(code: str, message: str = "No.", status: int = 400) -> AWSResponse:
    """An error as EC2 answers it."""

    class Body:
        def stream(self, **_: object) -> Iterator[bytes]:
            yield (
                f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
                "<RequestID>1</RequestID></Response>"
            ).encode()

    return AWSResponse("http://ec2", status, {}, Body())


@pytest.mark.slow
def test_an_instance_profile_may_be_unknown_for_some_seconds(
    project: Path, profile: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The message of EC2, while IAM distributes a new profile
    message = "Value (train) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
    own = launcher(ami=image(boto3.client("ec2"))["ImageId"])
    submitted, file = write_job(project, own)
    make, sent = aws.client, list[None]()

    def unknown(**_: Any) -> Any:
        sent.append(None)
        return fail("InvalidParameterValue", message) if len(sent) < 3 else None

    def late(service: str, region: str | None) -> Any:
        client = make(service, region)
        client.meta.events.register("before-send.ec2.RunInstances", unknown)
        return client

    monkeypatch.setattr(aws, "client", late)
    monkeypatch.setattr(ec2_launcher, "PROFILE_SECONDS", (0, 0))
    (job_id,) = own.submit(submitted, file)
    assert len(sent) == 3
    assert own.status(job_id).state == "running"


@pytest.mark.slow
def test_a_job_is_submitted_once_its_instances_can_be_seen(
    project: Path, profile: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = launcher(ami=image(boto3.client("ec2"))["ImageId"])
    submitted, file = write_job(project, own)
    make, seen = aws.client, list[bool]()

    def late(**_: Any) -> Any:
        seen.append(len(seen) > 0)
        return None if seen[-1] else fail("InvalidInstanceID.NotFound", "Not yet.", 400)

    def hiding(service: str, region: str | None) -> Any:
        client = make(service, region)
        client.meta.events.register("before-send.ec2.DescribeInstances", late)
        return client

    monkeypatch.setattr(aws, "client", hiding)
    (job_id,) = own.submit(submitted, file)
    assert seen == [False, True]
    assert own.status(job_id).state == "running"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message", "error", "fault"),
    [
        ("InsufficientInstanceCapacity", "None left.", ValueError, r"AWS rejected .*None left.*; use launch=sky"),
        (
            "InvalidParameterValue",
            "Value (train) for parameter iamInstanceProfile.name is invalid.",
            ValueError,
            "launch.instance_profile=train: AWS rejected .*; correct it, or create it in IAM$",
        ),
        ("InternalError", "Oops.", UnclearSubmissionError, rf".*tag {TAG}={TOKEN}, .*terminate the instance$"),
    ],
)
def test_a_rejected_job_leaves_nothing(
    code: str,
    message: str,
    error: type[ValueError],
    fault: str,
    project: Path,
    profile: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"])
    submitted, file = write_job(project, own)
    make = aws.client
    monkeypatch.setattr(ec2_launcher, "PROFILE_SECONDS", (0,))
    monkeypatch.setitem(aws.LIMITS, "retries", {"total_max_attempts": 1})

    def refusing(service: str, region: str | None) -> Any:
        client = make(service, region)
        status = 503 if code == "InternalError" else 400
        client.meta.events.register("before-send.ec2.RunInstances", lambda **_: fail(code, message, status))
        return client

    monkeypatch.setattr(aws, "client", refusing)
    with pytest.raises(error, match=f"^{fault}") as raised:
        own.submit(submitted, file)
    assert "\n" not in str(raised.value)
    assert type(raised.value) is error


@pytest.mark.slow
def test_what_ec2_does_not_have_is_named(project: Path, profile: str, bucket: str) -> None:
    ec2 = boto3.client("ec2")
    for settings, fault in (
        ({"ami": "ami-0123456789abcdef0"}, r"AWS rejected RunInstances \(InvalidAMIID\.NotFound"),
        (
            {"ami": image(ec2)["ImageId"], "extra": {"SubnetId": "subnet-0123456789abcdef0"}},
            r"AWS rejected RunInstances \(InvalidSubn",
        ),
        ({"ami": image(ec2)["ImageId"], "instance_type": "m5.tiny"}, r"AWS rejected RunInstances \(InvalidInstanceTy"),
    ):
        own = launcher(**settings)
        with pytest.raises(ValueError, match=f"^{fault}") as error:
            own.submit(*write_job(project, own))
        assert "\n" not in str(error.value)


def test_each_launch_of_a_run_has_its_own_token(project: Path) -> None:
    own = launcher()
    submitted = job(project)
    first = yaml.safe_load(own.render(submitted))["ClientToken"]
    assert first == TOKEN
    assert yaml.safe_load(own.render(submitted))["ClientToken"] == first
    (submitted.folder / "record.json").write_text(json.dumps({"attempts": [], "launch": {"id": f"us-east-1/{first}"}}))
    second = yaml.safe_load(own.render(submitted))["ClientToken"]
    assert second.startswith(f"{TOKEN}-")
    assert len(second) <= 64


@pytest.mark.slow
def test_the_job_file_can_be_run_by_hand(project: Path, profile: str) -> None:
    require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="awscli")
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"], spot=True)
    _, file = write_job(project, own)
    request = json.dumps(yaml.safe_load(text := file.read_text()))  # --cli-input-yaml needs version 2 of the AWS CLI
    (command,) = re.findall(r"^#   (aws .*) --cli-input-yaml file://job\.yaml$", text, re.M)
    done = subprocess.run(
        [*command.split(), "--cli-input-json", request],
        env={
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": boto3.client("ec2").meta.endpoint_url,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["Instances"]
    assert [one["InstanceType"] for one in found] == ["m5.xlarge"]
    assert {one["ClientToken"] for one in found} == {TOKEN}
    for one in found:
        given = ec2.describe_instance_attribute(InstanceId=one["InstanceId"], Attribute="userData")
        assert base64.b64decode(given["UserData"]["Value"]).decode() == yaml.safe_load(file.read_text())["UserData"]


@pytest.mark.slow
def test_logs_of_a_set_up_that_failed(project: Path, profile: str, bucket: str) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"])
    submitted, file = write_job(project, own)
    job_id = own.create(submitted, file)
    assert not list(own.logs(job_id, submitted.folder, follow=False))
    store = fsspec.filesystem("s3")
    store.pipe_file(f"bucket/runs/digits/{ID}/logs/ec2-i-1.log", b"set-up failed\n")
    assert "".join(own.logs(job_id, submitted.folder, follow=False)) == "set-up failed\n"
    store.pipe_file(f"bucket/runs/digits/{ID}/logs/rank-0.log", b"epoch 1\n")
    assert "".join(own.logs(job_id, submitted.folder, follow=False)) == "epoch 1\n"


@pytest.mark.slow
def test_jupyter_is_reached_by_a_tunnel(project: Path, profile: str, bucket: str) -> None:
    ec2 = boto3.client("ec2")
    own = launcher(ami=image(ec2)["ImageId"], jupyter=True, idle_minutes=15)
    submitted, file = write_job(project, own)
    user_data = yaml.safe_load(file.read_text())["UserData"]
    assert " ./bundle/code s3fs jupyterlab ipykernel\n" in user_data
    assert f"launch.node s3://bucket/runs/digits/{ID} trust=true --jupyter 15" in user_data
    job_id = own.create(submitted, file)
    (one,) = ec2.describe_instances()["Reservations"][0]["Instances"]
    tunnel = f"aws ssm start-session --target {one['InstanceId']} --region us-east-1 --document-name"
    assert tunnel in own.status(job_id).text
    own.cancel(job_id)
    assert tunnel not in own.status(job_id).text


def test_the_default_ami_is_a_public_parameter() -> None:
    assert AMI.startswith("/aws/service/")
    assert f"resolve:ssm:{AMI}" == yaml.safe_load(launcher().render(job()))["ImageId"]
