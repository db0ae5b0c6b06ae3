"""Training jobs of SageMaker: what is sent, and what happens when AWS refuses, is busy or does not answer."""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter_cloud import aws
from boltcutter_cloud.sagemaker import SageMakerLauncher
from boltcutter_launch import cloud, stored_runs
from boltcutter_launch.job import Job, NoAnswerError

from ..launch.aws_server import ACCOUNT, CREDENTIALS, AwsAnswers, aws_answers, aws_server, check_request
from .golden import check_job_file

ROLE = f"arn:aws:iam::{ACCOUNT}:role/train"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train:1.0"
NAME = "digits-20260101-120000-0a1b2c3d"
ARN = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{NAME}"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def launcher(**settings: Any) -> SageMakerLauncher:
    defaults = {"storage": "s3://bucket/runs", "role": ROLE, "image": IMAGE, "region": "us-east-1"}
    return SageMakerLauncher(**defaults | settings)


def job(root: Path = Path("/p"), **facts: Any) -> Job:
    """A job in a folder whose name is an ID, as the launch command makes it."""
    folder = root / "runs" / "digits" / NAME.removeprefix("digits-")
    facts = {"root": root, "code": folder / "code", "gpus": True} | facts
    return Job("digits", folder, folder / "code" / "scripts" / "train.py", **facts)


PLAN = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-plan/p5-in-may"
GOLDEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sagemaker": ({}, {}),
    "sagemaker_spot": (
        {
            "instance_type": "ml.m5.xlarge",
            "time": "2:00:00",
            "spot": True,
            "max_wait": "10:00:00",
            "disk_gb": 200,
            "extra": {
                "VpcConfig": {"Subnets": ["subnet-0123456789abcdef0"], "SecurityGroupIds": ["sg-0123456789abcdef0"]}
            },
            "tags": {"team": "vision"},
            "environment": {"OMP_NUM_THREADS": "4"},
            "max_restarts": 0,
            "python": "/opt/venv/bin/python",
        },
        {"nodes": 2, "devices": 4, "gpus": False, "trusted": True},
    ),
    "sagemaker_jupyter": ({"jupyter": True, "idle_minutes": 30}, {}),
    "sagemaker_plan": (
        {"extra": {"ResourceConfig": {"TrainingPlanArn": PLAN}}, "instance_type": "ml.p5.48xlarge"},
        {"nodes": 4, "devices": 8},
    ),
}


def render(name: str) -> str:
    settings, facts = GOLDEN[name]
    return launcher(**settings).render(job(**facts))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_job_file(name: str) -> None:
    text = render(name)
    check_job_file(text, f"{name}.json", None if name == "sagemaker" else "sagemaker.json")
    check_request("sagemaker", "CreateTrainingJob", json.loads(text))


def test_local_disks_have_a_fixed_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # "SageMaker AI mounts the local instance storage instead of Amazon EBS gp2 storage":
    # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
    here = write_job(tmp_path, "")[0]
    launcher(disk_gb=500).check(here)
    assert "note: launch.disk_gb=500: ml.g5.xlarge has local disks, which SageMaker mounts" in capsys.readouterr().err
    launcher(disk_gb=500, instance_type="ml.m5.xlarge").check(dataclasses.replace(here, gpus=False))
    launcher().check(here)
    assert capsys.readouterr().err == ""


def test_a_long_name_fits() -> None:
    long = job()
    folder = long.folder.parent.with_name("digits_" * 20) / long.folder.name
    request = json.loads(launcher().render(Job("digits_" * 20, folder, long.script, root=long.root, code=long.code)))
    assert request["TrainingJobName"].endswith("-20260101-120000-0a1b2c3d")
    check_request("sagemaker", "CreateTrainingJob", request | {"TrainingJobName": request["TrainingJobName"] + "-99"})


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"region": "us-east-1a"}, r"launch\.region=us-east-1a .*; try launch\.region=us-east-1$"),
        ({"time": "30-00:00:00"}, r"launch\.time=30-00:00:00 is more than 28-00:00:00;"),
        ({"time": "0:00:00"}, r"launch\.time=0:00:00 is less than"),
        ({"spot": True, "max_wait": "soon"}, r"launch\.max_wait=soon is not a time limit"),
        ({"max_restarts": 31}, r"launch\.max_restarts=31 is more than 30; try launch\.max_restarts=30"),
        ({"disk_gb": 0}, r"launch\.disk_gb=0 is less than 1;"),
        ({"environment": {"API_KEY": "b"}}, r"launch\.environment\.API_KEY: secrets"),
        ({"extra": {"Environment": {"API_KEY": "b"}}}, r"launch\.extra\.Environment\.API_KEY: secrets"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}") as error:
        launcher(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "facts", "fault"),
    [
        ({"storage": None}, {}, r"launch\.storage: not set; .*s3://"),
        ({"storage": "gs://bucket/runs"}, {}, r"launch\.storage=gs://bucket/runs: .*s3://"),
        ({"storage": "/mnt/runs"}, {}, r"launch\.storage=/mnt/runs: .*s3://"),
        ({"role": None}, {}, r"launch\.role: not set; .*arn:aws:iam"),
        ({"max_wait": "2-00:00:00"}, {}, r"launch\.max_wait=2-00:00:00 .* set launch\.spot=true"),
        # "It must be equal to or greater than MaxRuntimeInSeconds":
        # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
        (
            {"spot": True, "time": "2:00:00", "max_wait": "1:59:59"},
            {},
            r"launch\.max_wait=1:59:59 is less than launch\.time=2:00:00, .*; try launch\.max_wait=2:00:00",
        ),
        ({"image": None}, {}, r"launch\.image: not set; push"),
        (
            {"instance_type": "ml.g5.12xlarge"},
            {"devices": 8},
            r"trainer\.devices=8: .*has 4 A10G; try trainer\.devices=4",
        ),
        ({"jupyter": True}, {"nodes": 2}, r"trainer\.num_nodes=2: .* set trainer\.num_nodes=1"),
        ({"instance_type": "ml.m5.xlarge"}, {}, r"launch\.instance_type=ml\.m5\.xlarge has no GPUs"),
    ],
    ids=str,
)
def test_jobs_are_checked(settings: dict[str, Any], facts: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{fault}") as error:
        launcher(**settings).check(job(tmp_path, **facts))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with aws_server() as variables:
        yield variables


@pytest.fixture
def requests(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Each request to SageMaker and CloudWatch as it leaves: the operation, and the body."""
    sent: list[tuple[str, dict[str, Any]]] = []
    make = aws.client

    def recorded(service: str, region: str | None) -> Any:
        client = make(service, region)
        if service != "sts":
            client.meta.events.register(
                "before-send",
                lambda request, **_: sent.append(
                    (request.headers["X-Amz-Target"].decode().partition(".")[2], json.loads(request.body))
                ),
            )
        return client

    monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])
    monkeypatch.setattr(aws, "client", recorded)
    return sent


def write_job(root: Path, text: str) -> tuple[Job, Path]:
    submitted = job(root)
    submitted.folder.mkdir(parents=True)
    file = submitted.folder / "job.json"
    file.write_text(text)
    return submitted, file


def test_the_job_file_is_what_is_sent(requests: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    text = render("sagemaker_spot")
    own = launcher()
    own.check_credentials()
    arn = own.create(*write_job(tmp_path, text))
    assert arn == ARN
    assert requests == [("CreateTrainingJob", json.loads(text))]
    # moto's jobs are complete at once.
    assert own.status(arn) == (status := own.status(arn))
    assert (status.state, status.text) == ("ended", f"training job {NAME}, Completed")
    own.cancel(arn)  # which has ended
    assert {name for name, _ in requests[1:]} == {"DescribeTrainingJob"}
    missing = launcher().status(ARN + "0")
    assert (missing.state, missing.text) == ("unknown", f"training job {NAME}0: not found in us-east-1")


def test_jupyterlab_is_reached_by_a_session_of_systems_manager(answers: AwsAnswers, tmp_path: Path) -> None:
    own = launcher(jupyter=True)
    answers.replies = [(200, {"TrainingJobArn": ARN}), described("InProgress", "Starting"), described("Stopped")]
    own.create(*write_job(tmp_path, render("sagemaker_jupyter")))
    assert answers.requests[0][1]["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    session = f"aws ssm start-session --target sagemaker-training-job:{NAME}_algo-1 --region us-east-1 "
    assert session in own.status(ARN).text  # which is printed after the submission, too
    assert "ssm" not in own.status(ARN).text


def test_the_output_of_all_instances_is_read_from_cloudwatch(
    requests: list[tuple[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, client = launcher(), aws.client("logs", "us-east-1")
    monkeypatch.setattr(cloud, "DELAY", 0)
    monkeypatch.setattr(stored_runs, "read", lambda place, start=0: b"from the storage\n"[start:])
    arn = own.create(*write_job(tmp_path, render("sagemaker")))
    assert "".join(own.logs(arn, tmp_path / "digits" / "id", follow=True)) == "from the storage\n"
    group, now = "/aws/sagemaker/TrainingJobs", int(time.time() * 1000)
    client.create_log_group(logGroupName=group)
    lines = {f"{NAME}/algo-1-1700": ["Epoch 0", "Epoch 1\n"], f"{NAME}/algo-2-1700": ["ready"]}
    for stream, messages in lines.items():
        client.create_log_stream(logGroupName=group, logStreamName=stream)
        events = [{"timestamp": now + number, "message": message} for number, message in enumerate(messages)]
        client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
    found = "".join(own.logs(arn, tmp_path / "digits" / "id", follow=False))
    assert sorted(found.splitlines()) == ["Epoch 0", "Epoch 1", "[algo-2] ready"]
    (query,) = [body for operation, body in requests[-2:] if operation == "FilterLogEvents"]
    assert query == {"logGroupName": group, "logStreamNamePrefix": f"{NAME}/algo-", "startTime": 0}


Answer = tuple[int, dict[str, Any]]
IN_USE = (400, {"__type": "ResourceInUse", "message": "Training job names must be unique within an AWS account"})
NOT_FOUND = (400, {"__type": "ValidationException", "message": "Requested resource not found."})
BUSY = (400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
SILENT = (0, {})  # no answer


def described(primary: str, secondary: str = "", reason: str = "", bucket: str = "bucket") -> Answer:
    return 200, {
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/runs/digits/{NAME.removeprefix('digits-')}/sagemaker"},
        "TrainingJobArn": ARN,
        "TrainingJobName": NAME,
        "TrainingJobStatus": primary,
        "SecondaryStatus": secondary or primary,
        "FailureReason": reason,
    }


@pytest.fixture(scope="module")
def answering() -> Iterator[AwsAnswers]:
    with aws_answers() as server:
        server.client = functools.cache(aws.client)  # as new clients are slow
        yield server


@pytest.fixture
def answers(answering: AwsAnswers, monkeypatch: pytest.MonkeyPatch) -> AwsAnswers:
    monkeypatch.setitem(aws.LIMITS, "read_timeout", 0.3)
    monkeypatch.setitem(aws.LIMITS, "retries", {"mode": "standard", "total_max_attempts": 1})
    monkeypatch.setenv("AWS_ENDPOINT_URL", answering.url)
    monkeypatch.setattr(aws, "client", answering.client)
    answering.replies, answering.requests = [], []
    return answering


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        # The answer to the first attempt was lost.
        ([IN_USE, described("InProgress")], ARN),
        ([SILENT, described("InProgress")], ARN),
    ],
    ids=["lost", "silent"],
)
def test_a_job_is_created_once(answers: AwsAnswers, replies: list[Answer], expected: str, tmp_path: Path) -> None:
    answers.replies = list(replies)
    assert launcher().create(*write_job(tmp_path, render("sagemaker"))) == expected
    names = [body["TrainingJobName"] for operation, body in answers.requests if operation == "CreateTrainingJob"]
    assert names == [NAME]
    assert not answers.replies


@pytest.mark.parametrize(
    ("replies", "kind", "fault"),
    [
        (
            [(400, {"__type": "ResourceLimitExceeded", "message": "The account-level limit is 0 Instances."})],
            ValueError,
            r"CreateTrainingJob .*limit is 0 Instances\.?\); request a higher quota",
        ),
        ([(400, {"__type": "AccessDeniedException", "message": "no iam:PassRole"})], ValueError, "PassRole.*; ask for"),
        ([(400, {"__type": "ExpiredTokenException", "message": "expired"})], ValueError, "`aws sso login`"),
        ([BUSY], ValueError, "Rate exceeded.*; try again"),
        ([SILENT, NOT_FOUND], NoAnswerError, "does not respond"),
        ([SILENT, SILENT], NoAnswerError, "does not respond"),
        ([IN_USE, BUSY], ValueError, "Rate exceeded"),
        ([IN_USE, described("Stopped")], ValueError, "must be unique"),
        ([IN_USE, described("InProgress", bucket="another")], ValueError, "must be unique"),
    ],
    ids=["quota", "permission", "expired", "busy", "silent", "unclear", "in-use", "name", "another"],
)
def test_a_job_that_is_not_created(
    answers: AwsAnswers, replies: list[Answer], kind: type[Exception], fault: str, tmp_path: Path
) -> None:
    answers.replies = list(replies)
    with pytest.raises(ValueError, match=fault) as error:
        launcher().create(*write_job(tmp_path, render("sagemaker")))
    assert isinstance(error.value, kind)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "state", "text"),
    [
        (described("InProgress", "Pending"), "pending", "InProgress (Pending)"),
        (described("InProgress", "Training"), "running", "InProgress (Training)"),
        (described("InProgress", "Interrupted"), "pending", "InProgress (Interrupted)"),
        (described("Stopping"), "running", "Stopping"),
        (described("Stopped", "MaxRuntimeExceeded"), "ended", "Stopped (MaxRuntimeExceeded)"),
        (described("Failed", "", "AlgorithmError:\n exit code 1"), "ended", "Failed: AlgorithmError: exit code 1"),
        (NOT_FOUND, "unknown", ""),
    ],
    ids=["pending", "running", "interrupted", "stopping", "time", "failed", "unknown"],
)
def test_the_status_is_in_the_words_of_sagemaker(answers: AwsAnswers, answer: Answer, state: str, text: str) -> None:
    answers.replies = [answer]
    status = launcher(region="eu-west-1", image=None).status(ARN)
    assert status.state == state
    assert status.text.endswith(text)
    assert "\n" not in status.text
    assert answers.requests == [("DescribeTrainingJob", {"TrainingJobName": NAME})]


def test_the_output_is_followed_over_interruptions(
    answers: AwsAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cloud, "DELAY", 0)
    monkeypatch.setattr(stored_runs, "POLL_SECONDS", 0)
    running, now = described("InProgress", "Training"), int(time.time() * 1000)
    events = [
        {"eventId": str(number), "timestamp": now, "message": f"Epoch {number}", "logStreamName": f"{NAME}/algo-1-17"}
        for number in range(3)
    ]
    missing = (400, {"__type": "ResourceNotFoundException", "message": "The specified log group does not exist."})
    answers.replies = [running, missing, running, (200, {"events": events[:2]}), BUSY, BUSY, running, SILENT]
    answers.replies += [described("Completed"), (200, {"events": events[1:], "nextToken": "a"}), (200, {"events": []})]
    assert "".join(launcher().logs(ARN, tmp_path, follow=True)) == "Epoch 0\nEpoch 1\nEpoch 2\n"
    assert capsys.readouterr().err.count("note: AWS ") == 1
    assert not answers.replies


def test_a_running_job_is_stopped(answers: AwsAnswers) -> None:
    answers.replies = [described("InProgress", "Training"), (200, {})]
    launcher().cancel(ARN)
    assert answers.requests[1:] == [("StopTrainingJob", {"TrainingJobName": NAME})]
    with pytest.raises(ValueError, match=r"^record\.json has the job id --help"):
        launcher().cancel("--help")
