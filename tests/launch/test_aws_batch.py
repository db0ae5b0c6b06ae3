"""Jobs of AWS Batch: what is sent, and what happens when AWS refuses or does not answer."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch import aws
from boltcutter.launch.aws_batch import AwsBatchLauncher
from boltcutter.launch.job import Job, UnclearSubmissionError

from .aws_server import ACCOUNT, CREDENTIALS, AwsAnswers, aws_answers, check_request

JOBS = Path(__file__).with_name("jobs")
NUMBER = "0a1b2c3d-0000-1111-2222-333344445555"
ARN = f"arn:aws:batch:us-east-1:{ACCOUNT}:job/{NUMBER}"
SUBMITTED = (200, {"jobArn": ARN, "jobId": NUMBER, "jobName": "digits"})
SILENT: tuple[int, dict[str, Any]] = (0, {})


@pytest.fixture(scope="module")
def answering() -> Iterator[AwsAnswers]:
    with aws_answers() as server:
        server.client = functools.cache(aws.client)  # as new clients are slow
        yield server


@pytest.fixture
def answers(answering: AwsAnswers, monkeypatch: pytest.MonkeyPatch) -> AwsAnswers:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(aws.LIMITS, "read_timeout", 0.3)
    monkeypatch.setitem(aws.LIMITS, "retries", {"mode": "standard", "total_max_attempts": 1})
    monkeypatch.setenv("AWS_ENDPOINT_URL", answering.url)
    monkeypatch.setattr(aws, "client", answering.client)
    answering.replies, answering.requests = [], []
    return answering


def launcher(**settings: Any) -> AwsBatchLauncher:
    return AwsBatchLauncher(**{"storage": "s3://bucket/runs", "queue": "gpus", "job_definition": "train"} | settings)


def job(root: Path = Path("/p"), **facts: Any) -> Job:
    folder = root / "runs" / "digits" / "20260101-120000-0a1b2c3d"
    facts = {"root": root, "code": folder / "code", "gpus": True} | facts
    return Job("digits", folder, folder / "code" / "scripts" / "train.py", **facts)


@pytest.mark.parametrize(
    ("name", "settings", "facts"),
    [
        ("aws_batch", {"max_restarts": 0, "tags": {"team": "vision"}}, {"gpus": False}),
        (
            "aws_batch_nodes",
            {"time": "2:00:00", "environment": {"NCCL_SOCKET_IFNAME": "eth0"}, "job_definition": "train:3"},
            {"nodes": 4, "devices": 8, "trusted": True},
        ),
    ],
)
def test_the_job_file(name: str, settings: dict[str, Any], facts: dict[str, Any]) -> None:
    text = launcher(**settings).render(job(**facts))
    assert text == (JOBS / f"{name}.json").read_text()
    check_request("batch", "SubmitJob", json.loads(text))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"region": "us-east-1a"}, r"launch\.region=us-east-1a .*; try launch\.region=us-east-1$"),
        ({"time": "0:00:30"}, r"launch\.time=0:00:30 .*try launch\.time=0:01:00"),
        ({"max_restarts": 10}, r"launch\.max_restarts=10 .*try launch\.max_restarts=9"),
        ({"queue": "a queue"}, r"launch\.queue=a queue "),
        ({"job_definition": "a:b"}, r"launch\.job_definition=a:b "),
        ({"queue": None}, r"launch\.queue: not set"),
        ({"job_definition": None}, r"launch\.job_definition: not set"),
        ({"storage": "/mnt/runs"}, r"launch\.storage=/mnt/runs: .*s3://"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{fault}") as error:
        launcher(**settings).check(job(tmp_path))
    assert "\n" not in str(error.value)


def definitions(kind: str) -> tuple[int, dict[str, Any]]:
    other = {"container": "multinode", "multinode": "container"}[kind]
    found = [{"type": kind, "revision": 10, "status": "ACTIVE"}, {"type": other, "revision": 9, "status": "ACTIVE"}]
    return 200, {"jobDefinitions": found}


@pytest.mark.parametrize(
    ("given", "query"),
    [
        ("train", {"jobDefinitionName": "train"}),
        ("train:3", {"jobDefinitions": ["train:3"]}),
    ],
)
def test_the_job_file_is_what_is_sent(answers: AwsAnswers, given: str, query: dict[str, Any], tmp_path: Path) -> None:
    answers.replies = [definitions("multinode"), SUBMITTED]
    text = (JOBS / "aws_batch_nodes.json").read_text()
    file = tmp_path / "job.json"
    file.write_text(text)
    assert launcher(job_definition=given).create(job(nodes=4), file) == ARN
    described, submitted = answers.requests
    assert described == ("/v1/describejobdefinitions", {**query, "status": "ACTIVE"})
    assert submitted == ("/v1/submitjob", json.loads(text))


@pytest.mark.parametrize(
    ("replies", "kind", "fault"),
    [
        ([definitions("container")], ValueError, "is of type container, but trainer.num_nodes=4 needs multinode"),
        ([(200, {"jobDefinitions": []})], ValueError, "launch.job_definition=train does not exist in us-east-1"),
        (
            [definitions("multinode"), (400, {"__type": "ClientException", "message": "JobQueue gpus not found."})],
            ValueError,
            "SubmitJob .*JobQueue gpus not found",
        ),
        ([definitions("multinode"), SILENT], UnclearSubmissionError, "is in the queue before you launch again"),
    ],
    ids=["type", "definition", "queue", "silent"],
)
def test_a_job_that_is_not_created(
    answers: AwsAnswers, replies: list[Any], kind: type[Exception], fault: str, tmp_path: Path
) -> None:
    answers.replies = list(replies)
    file = tmp_path / "job.json"
    file.write_text((JOBS / "aws_batch_nodes.json").read_text())
    with pytest.raises(ValueError, match=fault) as error:
        launcher().create(job(nodes=4), file)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "reason", "state"),
    [
        ("RUNNABLE", "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - none", "pending"),
        ("RUNNING", "", "running"),
        ("SUCCEEDED", "Essential container in task exited", "ended"),
        ("FAILED", "Host EC2 (instance i-1)\n terminated.", "ended"),
    ],
)
def test_the_status_is_in_the_words_of_batch(answers: AwsAnswers, status: str, reason: str, state: str) -> None:
    found = {"jobId": NUMBER, "jobName": "digits", "status": status, "statusReason": reason}
    answers.replies = [(200, {"jobs": [found]}), (200, {"jobs": []})]
    shown = launcher(region="eu-west-1").status(ARN)
    assert (shown.state, shown.text) == (
        state,
        f"job {NUMBER}, {status}{': ' * bool(reason)}{' '.join(reason.split())}",
    )
    assert answers.requests == [("/v1/describejobs", {"jobs": [NUMBER]})]
    assert launcher().status(ARN).state == "unknown"


def test_a_running_job_is_terminated(answers: AwsAnswers) -> None:
    answers.replies = [(200, {"jobs": [{"status": "RUNNING"}]}), (200, {}), (200, {"jobs": [{"status": "FAILED"}]})]
    launcher().cancel(ARN)
    assert answers.requests[1] == ("/v1/terminatejob", {"jobId": NUMBER, "reason": "canceled by the launcher"})
    launcher().cancel(ARN)
    assert len(answers.requests) == 3
    with pytest.raises(ValueError, match=r"^record\.json has the job id --help"):
        launcher().cancel("--help")
