"""Jobs of AWS Batch: what is sent, and what happens when AWS refuses or does not answer."""

import functools
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from boltcutter_cloud import aws, aws_batch
from boltcutter_cloud.aws_batch import AwsBatchLauncher
from boltcutter_launch.job import Job, NoAnswerError

from ..launch.aws_server import ACCOUNT, CREDENTIALS, AwsAnswers, aws_answers, check_request
from ..launch.test_library import git
from .golden import check_job_file

NUMBER = "0a1b2c3d-0000-1111-2222-333344445555"
ARN = f"arn:aws:batch:us-east-1:{ACCOUNT}:job/{NUMBER}"
SUBMITTED = (200, {"jobArn": ARN, "jobId": NUMBER, "jobName": "digits"})
SILENT: tuple[int, dict[str, Any]] = (0, {})
NO_JOBS: tuple[int, dict[str, Any]] = (200, {"jobSummaryList": []})
CLIENT = aws.client


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


def write_project(root: Path) -> Path:
    """Make a project with one file, which can be sent."""
    (root / "a.py").write_text("a = 1\n")
    git(root, "init", "-q")
    git(root, "add", "a.py")
    return root


NODES: dict[str, Any] = {"nodes": 4, "devices": 8, "trusted": True}
OF_NODES: dict[str, Any] = {
    **{"time": "2:00:00", "environment": {"NCCL_SOCKET_IFNAME": "eth0"}, "job_definition": "train:3"},
    "extra": {"shareIdentifier": "vision"},
}


def test_the_job_file() -> None:
    of_one = launcher(max_restarts=0, tags={"team": "vision"}).render(job(gpus=False))
    of_nodes = launcher(**OF_NODES).render(job(**NODES))
    check_job_file(of_one, "aws_batch.json")
    check_job_file(of_nodes, "aws_batch_nodes.json", "aws_batch.json")
    for text in (of_one, of_nodes):
        check_request("batch", "SubmitJob", json.loads(text))


def test_an_array_has_a_job_for_each_run(answers: AwsAnswers) -> None:
    """https://docs.aws.amazon.com/batch/latest/userguide/array_jobs.html: the jobs are <id>:<index>."""
    array, own = job(array_size=3), launcher(array="seed=1,2,3")
    request = json.loads(own.render(array))
    check_request("batch", "SubmitJob", request)
    assert request["arrayProperties"] == {"size": 3}
    name = array.folder.name
    assert request["containerOverrides"]["command"][3:5] == [
        f"s3://bucket/runs/digits/{name}/{name}-",
        "--index=AWS_BATCH_JOB_ARRAY_INDEX",
    ]
    assert own.remote_folder(array.run_folders[2]) == f"s3://bucket/runs/digits/{name}/{name}-2"
    one = own.array_id(ARN, 2)
    answers.replies = [(200, {"jobs": [{"status": "RUNNING"}]})]
    assert own.status(one).text == f"job {NUMBER}:2, RUNNING"
    assert answers.requests[0][1] == {"jobs": [f"{NUMBER}:2"]}


@pytest.mark.parametrize(
    ("size", "remedy"), [(1, "remove launch.array"), (2, ""), (10_000, ""), (10_001, "launch sev")]
)
def test_an_array_has_2_to_10000_jobs(size: int, remedy: str, tmp_path: Path) -> None:
    """https://docs.aws.amazon.com/batch/latest/APIReference/API_ArrayProperties.html."""
    array = job(write_project(tmp_path), array_size=size)
    if not remedy:
        launcher().check(array)
        return
    with pytest.raises(ValueError, match=rf"^launch\.array: {size} runs, but AWS Batch takes 2 to 10000; {remedy}"):
        launcher().check(array)


# What the documentation says of an attempt that ends, and whether another one starts.
# https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html
ENDS: list[tuple[dict[str, str], bool, bool]] = [
    ({"onExitCode": "0", "onReason": "", "onStatusReason": "Essential container in task exited"}, False, False),
    ({"onExitCode": "1", "onReason": "Error", "onStatusReason": "Essential container in task exited"}, False, True),
    ({"onExitCode": "2", "onReason": "Error", "onStatusReason": "Essential container in task exited"}, False, False),
    ({"onExitCode": "143", "onReason": "", "onStatusReason": "Essential container in task exited"}, True, True),
    ({"onExitCode": "", "onReason": "", "onStatusReason": "Host EC2 (instance i-1) terminated."}, True, True),
    ({"onExitCode": "", "onReason": "CannotPullContainerError", "onStatusReason": "Task failed"}, False, True),
]


@pytest.mark.parametrize(("end", "of_one", "of_nodes"), ENDS, ids=str)
def test_an_attempt_that_another_one_follows(end: dict[str, str], of_one: bool, of_nodes: bool) -> None:
    for facts, again in (({}, of_one), (NODES, of_nodes)):
        rules = json.loads(launcher().render(job(**facts)))["retryStrategy"]["evaluateOnExit"]
        matching = (
            rule["action"]
            for rule in rules
            if all(fnmatchcase(end[key], form) for key, form in rule.items() if key != "action")
        )
        assert (next(matching, "RETRY") == "RETRY") is again  # "if none match, the job is retried"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"region": "us-east-1a"}, r"launch\.region=us-east-1a .*; try launch\.region=us-east-1$"),
        ({"time": "0:00:30"}, r"launch\.time=0:00:30 .*try launch\.time=0:01:00"),
        ({"max_restarts": 10}, r"launch\.max_restarts=10 .*try launch\.max_restarts=9"),
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


def test_the_job_file_is_what_is_sent(answers: AwsAnswers, tmp_path: Path) -> None:
    answers.replies = [SUBMITTED]
    file = tmp_path / "job.json"
    file.write_text(text := launcher(**OF_NODES).render(job(**NODES)))
    assert launcher().create(job(nodes=4), file) == ARN
    assert answers.requests == [("/v1/submitjob", json.loads(text))]


@pytest.mark.parametrize(
    ("replies", "kind", "fault"),
    [
        (
            [(400, {"__type": "ClientException", "message": "JobQueue gpus not found."})],
            ValueError,
            "SubmitJob .*JobQueue gpus not found",
        ),
        (
            [SILENT, NO_JOBS, NO_JOBS],
            NoAnswerError,
            "AWS does not respond",
        ),
    ],
    ids=["queue", "silent"],
)
def test_a_job_that_is_not_created(
    answers: AwsAnswers,
    replies: list[Any],
    kind: type[Exception],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers.replies = list(replies)
    file = tmp_path / "job.json"
    file.write_text(launcher(**OF_NODES).render(job(**NODES)))
    monkeypatch.setattr(aws_batch, "FIND_SECONDS", (0, 0))
    with pytest.raises(ValueError, match=fault) as error:
        launcher().create(job(nodes=4), file)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)


def test_a_submission_without_an_answer_is_one_job(
    answers: AwsAnswers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # SubmitJob has no client token, and botocore repeats a request after a read time-out.
    monkeypatch.setitem(aws.LIMITS, "retries", {"mode": "standard", "total_max_attempts": 3})
    monkeypatch.setattr(aws_batch, "FIND_SECONDS", (0, 0))
    monkeypatch.setattr(aws, "client", CLIENT)
    file = tmp_path / "job.json"
    file.write_text(launcher(**OF_NODES).render(job(**NODES)))
    earlier = {"jobArn": ARN.replace("0a1b", "9999"), "status": "FAILED"}  # of the same run
    found = (200, {"jobSummaryList": [earlier, {"jobArn": ARN, "status": "SUBMITTED"}]})
    answers.replies = [SILENT, NO_JOBS, found]
    assert launcher().create(job(**NODES), file) == ARN
    paths = [path for path, _ in answers.requests]
    assert paths == ["/v1/submitjob", "/v1/listjobs", "/v1/listjobs"]
    name = json.loads(file.read_text())["jobName"]
    query = {"jobQueue": "gpus", "filters": [{"name": "JOB_NAME", "values": [name]}]}
    assert answers.requests[-1][1] == query
    check_request("batch", "ListJobs", query)


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


def test_the_status_has_the_reason_of_the_container(answers: AwsAnswers) -> None:
    reason, of_host = "OutOfMemoryError: Container killed due to memory usage", "Essential container in task exited"
    job = {"jobId": NUMBER, "status": "FAILED", "statusReason": of_host}
    answers.replies = [(200, {"jobs": [{**job, "container": {"reason": reason}}]})]
    assert launcher().status(ARN).text == f"job {NUMBER}, FAILED: {of_host}: {reason}"
    # Of several nodes, each is a job of its own: https://docs.aws.amazon.com/batch/latest/userguide/multi-node-job-env-vars.html
    answers.replies = [
        (200, {"jobs": [{**job, "nodeProperties": {"numNodes": 4, "mainNode": 0}}]}),
        (200, {"jobs": [{"jobId": f"{NUMBER}#0", "status": "FAILED", "container": {"reason": reason}}]}),
    ]
    assert launcher().status(ARN).text == f"job {NUMBER}, FAILED: {of_host}: {reason}"
    assert answers.requests[-1] == ("/v1/describejobs", {"jobs": [f"{NUMBER}#0"]})


def test_a_running_job_is_terminated(answers: AwsAnswers) -> None:
    answers.replies = [(200, {"jobs": [{"status": "RUNNING"}]}), (200, {}), (200, {"jobs": [{"status": "FAILED"}]})]
    launcher().cancel(ARN)
    assert answers.requests[1] == ("/v1/terminatejob", {"jobId": NUMBER, "reason": "canceled by the launcher"})
    launcher().cancel(ARN)
    assert len(answers.requests) == 3
    with pytest.raises(ValueError, match=r"^record\.json has the job id --help"):
        launcher().cancel("--help")
