"""Secrets of clouds by reference, read as on a node: from moto, and from servers that answer as Google and Azure do."""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from requests import Session

from boltcutter.config.errors import ConfigError
from boltcutter.launch.cloud.azureml import AzureMLLauncher
from boltcutter.launch.cloud.vertex import VertexLauncher
from boltcutter.launch.cloud_job import CloudLauncher
from boltcutter.launch.job import Job
from boltcutter.launch.kubernetes import KubernetesLauncher
from boltcutter.launch.secret_reference import EXAMPLE, arguments, export, find_reader
from boltcutter.launch.sky import SkyLauncher

from .aws_server import CREDENTIALS, aws_server
from .azure_server import azure
from .google_server import google_server


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with aws_server() as variables:
        yield variables


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, server: dict[str, str]) -> None:
    for name, value in (CREDENTIALS | server).items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "")  # set again by the test; restored afterwards


def test_a_node_reads_secrets_by_its_identity() -> None:
    manager = boto3.client("secretsmanager")
    plain = manager.create_secret(Name="wandb", SecretString="w-1")["ARN"]
    keys = manager.create_secret(Name="keys", SecretString=json.dumps({"hub": "h-1"}))["ARN"]
    given = arguments({"WANDB_API_KEY": plain, "HF_TOKEN": f"{keys}:hub::"})
    assert given[0] == f"--secret=WANDB_API_KEY={plain}"
    export([pair.removeprefix("--secret=") for pair in given])
    assert [os.environ[name] for name in ("WANDB_API_KEY", "HF_TOKEN")] == ["w-1", "h-1"]


@pytest.mark.parametrize(
    "launcher",
    [
        VertexLauncher(storage="gs://b/runs"),
        AzureMLLauncher(storage="abfss://b@c.dfs.core.windows.net/runs", image="i"),
        SkyLauncher(storage="s3://b/runs"),
        *(KubernetesLauncher(storage="s3://b/runs", kind=kind) for kind in ("job", "trainjob")),  # type: ignore[arg-type]
    ],
    ids=lambda launcher: getattr(launcher, "kind", launcher.option),
)
def test_the_command_of_each_job_file_names_the_secret(launcher: CloudLauncher) -> None:
    launcher.secrets = {"WANDB_API_KEY": EXAMPLE}
    assert f"--secret=WANDB_API_KEY={EXAMPLE}" in launcher.render(Job("digits", Path("/p/runs/digits/one"), None))


def test_a_secret_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(ConfigError, match=rf"^launch\.secrets\.HF_TOKEN={EXAMPLE}: .*ResourceNotFound") as error:
        export([f"HF_TOKEN={EXAMPLE}"])
    assert "\n" not in str(error.value)


def test_a_service_that_does_not_respond_is_tried_again_by_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ValueError, match=r"^launch\.secrets\.HF_TOKEN=") as error:
        export([f"HF_TOKEN={EXAMPLE}"])
    assert not isinstance(error.value, ConfigError)


GOOGLE = "projects/my-project/secrets/wandb/versions/latest"
VAULT = "https://team.vault.azure.net"


@pytest.mark.slow
def test_a_secret_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access."""
    with google_server(tmp_path) as (server, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER", server.url)
        payload = {"data": base64.b64encode(b"w-1").decode(), "dataCrc32c": "1"}
        refused = {"error": {"status": "PERMISSION_DENIED", "message": "secretmanager.versions.access denied"}}
        server.answers[f"GET /v1/{GOOGLE}:access"] = [
            (200, {"name": GOOGLE, "payload": payload}),
            (403, refused),
            (503, refused),
        ]
        export([f"WANDB_API_KEY={GOOGLE}"])
        assert os.environ["WANDB_API_KEY"] == "w-1"
        with pytest.raises(ConfigError, match=rf"^launch\.secrets\.HF_TOKEN={GOOGLE}: cannot be read .*access denied"):
            export([f"HF_TOKEN={GOOGLE}"])
        with pytest.raises(ValueError, match="try again later") as error:
            export([f"HF_TOKEN={GOOGLE}"])
        assert not isinstance(error.value, ConfigError)  # so that the platform starts the job again


def test_a_secret_of_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://learn.microsoft.com/rest/api/keyvault/secrets/get-secret/get-secret."""
    send = Session.request
    with azure(tmp_path) as (server, _):
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

        def send_to_server(session: Session, method: str, url: str, **options: Any) -> Any:
            return send(session, method, url.replace(VAULT, server.url), **options)

        monkeypatch.setattr(Session, "request", send_to_server)
        server.secrets["wandb"] = "w-2"
        export([f"WANDB_API_KEY={VAULT}/secrets/wandb"])
        assert os.environ["WANDB_API_KEY"] == "w-2"
        assert server.requests[-1][:2] == ("GET", "/secrets/wandb?api-version=7.4")
        assert server.identities[-1]["resource"] == "https://vault.azure.net"
        with pytest.raises(ConfigError, match=rf"^launch\.secrets\.HF_TOKEN={VAULT}/secrets/hub: .*SecretNotFound"):
            export([f"HF_TOKEN={VAULT}/secrets/hub"])


@pytest.mark.parametrize(
    "reference",
    [
        GOOGLE,
        f"{VAULT}/secrets/wandb",
        "https://team.vault.usgovcloudapi.net/secrets/wandb/0123456789abcdef0123456789abcdef",
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:team/wandb-a1b2c3",
        "arn:aws-cn:secretsmanager:cn-north-1:123456789012:secret:wandb-a1b2c3:key::",
    ],
)
def test_references(reference: str) -> None:
    assert find_reader(reference)
    assert not find_reader(reference[1:])
    assert not find_reader("hf_abc")
