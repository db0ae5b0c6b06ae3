"""Custom jobs of Vertex AI, against a server that answers as Google's does; gcloud's own client takes the same file."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import yaml
from conftest import environment, require
from fsspec.registry import _registry
from gcsfs.core import GCSFileSystem
from object_storage import google_storage

from boltcutter.checkpoint.find import find_newest
from boltcutter.launch import rest_api
from boltcutter.launch.cloud import vertex
from boltcutter.launch.cloud.machines import find_machine, read_machines
from boltcutter.launch.cloud.vertex import STATES, VertexLauncher, log_entries
from boltcutter.launch.job import Job, UnclearSubmissionError, UnreachableError

from ..google_server import NO_ANSWER, GoogleServer, error, google_server
from ..test_cloud_job import write_run

JOBS = Path(__file__).with_name("jobs")
JOB = Job(
    "digits", Path("/project/runs/digits/20261122-120000-1a2b3c4d"), None, devices=2, gpus=True, digests=("0" * 32,)
)
ON_CPU = replace(JOB, devices=1, gpus=False)
PLACE = {"project": "my-project", "region": "us-central1"}
SETTINGS = PLACE | {"storage": "gs://bucket/runs", "image": "us-docker.pkg.dev/my-project/r/boltcutter:1"}
G2 = SETTINGS | {"machine_type": "g2-standard-24"}
N1 = SETTINGS | {"machine_type": "n1-standard-8", "gpu_type": "NVIDIA_TESLA_T4"}
EVERYTHING = G2 | {
    "spot": True,
    "time": "1-12:00:00",
    "service_account": "train@my-project.iam.gserviceaccount.com",
    "extra": {"network": "projects/123/global/networks/private"},
    "disk_gb": 200,
    "tags": {"team": "vision", "empty": ""},
    "environment": {"NCCL_DEBUG": "INFO", "EMPTY": ""},
    "python": "/opt/venv/bin/python",
}
RENDERED: dict[str, tuple[dict[str, Any], Job]] = {
    "vertex.yaml": (EVERYTHING, replace(JOB, nodes=4)),
    "vertex-cpu.yaml": (SETTINGS | {"machine_type": "n2-standard-8", "max_restarts": 0}, ON_CPU),
    "vertex-wait.yaml": (SETTINGS | {"machine_type": "a2-highgpu-2g", "max_wait": "2:00:00"}, JOB),
    "vertex-reserved.yaml": (
        SETTINGS | {"machine_type": "a3-highgpu-2g", "reservation": "projects/p/zones/us-central1-a/reservations/gpus"},
        JOB,
    ),
}
RESERVATION = "projects/my-project/zones/us-central1-a/reservations/gpus"
NAME = "projects/123/locations/us-central1/customJobs/42"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    with google_server(tmp_path) as (found, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return write_run(tmp_path / "project", replace(JOB, nodes=2))


@pytest.mark.parametrize("name", RENDERED)
def test_the_job_file(name: str) -> None:
    settings, rendered = RENDERED[name]
    assert VertexLauncher(**settings).render(rendered) == (JOBS / name).read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"region": "us-central1-a"},
            "launch.region=us-central1-a is a zone, not a region; try launch.region=us-central1",
        ),
        ({"region": "Iowa"}, "launch.region=Iowa is not a region; try launch.region=us-central1"),
        ({"project": "My Project"}, "launch.project=My Project is not a project ID; try launch.project=my-project"),
        ({"time": "90"}, "launch.time=90 is not a time limit; write H:MM:SS"),
        ({"max_wait": "1h"}, "launch.max_wait=1h is not a time limit; write H:MM:SS"),
        ({"spot": True, "max_wait": "1:00:00"}, "launch.max_wait: not possible with launch.spot=true; remove one"),
        # https://cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws
        ({"max_wait": "1:00:00", "time": "7-00:00:01"}, "launch.time=7-00:00:01: at most 7 days with launch.max_wait"),
        ({"max_wait": "1:00:00", "reservation": RESERVATION}, "launch.max_wait: not possible with launch.reservation"),
        # https://cloud.google.com/compute/docs/instances/reservations-consume#limitations
        ({"spot": True, "reservation": RESERVATION}, "launch.spot=true: not possible with launch.reservation; remove"),
        # https://cloud.google.com/vertex-ai/docs/reference/rest/v1/DiskSpec
        ({"disk_gb": 99}, "launch.disk_gb=99 is less than 100; try launch.disk_gb=100"),
        ({"image": "a\nb"}, "launch.image='a\\nb' has the control character"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: secrets must not be written"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="launch") as raised:
        VertexLauncher(**settings)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        (
            {"storage": None},
            {},
            "launch.storage: not set; give the parent URL of the runs, launch.storage=gs://<bucket>/runs",
        ),
        (
            {"storage": "az://a/runs"},
            {},
            "launch.storage=az://a/runs: the nodes cannot write there; use gs:// or s3://",
        ),
        ({"storage": "/shared/runs"}, {}, "launch.storage=/shared/runs: the nodes share no disk; use gs://"),
        (
            {"image": None},
            {},
            "launch.image: not set; give the image of the nodes, launch.image=us-central1-docker.pkg.dev/",
        ),
        ({"machine_type": None}, {}, "launch.machine_type: not set; try launch.machine_type=g2-standard-8"),
        (
            {"machine_type": None},
            {"gpus": False},
            "launch.machine_type: not set; try launch.machine_type=n2-standard-8",
        ),
        (
            {},
            {"devices": 3},
            "trainer.devices=3: launch.machine_type=g2-standard-24 has 2 NVIDIA_L4; try trainer.devices=2",
        ),
        (
            {"machine_type": "n2-standard-8"},
            {},
            "launch.machine_type=n2-standard-8 has no GPUs; choose one with GPUs, or ",
        ),
        (
            {"machine_type": "n1-standard-8"},
            {},
            "launch.machine_type=n1-standard-8 has no GPUs; choose one with GPUs, or ",
        ),
        (
            {"gpu_type": "NVIDIA_TESLA_T4"},
            {},
            "launch.gpu_type=NVIDIA_TESLA_T4: only for n1 machines of runs that use GPUs; remove it",
        ),
        # https://cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws lists the GPUs
        (N1 | {"max_wait": "1:00:00"}, {}, "launch.max_wait: not possible with NVIDIA_TESLA_T4; remove it, or choose "),
        (N1, {"devices": 3}, "trainer.devices=3: n1-standard-8 takes 1, 2, 4 NVIDIA_TESLA_T4; try one"),
        (
            N1,
            {"gpus": False},
            "launch.gpu_type=NVIDIA_TESLA_T4: only for n1 machines of runs that use GPUs; remove it",
        ),
    ],
)
def test_jobs_that_do_not_fit_are_refused(
    job: Job, settings: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"launch|trainer") as raised:
        VertexLauncher(**G2 | settings).check(replace(job, **changed))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_values_of_variables_are_not_expanded() -> None:
    # https://cloud.google.com/vertex-ai/docs/reference/rest/v1/EnvVar: "escaped with a double $$, ie: $$(VAR_NAME)"
    text = VertexLauncher(**G2 | {"environment": {"A": "$(HOME) $HOME"}}).render(JOB)
    assert yaml.safe_load(text)["workerPoolSpecs"][0]["containerSpec"]["env"] == [
        {"name": "A", "value": "$$(HOME) $HOME"}
    ]


def test_the_project_and_the_region_are_required(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project", "region"):
        monkeypatch.delenv(variable := f"GOOGLE_CLOUD_{name.upper()}", raising=False)
        with pytest.raises(ValueError, match=rf"^launch\.{name}: not set; .*{variable}="):
            VertexLauncher(**G2 | {name: None}).check(job)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "other")
    monkeypatch.setenv("GOOGLE_CLOUD_REGION", "europe-west4")
    launcher = VertexLauncher(**G2 | {"project": None, "region": None})
    launcher.check(job)
    assert "--project=other --region=europe-west4 " in launcher.render(job)


@pytest.mark.parametrize(("machine", "gpus"), [("a3-highgpu-8g", 8), ("g2-standard-4", 1), ("z9-future", 2)])
def test_machines_have_all_of_their_gpus(job: Job, machine: str, gpus: int) -> None:
    fitting = replace(job, devices=min(2, gpus))
    settings = {"machine_type": machine, "gpu_type": None if find_machine("vertex", machine) else "NVIDIA_NEW"}
    launcher = VertexLauncher(**G2 | settings)
    launcher.check(fitting)
    pools = yaml.safe_load(launcher.render(fitting))["workerPoolSpecs"]
    assert [pool["machineSpec"]["acceleratorCount"] for pool in pools] == [gpus, gpus]


@pytest.fixture(scope="module")
def storage() -> Iterator[dict[str, str]]:
    with google_storage() as env:
        yield env


@pytest.fixture
def bucket(storage: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, as a file system of fsspec."""
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    # As with the variable, which is read when gcsfs is imported.
    monkeypatch.setitem(_registry, "gs", GCSFileSystem)
    GCSFileSystem.clear_instance_cache()
    found = fsspec.filesystem("gs")
    yield found
    for path in found.find("bucket"):
        found.rm_file(path)


def test_checkpoints_on_cloud_storage_are_found(bucket: Any, tmp_path: Path) -> None:
    assert find_newest("gs://bucket/runs/digits/one/checkpoints") is None
    torch.save({"state_dict": {}, "global_step": 1}, tmp_path / "last.ckpt")
    bucket.put_file(str(tmp_path / "last.ckpt"), "bucket/runs/digits/one/checkpoints/last.ckpt")
    place = "gs://bucket/runs/digits/one/checkpoints"
    assert find_newest(place) == f"{place}/last.ckpt"


def test_the_job_is_checked_and_rendered_without_googles_packages(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("google", "google.auth", "gcsfs", "requests"):
        monkeypatch.setitem(sys.modules, name, None)
    launcher = VertexLauncher(**EVERYTHING)
    launcher.check(job)
    assert launcher.render(job)
    with pytest.raises(ValueError, match=r"^launch=vertex: google-auth is not installed; pip install "):
        launcher.check_credentials()


def submit(job: Job, **settings: Any) -> str:
    """Check, render and submit a job, as the launch command does."""
    launcher = VertexLauncher(**EVERYTHING | settings)
    launcher.check(job)
    file = job.folder / launcher.job_file
    file.write_text(launcher.render(job))
    (found,) = launcher.submit(job, file)
    return found


def test_a_job_is_created_with_the_content_of_its_file(server: GoogleServer, bucket: Any, job: Job) -> None:
    path = "/v1/projects/my-project/locations/us-central1/customJobs"
    server.answers[f"POST {path}"] = [(200, {"name": NAME, "state": "JOB_STATE_PENDING"})]
    assert submit(job) == NAME
    (request,) = server.requests
    remote = "gs://bucket/runs/digits/one"
    command = [
        "/opt/venv/bin/python",
        "-m",
        "boltcutter.launch.node",
        remote,
        "trust=sha256:00000000000000000000000000000000",
    ]
    variables = [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "EMPTY", "value": ""}]
    pool = {
        "machineSpec": {"machineType": "g2-standard-24", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 2},
        "replicaCount": 1,
        "diskSpec": {"bootDiskSizeGb": 200},
    }
    container = {"imageUri": "us-docker.pkg.dev/my-project/r/boltcutter:1", "command": command, "env": variables}
    spec = {
        "workerPoolSpecs": [{**pool, "containerSpec": container}] * 2,
        "scheduling": {"timeout": "129600s", "restartJobOnWorkerRestart": True, "strategy": "SPOT"},
        "serviceAccount": "train@my-project.iam.gserviceaccount.com",
        "network": "projects/123/global/networks/private",
    }
    body = {"displayName": "digits", "jobSpec": spec, "labels": {"team": "vision", "empty": ""}}
    assert request == ("POST", path, body, "t")
    sent = [f"bucket/runs/digits/one/{name}" for name in ("job.tar.gz", "job.yaml", "record.json")]
    assert bucket.find("bucket") == sent
    assert yaml.safe_load(bucket.cat_file(sent[1])) == spec


def test_a_rejected_job_is_one_line_and_an_unclear_one_may_run(
    server: GoogleServer, bucket: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "POST /v1/projects/my-project/locations/us-central1/customJobs"
    server.answers[name] = [(429, error(429, "RESOURCE_EXHAUSTED", "Quota custom_model_training_nvidia_l4_gpus is 0."))]
    with pytest.raises(ValueError, match=r"^launch=vertex: 429 RESOURCE_EXHAUSTED: Quota custom.* is 0; request more"):
        submit(job)
    monkeypatch.setattr(rest_api, "TIMEOUT", 0.5)
    for answer in ((NO_ANSWER, None), (504, "")):  # a gateway may give up on a request that has an effect
        server.answers[name] = [answer]
        with pytest.raises(
            UnclearSubmissionError, match=r"may have been submitted: .*gcloud ai custom-jobs list --project=my-p"
        ):
            submit(job)


def test_nothing_is_sent_without_credentials(
    server: GoogleServer, bucket: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    with pytest.raises(
        ValueError, match=r"^launch=vertex: no valid credentials .*; run gcloud auth application-default"
    ):
        submit(job)
    assert not server.requests
    assert not bucket.find("bucket")


def test_the_status_is_that_of_the_api(server: GoogleServer) -> None:
    launcher = VertexLauncher(**PLACE | {"region": "europe-west4"})  # the job knows its own region
    running = [f"JOB_STATE_{name}" for name in ("RUNNING", "UPDATING", "PAUSED", "CANCELLING", "UNSPECIFIED")]
    states = {**STATES, **dict.fromkeys(running, "running")}
    server.answers[f"GET /v1/{NAME}"] = [(200, {"name": NAME, "state": state}) for state in states]
    for state, meaning in states.items():
        assert launcher.status(NAME) == vertex.Status(meaning, f"job 42, {state}")
    failed = {"state": "JOB_STATE_FAILED", "error": {"code": 3, "message": "The replica\nworkerpool0-0 exited with 1."}}
    server.answers[f"GET /v1/{NAME}"] = [(200, failed)]
    assert launcher.status(NAME).text == "job 42, JOB_STATE_FAILED (The replica workerpool0-0 exited with 1.)"
    server.answers[f"GET /v1/{NAME}"] = [(200, {"state": "JOB_STATE_NEW"}), (503, "")]
    assert launcher.status(NAME).state == "running"
    with pytest.raises(UnreachableError, match="503"):
        launcher.status(NAME)
    assert {request.method for request in server.requests} == {"GET"}
    assert len(server.tokens) == 1


def test_a_job_is_cancelled(server: GoogleServer) -> None:
    server.answers[f"POST /v1/{NAME}:cancel"] = [(200, {})]
    VertexLauncher().cancel(NAME)
    assert server.requests == [("POST", f"/v1/{NAME}:cancel", {}, "t")]


@pytest.mark.parametrize(
    "job_id", ["42", f"{NAME}/../../x", NAME.replace("us-central1", "evil.example/"), f"{NAME}:cancel"]
)
def test_malformed_job_ids_are_refused(job_id: str) -> None:
    for query in (VertexLauncher().cancel, VertexLauncher().status):
        with pytest.raises(ValueError, match=r"^record\.json has the job id .*; correct it"):
            query(job_id)


def entry(number: int, second: int, task: str = "workerpool0-0", **payload: Any) -> dict[str, Any]:
    # https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry
    resource = {"type": "ml_job", "labels": {"task_name": task, "job_id": "42"}}
    stamp = f"2026-11-22T12:00:{second:02}.123456789Z"
    return {"insertId": str(number), "timestamp": stamp, "resource": resource, **payload}


def test_the_log_has_the_output_of_all_nodes_once(
    server: GoogleServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("boltcutter.launch.job.time", SimpleNamespace(sleep=pauses.append))
    early = [
        entry(1, 20, "service", textPayload="Job is preparing.\n"),
        entry(2, 30, jsonPayload={"message": "a\nb\n"}),
    ]
    late = [entry(3, 25, "workerpool1-0", jsonPayload={"message": "c"}), early[1], entry(4, 40, jsonPayload={"x": 1})]
    server.answers["POST /v2/entries:list"] = [(200, {"entries": found}) for found in (early, [], late)]
    server.answers["POST /v2/entries:list"].insert(1, (503, ""))  # the job is not affected
    states = ["JOB_STATE_RUNNING", "JOB_STATE_RUNNING", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    server.answers[f"GET /v1/{NAME}"] = [(200, {"state": state}) for state in states]
    lines = "".join(VertexLauncher().logs(NAME, Path("runs/x"), follow=True)).splitlines()
    assert lines == [
        "service: Job is preparing.",
        "workerpool0-0: a",
        "workerpool0-0: b",
        "workerpool1-0: c",
        "workerpool0-0: ",
    ]
    bodies = [request.body for request in server.requests if request.method == "POST"]
    assert {body["resourceNames"][0] for body in bodies} == {"projects/123"}
    of_job = 'resource.type="ml_job" AND resource.labels.job_id="42"'
    times = [body["filter"].removeprefix(f"{of_job} AND timestamp>=") for body in bodies]
    assert times == ['"1970-01-01T00:00:00Z"', *['"2026-11-22T11:59:30Z"'] * 3]
    assert capsys.readouterr().err.startswith("note: launch=vertex: 503 ")
    assert min(pauses[:3]) >= 15  # a project may read 60 times a minute: https://cloud.google.com/logging/quotas


def test_the_log_so_far_needs_no_status(server: GoogleServer) -> None:
    server.answers["POST /v2/entries:list"] = [(200, {"entries": [entry(1, 1, textPayload="a")]})]
    assert list(VertexLauncher().logs(NAME, Path("runs/x"), follow=False)) == ["workerpool0-0: a\n"]
    assert len(server.requests) == 1


def test_without_permission_the_log_is_that_of_the_storage(
    server: GoogleServer, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["POST /v2/entries:list"] = [(403, error(403, "PERMISSION_DENIED", "Denied."))]
    bucket.pipe_file("bucket/runs/digits/one/logs/rank-0.log", b"training\n")
    launcher = VertexLauncher(**SETTINGS)
    assert "".join(launcher.logs(NAME, Path("runs/digits/one"), follow=False)) == "training\n"
    assert capsys.readouterr().err.startswith("note: launch=vertex: 403 PERMISSION_DENIED: Denied; ")


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_gcloud_sends_the_same_job(name: str, server: GoogleServer, tmp_path: Path) -> None:
    require("gcloud", install="https://cloud.google.com/sdk/docs/install")
    text = (JOBS / name).read_text()
    (command,) = re.findall(r"^#   (gcloud .*) --config=", text, re.M)
    answers = {"/v1/projects/my-project/locations/us-central1/customJobs": {"name": NAME}}
    server.answers |= {f"POST {path}?alt=json": [(200, answer)] for path, answer in answers.items()}
    (tmp_path / "token").write_text("t")
    env = {"CLOUDSDK_CONFIG": str(tmp_path / "gcloud")}
    env |= {"CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{server.url}/", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    env |= {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "token"), "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1"}
    arguments = [*command.split(), f"--config={JOBS / name}"]
    done = subprocess.run(arguments, env=environment(**env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (request,) = server.requests
    content = yaml.safe_load(text)
    for pool in content["workerPoolSpecs"]:
        pool["replicaCount"] = str(pool["replicaCount"])
    assert request.body["jobSpec"] == content
    assert request.body["displayName"] == "digits"
    assert request.body.get("labels", {}) == RENDERED[name][0].get("tags", {})


@pytest.mark.slow
def test_the_job_file_has_the_fields_of_the_api() -> None:
    require(package="google-cloud-aiplatform", install="pip install --no-deps google-cloud-aiplatform==2.7.0")
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    def parse(spec: dict[str, Any]) -> dict[str, Any]:
        message = json_format.ParseDict(spec, aiplatform_v1.CustomJobSpec.pb(aiplatform_v1.CustomJobSpec()))
        return json_format.MessageToDict(message)

    for name in RENDERED:
        content = yaml.safe_load((JOBS / name).read_text())
        found = parse(content)
        for pool in content["workerPoolSpecs"]:
            pool["replicaCount"] = str(pool["replicaCount"])
            for variable in pool["containerSpec"].get("env", ()):
                variable.update({key: text for key, text in list(variable.items()) if not text and variable.pop(key)})
        assert found == content
        content["workerPoolSpecs"][0]["imageUri"] = "x"
        with pytest.raises(json_format.ParseError, match="imageUri"):
            parse(content)
    known = aiplatform_v1.AcceleratorType.__members__.keys()
    assert read_machines("vertex")["gpus"].keys() | read_machines("vertex")["attachable"].keys() <= known
    states = {state for state in aiplatform_v1.JobState.__members__ if state != "JOB_STATE_UNSPECIFIED"}
    running = {f"JOB_STATE_{name}" for name in ("RUNNING", "CANCELLING", "PAUSED", "UPDATING")}
    assert STATES.keys() | running == states


def test_all_pages_of_a_log_are_read(server: GoogleServer) -> None:
    pages = [{"entries": [{"n": 1}], "nextPageToken": "p"}, {"nextPageToken": "q"}, {"entries": [{"n": 2}]}]
    server.answers["POST /v2/entries:list"] = [(200, page) for page in pages]
    assert list(log_entries(rest_api.connect_google(), "my-project", "a=b")) == [{"n": 1}, {"n": 2}]
    body = {"resourceNames": ["projects/my-project"], "filter": "a=b", "orderBy": "timestamp asc", "pageSize": 1000}
    assert [request.body for request in server.requests] == [body, body | {"pageToken": "p"}, body | {"pageToken": "q"}]
