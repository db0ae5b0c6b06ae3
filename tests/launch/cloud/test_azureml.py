"""Command jobs of Azure Machine Learning, sent by the real client to a server that answers as Azure does."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from conftest import STATE, environment, require
from isodate import parse_duration
from slurm_cluster import Launch

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_newest
from boltcutter.launch import rest_api
from boltcutter.launch.cloud import azureml
from boltcutter.launch.cloud.azureml import STATES, AzureMLLauncher, request_body
from boltcutter.launch.cloud_job import next_name
from boltcutter.launch.job import Job, Status, UnclearSubmissionError, UnreachableError

from ..azure_server import WORKSPACE, BlobStorage, ResourceManager, azure, clean_environment
from ..test_cloud_job import write_run
from ..test_library import read_record

JOBS = Path(__file__).with_name("jobs")
JOB = Job(
    "digits", Path("/project/runs/digits/20261122-120000-1a2b3c4d"), None, devices=2, gpus=True, digests=("0" * 32,)
)
PLACE = dict(zip(azureml.WORKSPACE, WORKSPACE.split("/")[2::2], strict=False))
PLACE["workspace"] = "workspace"
SETTINGS = PLACE | {"storage": "abfss://models@account.dfs.core.windows.net/runs", "image": "registry.example.com/p:1"}
CLUSTER = SETTINGS | {
    "compute": "gpu-cluster",
    "inputs": {"images": "azureml://datastores/workspaceblobstore/paths/images"},
    "shm_size": "64g",
    "time": "1-12:00:00",
    "tags": {"team": "vision"},
    "environment": {"NCCL_DEBUG": "INFO", "EMPTY": ""},
    "python": "/opt/venv/bin/python",
}
SERVERLESS = SETTINGS | {"instance_type": "Standard_NC48ads_A100_v4", "spot": True, "image": "azureml:train:3"}
RENDERED: dict[str, tuple[dict[str, Any], Job]] = {
    "azureml.yaml": (CLUSTER, replace(JOB, nodes=4)),
    "azureml_serverless.yaml": (SERVERLESS, JOB),
    "azureml_jupyter.yaml": (SERVERLESS | {"jupyter": True, "spot": False}, JOB),
}
PATH = f"{WORKSPACE}/jobs/digits-one"
RUNNING = ("Running", "Paused", "NotResponding", "CancelRequested", "Finalizing", "Unknown", "New")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ResourceManager, BlobStorage]]:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    with azure(tmp_path) as (manager, storage):
        for name, value in {**manager.env, **storage.env()}.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("abfss").clear_instance_cache()  # those of servers of other tests
        yield manager, storage


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return write_run(tmp_path / "project", replace(JOB, nodes=2))


def cluster(nodes: int = 4, size: str = "STANDARD_NC48ADS_A100_V4") -> dict[str, Any]:
    # https://learn.microsoft.com/rest/api/azureml/compute/get#amlcompute
    return {"computeType": "AmlCompute", "properties": {"vmSize": size, "scaleSettings": {"maxNodeCount": nodes}}}


def submit(server: ResourceManager, job: Job, settings: dict[str, Any]) -> str:
    """Check, render and submit a job, as the launch command does."""
    launcher = AzureMLLauncher(**settings, resource_manager=server.url)
    launcher.check(job)
    file = job.folder / launcher.job_file
    file.write_text(launcher.render(job))
    (found,) = launcher.submit(job, file)
    return found


@pytest.mark.parametrize("name", RENDERED)
def test_the_job_file(name: str) -> None:
    settings, rendered = RENDERED[name]
    assert AzureMLLauncher(**settings).render(rendered) == (JOBS / name).read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": {"my-data": "azureml:x:1"}}, "launch.inputs.my-data: not a valid name; use letters, digits and _"),
        ({"shm_size": "16Gi"}, "launch.shm_size=16Gi is not a size with its unit; try launch.shm_size=16g"),
        ({"time": "90"}, "launch.time=90 is not a time limit; write H:MM:SS"),
        ({"tags": {"a": "b\n"}}, "launch.tags='b\\n' has the control character"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: secrets must not be written"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="launch") as raised:
        AzureMLLauncher(**settings)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"storage": None}, {}, "launch.storage: not set; give the parent URL of the runs, launch.storage=abfss://"),
        ({"storage": "s3://b/runs"}, {}, "launch.storage=s3://b/runs: the nodes cannot write there; use abfss:// or "),
        (
            {"storage": "az://models/runs"},
            {},
            "launch.storage=az://models/runs has no storage account; try launch.storage=abfss://models@<account>.dfs.",
        ),
        ({"image": None}, {}, "launch.image: not set; give the image of the nodes, launch.image="),
        ({"instance_type": None}, {}, "launch.compute: not set; give a cluster, or try launch.instance_type=St"),
        ({"instance_type": None}, {"gpus": False}, "launch.compute: not set; give a cluster, or try launch.inst"),
        ({"compute": "a/b"}, {}, "launch.compute=a/b is not a name in Azure; correct it"),
        ({"compute": "cc"}, {}, "launch.instance_type=Standard_NC48ads_A100_v4: set by launch.compute; remove one of"),
        ({"compute": "cc", "instance_type": None}, {}, "launch.spot=true: set by launch.compute; remove one of them"),
        ({"workspace": None}, {}, "launch.workspace: not set; give launch.workspace=…, or export AZURE_ML_WORKSPACE=…"),
        ({}, {"devices": 3}, "trainer.devices=3: launch.instance_type=Standard_NC48ads_A100_v4 has 2 A100; try"),
        ({"jupyter": True}, {"nodes": 2}, "trainer.num_nodes=2: launch.jupyter=true uses one machine; set trainer."),
        ({"instance_type": "standard_d8s_V5"}, {}, "launch.instance_type=standard_d8s_V5 has no GPUs; choose one with"),
    ],
)  # fmt: skip
def test_jobs_that_do_not_fit_are_refused(
    job: Job, settings: dict[str, Any], changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"launch|trainer") as raised:
        AzureMLLauncher(**SERVERLESS | settings).check(replace(job, **changed))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["größe", "-x", "数字", "a b/c"])
def test_the_name_of_the_experiment_is_valid(name: str) -> None:
    # https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command; letters are those of ASCII
    found = yaml.safe_load(AzureMLLauncher(**SERVERLESS).render(replace(JOB, name=name)))["experiment_name"]
    assert re.fullmatch("[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}", found)


def test_the_account_of_the_environment_is_that_of_the_nodes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    launcher = AzureMLLauncher(**SERVERLESS | {"storage": "az://models/runs"})
    launcher.check(job)
    variables = yaml.safe_load(launcher.render(job))["environment_variables"]
    assert variables == {"AZURE_STORAGE_ACCOUNT_NAME": "account"}


@pytest.mark.slow
def test_the_folder_of_an_input_is_set_in_the_job(
    servers: tuple[ResourceManager, BlobStorage], launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, _ = servers
    server.clusters["gpu-cluster"] = cluster()
    (tmp_path / "bin" / "git").symlink_to(str(shutil.which("git", path=os.defpath)))
    given = [f"launch.{name}={SETTINGS[name]}" for name in (*azureml.WORKSPACE, "storage", "image")]
    given += ["launch.compute=gpu-cluster", "launch.inputs={images: azureml:images:1}", f"folder={tmp_path}/run"]
    given += ["trainer.devices=1", "data=images", "data.folder=${oc.env:INPUT_IMAGES}"]
    out = launch("launch=azureml", f"launch.resource_manager={server.url}", *given)
    assert out.startswith("note: INPUT_IMAGES will be set only in the job, which then checks the configuration\n")
    (job,) = server.jobs.values()
    assert '; export INPUT_IMAGES="${{inputs.images}}"; exec ' in job["command"]
    assert job["environmentVariables"] == {"BOLTCUTTER_GPUS": "1"}
    assert read_record(tmp_path / "run")["config"]["data"]["folder"] == "${oc.env:INPUT_IMAGES}"


def test_a_job_is_created_with_the_content_of_its_file(servers: tuple[ResourceManager, BlobStorage], job: Job) -> None:
    server, storage = servers
    server.clusters["gpu-cluster"] = cluster()
    assert submit(server, job, CLUSTER) == PATH
    compute, environment, request = server.requests
    version = "?api-version=2024-10-01"
    assert compute == ("GET", f"{WORKSPACE}/computes/gpu-cluster{version}", None)
    environment_id = environment[1].removesuffix(version)
    assert environment_id.startswith(f"{WORKSPACE}/environments/CliV2AnonymousEnvironment/versions/")
    image = {"properties": {"image": "registry.example.com/p:1", "isAnonymous": True}}
    assert environment == ("PUT", f"{environment_id}{version}", image)
    remote = "abfss://models@account.dfs.core.windows.net/runs/digits/one"
    command = '[ -z "$DEFAULT_IDENTITY_CLIENT_ID" ] || export AZURE_CLIENT_ID="$DEFAULT_IDENTITY_CLIENT_ID"; '
    command += 'export INPUT_IMAGES="${{inputs.images}}"; '
    command += (
        f"exec /opt/venv/bin/python -m boltcutter.launch.node {remote} trust=sha256:00000000000000000000000000000000"
    )
    uri = "azureml://datastores/workspaceblobstore/paths/images"
    body = {
        "jobType": "Command",
        "displayName": "digits/one",
        "experimentName": "digits",
        "command": command,
        "environmentId": environment_id,
        "environmentVariables": {"NCCL_DEBUG": "INFO", "EMPTY": ""},
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 2},
        "resources": {"instanceCount": 2, "shmSize": "64g"},
        "limits": {"jobLimitsType": "Command", "timeout": "PT129600S"},
        "identity": {"identityType": "Managed"},
        "inputs": {"images": {"jobInputType": "uri_folder", "uri": uri, "mode": "ReadOnlyMount"}},
        "tags": {"team": "vision"},
        "computeId": f"{WORKSPACE}/computes/gpu-cluster",
    }
    assert request == ("PUT", f"{PATH}{version}", {"properties": body})
    sent = {name.removeprefix("models/runs/digits/one/") for name in storage.blobs}
    assert sent == {"job.tar.gz", "job.yaml", "record.json"}


def test_serverless_compute_has_a_tier_and_a_size(servers: tuple[ResourceManager, BlobStorage], job: Job) -> None:
    server, _ = servers
    submit(server, job, SERVERLESS)
    workspace, request = server.requests
    assert workspace == ("GET", f"{WORKSPACE}?api-version=2024-10-01", None)
    body = request[2]["properties"]
    assert body["environmentId"] == f"{WORKSPACE}/environments/train/versions/3"
    assert body["queueSettings"] == {"jobTier": "Spot"}
    assert body["resources"] == {
        "instanceCount": 2,
        "shmSize": "16g",
        "instanceType": "Standard_NC48ads_A100_v4",
    }
    assert "computeId" not in body
    assert "services" not in body
    registry = "azureml://registries/azureml/environments/acpt/versions/9"
    content = yaml.safe_load((job.folder / "job.yaml").read_text()) | {"environment": registry}
    assert request_body(content, WORKSPACE)["environmentId"] == registry


@pytest.mark.parametrize("assigned", ["11111111-2222-3333-4444-555555555555", None])
def test_a_node_accesses_the_storage_with_the_identity_of_its_cluster(
    servers: tuple[ResourceManager, BlobStorage], job: Job, assigned: str | None
) -> None:
    launcher = AzureMLLauncher(**SERVERLESS)
    shell, _, _ = yaml.safe_load(launcher.render(job))["command"].partition("exec ")
    env = servers[0].env | ({"DEFAULT_IDENTITY_CLIENT_ID": assigned} if assigned else {})
    program = "import asyncio, adlfs; credential = adlfs.AzureBlobFileSystem('account').credential; "
    program += "print(asyncio.run(credential.get_token('https://storage.azure.com/.default')).token)"
    command = ["bash", "-c", f'{shell}exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, env={"PATH": os.defpath, **env}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "token\n", done.stderr
    (query,) = servers[0].identities
    assert query.pop("api-version")
    assert query == {"resource": "https://storage.azure.com", **({"clientid": assigned} if assigned else {})}


def test_jupyter_is_a_service_of_the_platform(servers: tuple[ResourceManager, BlobStorage], job: Job) -> None:
    server, _ = servers
    submit(server, replace(job, nodes=1), SERVERLESS | {"jupyter": True})
    body = server.requests[-1][2]["properties"]
    assert body["services"] == {"jupyter": {"jobServiceType": "JupyterLab"}}
    assert body["command"].endswith(
        "/runs/digits/one trust=sha256:00000000000000000000000000000000 --unpack && exec sleep infinity"
    )
    assert body["distribution"]["processCountPerInstance"] == 1


def test_nothing_is_sent_to_a_cluster_that_does_not_exist(
    servers: tuple[ResourceManager, BlobStorage], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, storage = servers
    with pytest.raises(ValueError, match=r"^launch=azureml: 404 ResourceNotFound: computes gpu-cluster not found"):
        submit(server, job, CLUSTER)
    with pytest.raises(ValueError, match=r"^launch=azureml: 404 ResourceNotFound: The Resource .* was not found"):
        submit(server, job, SERVERLESS | {"workspace": "other"})
    monkeypatch.setenv("MSI_SECRET", "wrong")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    with pytest.raises(ValueError, match=r"^launch=azureml: no valid credentials \(.*\); run az login"):
        submit(server, job, CLUSTER)
    assert {method for method, *_ in server.requests} == {"GET"}
    assert not storage.blobs


def test_a_rejected_job_is_one_line_and_an_unclear_one_may_run(
    servers: tuple[ResourceManager, BlobStorage], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = servers
    server.failures["digits-one"] = (400, "UserError", "Insufficient quota of\nStandardNCADSA100v4Family.")
    with pytest.raises(ValueError, match=r"^launch=azureml: 400 UserError: Insufficient quota of Standard.*; correct"):
        submit(server, job, SERVERLESS)
    monkeypatch.setattr(rest_api, "RETRIES", 0)
    server.failures["digits-one"] = (429, "TooManyRequests", "Slow down.")
    with pytest.raises(UnreachableError, match=r"^launch=azureml: 429 TooManyRequests: Slow down; try again later$"):
        submit(server, job, SERVERLESS)
    server.failures["digits-one"] = (500, "InternalServerError", "An error.")
    with pytest.raises(UnclearSubmissionError, match=r"500 .* may have been submitted: .*look for digits-one there$"):
        submit(server, job, SERVERLESS)


def test_the_address_of_a_checkpoint_has_the_account(servers: tuple[ResourceManager, BlobStorage]) -> None:
    place = f"{SETTINGS['storage']}/digits/one/checkpoints"
    AtomicCheckpointIO().save_checkpoint(STATE, f"{place}/last.ckpt")
    assert servers[1].blobs.keys() == {"models/runs/digits/one/checkpoints/last.ckpt"}
    assert find_newest(place) == f"{place}/last.ckpt"


def test_a_resumed_run_has_another_job(servers: tuple[ResourceManager, BlobStorage], job: Job) -> None:
    server, _ = servers
    names = []
    for _ in range(3):
        names.append(next_name(job))
        job_id = submit(server, job, SERVERLESS)
        assert job_id.endswith(f"/jobs/{names[-1]}")
        (job.folder / "record.json").write_text(json.dumps({"attempts": [], "launch": {"id": job_id}}))
    assert names == ["digits-one", "digits-one-2", "digits-one-3"]


@pytest.mark.parametrize(
    "earlier", [{"status": "Completed"}, {"status": "Running", "command": "of another run"}], ids=str
)
def test_a_job_of_the_same_name_is_not_taken_for_this_one(
    servers: tuple[ResourceManager, BlobStorage], job: Job, earlier: dict[str, str]
) -> None:
    # "For update case, the Tags in the definition passed in will replace Tags in the existing job":
    # https://learn.microsoft.com/rest/api/azureml/jobs/create-or-update
    server, _ = servers
    server.jobs["digits-one"] = earlier
    with pytest.raises(
        ValueError, match=r"^launch=azureml: the workspace has another job digits-one; launch the run in "
    ):
        submit(server, job, SERVERLESS)


def test_the_status_is_that_of_azure(servers: tuple[ResourceManager, BlobStorage]) -> None:
    server, _ = servers
    launcher = AzureMLLauncher(resource_manager=server.url)  # the job knows its own workspace
    services = {
        "Studio": {"jobServiceType": "Studio", "endpoint": "https://ml.azure.com/runs/digits-one"},
        "jupyter": {"jobServiceType": "JupyterLab", "endpoint": "https://node.azureml.ms", "status": "Running"},
    }
    for state, meaning in {**STATES, **dict.fromkeys(RUNNING, "running")}.items():
        server.jobs["digits-one"] = {"status": state}
        assert launcher.status(PATH) == Status(meaning, f"job digits-one, {state}")  # type: ignore[arg-type]
    server.jobs["digits-one"] = {"status": "Running", "services": services}
    page = "job digits-one, Running, Studio: https://ml.azure.com/runs/digits-one, jupyter: https://node.azureml.ms"
    assert launcher.status(PATH).text == page
    with pytest.raises(ValueError, match=r"^launch=azureml: 404 ResourceNotFound: jobs digits-two not found"):
        launcher.status(PATH.replace("one", "two"))


def test_a_job_is_cancelled(servers: tuple[ResourceManager, BlobStorage]) -> None:
    server, _ = servers
    server.jobs["digits-one"] = {"status": "Running"}
    AzureMLLauncher(resource_manager=server.url).cancel(PATH)
    assert server.requests == [("POST", f"{PATH}/cancel?api-version=2024-10-01", None)]
    assert AzureMLLauncher(resource_manager=server.url).status(PATH).text == "job digits-one, CancelRequested"


@pytest.mark.parametrize("job_id", ["digits-one", f"{PATH}/../x", f"https://evil.example{PATH}", f"{PATH}?a=b"])
def test_malformed_job_ids_are_refused(job_id: str) -> None:
    for query in (AzureMLLauncher().cancel, AzureMLLauncher().status):
        with pytest.raises(ValueError, match=r"^record\.json has the job id .*; correct it"):
            query(job_id)


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with azure-ai-ml, which cannot be installed beside the newest versions of other packages."""
    folder = tmp_path_factory.mktemp("sdk")
    require("openssl", install="apt-get install openssl")
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    subprocess.run([python, "-m", "pip", "install", "-q", "azure-ai-ml==1.35.2"], check=True, timeout=600)
    return python


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a job without those that are empty or a default, and with time limits in seconds."""
    found = {name: value for name, value in body.items() if value not in ({}, None, False)}
    found["limits"] = {**found["limits"], "timeout": parse_duration(found["limits"]["timeout"])}
    found["resources"] = {name: value for name, value in found["resources"].items() if value != {}}
    found["environmentId"] = re.sub(r"(AnonymousEnvironment/versions)/.*", r"\1", found["environmentId"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_package_of_azure_sends_the_same_job(
    servers: tuple[ResourceManager, BlobStorage], tmp_path: Path, sdk: str
) -> None:
    server, _ = servers
    broken = {
        "no command": {"command": None},
        "unknown field": {"resorces": {}},
        "distribution": {"distribution": {"type": "nonsense"}},
        "count": {"resources": {"instance_count": "four"}},
    }
    content = yaml.safe_load((JOBS / "azureml.yaml").read_text())
    for name, changed in broken.items():
        text = yaml.safe_dump({key: value for key, value in {**content, **changed}.items() if value is not None})
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [*(JOBS / name for name in RENDERED), *(tmp_path / f"{name}.yaml" for name in broken)]
    command = [sdk, str(Path(__file__).with_name("azure_sdk.py")), server.url, WORKSPACE, *map(str, files)]
    # In a repository, the package would send its commit, too.
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(**server.env), "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(found) for found in errors] == [False] * len(RENDERED) + [True] * len(broken), errors
    sent = [body for method, path, body in server.requests if method == "PUT" and "/jobs/" in path]
    for name, request in zip(RENDERED, sent, strict=True):
        ours = request_body(yaml.safe_load((JOBS / name).read_text()), WORKSPACE)
        assert comparable(request["properties"]) == comparable(ours)
    environments = [body["properties"] for _, path, body in server.requests if "/environments/" in path]
    assert [(found["image"], found["isAnonymous"]) for found in environments] == [("registry.example.com/p:1", True)]


def test_the_workspace_is_that_of_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_RESOURCE_GROUP", "environment")
    launcher = AzureMLLauncher(subscription="a", workspace="w")
    assert (launcher.subscription, launcher.resource_group, launcher.workspace) == ("a", "environment", "w")
    with pytest.raises(ValueError, match=r"^launch.workspace=a/b is not a name in Azure"):
        AzureMLLauncher(workspace="a/b")
