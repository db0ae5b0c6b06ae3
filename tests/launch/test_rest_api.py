"""Requests to Google and Azure with their real packages for credentials, to servers on this machine."""

import json
import os
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch import rest_api
from boltcutter.launch.job import ForbiddenError, NoAnswerError, UnreachableError
from boltcutter.launch.rest_api import connect_azure, connect_google, google_endpoint

from .azure_server import WORKSPACE, ResourceManager, azure, clean_environment
from .google_server import ACCOUNT, NO_ANSWER, GoogleServer, error, google_server, isolated


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    with google_server(tmp_path) as (found, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield found


def test_the_endpoint_is_regional_or_the_one_of_gcloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", raising=False)
    assert google_endpoint("aiplatform", "us-east1-") == "https://us-east1-aiplatform.googleapis.com"
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "https://us-east1-p.p.googleapis.com/")
    assert google_endpoint("aiplatform", "us-east1-") == "https://us-east1-p.p.googleapis.com"


def test_requests_have_a_token_for_the_credentials(server: GoogleServer) -> None:
    server.answers["GET /v1/a?b=1"] = [(200, {"c": 2})]
    server.answers["POST /v1/a"] = [(200, "")]
    api = connect_google()
    assert api.call("GET", f"{server.url}/v1/a?b=1") == {"c": 2}
    assert api.call("POST", f"{server.url}/v1/a", {"d": 3}) == {}
    assert server.requests == [("GET", "/v1/a?b=1", None, "t"), ("POST", "/v1/a", {"d": 3}, "t")]
    (token,) = server.tokens
    assert token.body["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
    claims = json.loads(urlsafe_b64decode(token.body["assertion"][0].split(".")[1] + "=="))
    assert (claims["iss"], claims["scope"]) == (ACCOUNT, "https://www.googleapis.com/auth/cloud-platform")


def test_missing_and_rejected_credentials_name_the_command_to_log_in(
    server: GoogleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["POST /token"] = [(400, {"error": "invalid_grant", "error_description": "Invalid\nJWT."})]
    with pytest.raises(ValueError, match=r"no valid credentials \(.*Invalid JWT.*; run gcloud auth app") as rejected:
        connect_google()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json.*; run gcloud auth application-default login$") as no_file:
        connect_google()
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    for name, value in isolated(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"no valid credentials.*; run gcloud auth application-default login$") as none:
        connect_google()
    for found in (rejected, no_file, none):
        assert str(found.value).startswith("launch=vertex: ")
        assert "\n" not in str(found.value)
    assert not server.requests


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            403,
            error(
                403,
                "PERMISSION_DENIED",
                "Vertex AI API has not been used in project 1.\nEnable it by visiting https://x",
            ),
            ForbiddenError,
            "launch=vertex: 403 PERMISSION_DENIED: Vertex AI API has not been used in project 1. Enable it by visiting "
            "https://x; enable the API, or ask for the role that the message names",
        ),
        (
            404,
            error(404, "NOT_FOUND", "The CustomJob does not exist."),
            ValueError,
            "launch=vertex: 404 NOT_FOUND: The CustomJob does not exist; correct launch.project or launch.region",
        ),
        (
            400,
            error(400, "INVALID_ARGUMENT", 'Machine type "x" is not supported.'),
            ValueError,
            'launch=vertex: 400 INVALID_ARGUMENT: Machine type "x" is not supported; correct the setting that the '
            "message names",
        ),
        (
            429,
            error(
                429, "RESOURCE_EXHAUSTED", "The following quota metrics exceed quota limits: custom_model_training_cpus"
            ),
            UnreachableError,
            "launch=vertex: 429 RESOURCE_EXHAUSTED: The following quota metrics exceed quota limits: "
            "custom_model_training_cpus; request more quota at https://console.cloud.google.com/iam-admin/quotas, or "
            "try regions by launch=sky",
        ),
        (
            503,
            "<html>\n<h1>overloaded</h1>",
            NoAnswerError,
            "launch=vertex: 503 <html> <h1>overloaded</h1>; try again later",
        ),
    ],
)
def test_an_error_of_the_api_is_one_line(
    server: GoogleServer, status: int, body: Any, kind: type[Exception], message: str
) -> None:
    server.answers["POST /v1/a"] = [(status, body)]
    with pytest.raises(ValueError, match="launch=vertex") as raised:
        connect_google().call("POST", f"{server.url}/v1/a", {})
    assert type(raised.value) is kind
    assert str(raised.value) == message


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up(server: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_api, "TIMEOUT", 0.5)
    api = connect_google()
    server.answers["GET /v1/a"] = [(NO_ANSWER, None)]
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match=rf"no answer from 127.0.0.1:{server.server_port} .*check the network"):
        api.call("GET", f"{server.url}/v1/a")
    server.answers["POST /token"] = [(NO_ANSWER, None)]
    with pytest.raises(UnreachableError, match="check the network and try again"):
        connect_google()
    with pytest.raises(UnreachableError, match=r"no answer from 127\.0\.0\.1:9 .*check the network") as refused:
        api.call("GET", "http://127.0.0.1:9/v1/a")
    assert not isinstance(refused.value, NoAnswerError)  # the request was not sent
    assert time.monotonic() - start < 10


@pytest.fixture
def azure_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResourceManager]:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    with azure(tmp_path) as (found, _):
        for name, value in found.env.items():
            monkeypatch.setenv(name, value)
        yield found


def test_requests_to_azure_have_a_token(azure_manager: ResourceManager) -> None:
    url = f"{azure_manager.url}{WORKSPACE}/environments/e/versions/1?api-version=1"
    answer = connect_azure(azure_manager.url).call("PUT", url, {"properties": {}})
    assert answer["id"].endswith("/environments/e/versions/1")
    assert azure_manager.requests == [
        ("PUT", f"{WORKSPACE}/environments/e/versions/1?api-version=1", {"properties": {}})
    ]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((404, "ResourceNotFound", "No\nsuch workspace."), "launch=azureml: 404 ResourceNotFound: No such workspace; "),
        ((401, "Expired", "The token is old."), "launch=azureml: 401 Expired: The token is old; run az login"),
        ((403, "AuthorizationFailed", "No."), "launch=azureml: 403 AuthorizationFailed: No; ask for the role AzureML "),
        ((400, "BadRequest", "x" * 900), "launch=azureml: 400 BadRequest: xxx"),
    ],
)
def test_errors_of_azure_are_one_line(
    azure_manager: ResourceManager, failure: tuple[int, str, str], message: str
) -> None:
    azure_manager.failures["workspace"] = failure
    with pytest.raises(ValueError, match="launch=azureml: ") as raised:
        connect_azure(azure_manager.url).call("GET", f"{azure_manager.url}{WORKSPACE}")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 520
    assert len(azure_manager.requests) == 1


def test_a_busy_server_is_asked_again(azure_manager: ResourceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_api, "RETRIES", 1)
    azure_manager.failures["workspace"] = (503, "ServerBusy", "Busy.")
    with pytest.raises(UnreachableError, match=r"^launch=azureml: 503 ServerBusy: Busy; try again later"):
        connect_azure(azure_manager.url).call("GET", f"{azure_manager.url}{WORKSPACE}")
    assert len(azure_manager.requests) == 2


def test_azure_is_given_up_if_it_does_not_answer(
    azure_manager: ResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_api, "TIMEOUT", 0.3)
    monkeypatch.setattr(rest_api, "RETRIES", 1)
    azure_manager.delay = 5
    with pytest.raises(
        UnreachableError, match=r"^launch=azureml: no answer from localhost:\d+ \(.*; check the network and try again"
    ) as raised:
        connect_azure(azure_manager.url).call("GET", f"{azure_manager.url}{WORKSPACE}")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_missing_credentials_of_azure_are_one_line_with_the_command_to_log_in(
    azure_manager: ResourceManager, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MSI_SECRET", "wrong")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    with pytest.raises(ValueError, match=r"^launch=azureml: no valid credentials \(.*\); run az login$"):
        connect_azure(azure_manager.url)
    monkeypatch.delenv("AZURE_TOKEN_CREDENTIALS")
    for name in ("CLIENT_ID", "TENANT_ID", "CLIENT_SECRET"):  # of a service principal
        monkeypatch.setenv(f"AZURE_{name}", "x")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", azure_manager.url)
    with pytest.raises(ValueError, match=r"\(EnvironmentCredential: Authentication failed: .*\); run az login$"):
        connect_azure(azure_manager.url)
    assert capfd.readouterr().err == ""
