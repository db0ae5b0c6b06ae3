"""Requests to Azure by the real client, to a server on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from boltcutter_launch import azure_api
from boltcutter_launch.job import UnreachableError

from .azure_server import WORKSPACE, ResourceManager, azure, clean_environment


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResourceManager]:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    with azure(tmp_path) as (found, _):
        for name, value in found.env.items():
            monkeypatch.setenv(name, value)
        yield found


def test_requests_have_a_token_and_the_version(server: ResourceManager) -> None:
    client = azure_api.connect(server.url)
    answer = azure_api.call(client, "PUT", f"{server.url}{WORKSPACE}/environments/e/versions/1", {"properties": {}})
    assert answer["id"].endswith("/environments/e/versions/1")
    assert server.requests == [
        ("PUT", f"{WORKSPACE}/environments/e/versions/1?api-version=2024-10-01", {"properties": {}})
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
def test_errors_of_azure_are_one_line(server: ResourceManager, failure: tuple[int, str, str], message: str) -> None:
    server.failures["workspace"] = failure
    with pytest.raises(ValueError, match="launch=azureml: ") as error:
        azure_api.call(azure_api.connect(server.url), "GET", f"{server.url}{WORKSPACE}")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 520
    assert len(server.requests) == 1


def test_a_busy_server_is_asked_again(server: ResourceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_api, "RETRIES", 1)
    server.failures["workspace"] = (503, "ServerBusy", "Busy.")
    with pytest.raises(UnreachableError, match=r"^launch=azureml: 503 ServerBusy: Busy; try again later"):
        azure_api.call(azure_api.connect(server.url), "GET", f"{server.url}{WORKSPACE}")
    assert len(server.requests) == 2


def test_a_server_that_does_not_answer_is_given_up(server: ResourceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_api, "TIMEOUT", 0.3)
    monkeypatch.setattr(azure_api, "RETRIES", 1)
    server.delay = 5
    with pytest.raises(
        UnreachableError, match=r"^launch=azureml: no answer from localhost:\d+ \(.*; try again"
    ) as error:
        azure_api.call(azure_api.connect(server.url), "GET", f"{server.url}{WORKSPACE}")
    assert "\n" not in str(error.value)


def test_missing_credentials_are_one_line_with_the_command_to_log_in(
    server: ResourceManager, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MSI_SECRET", "wrong")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    with pytest.raises(ValueError, match=r"^launch=azureml: no valid credentials of Azure \(.*\); run az login$"):
        azure_api.connect(server.url)
    monkeypatch.delenv("AZURE_TOKEN_CREDENTIALS")
    for name in ("CLIENT_ID", "TENANT_ID", "CLIENT_SECRET"):  # of a service principal
        monkeypatch.setenv(f"AZURE_{name}", "x")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", server.url)
    with pytest.raises(ValueError, match=r"\(EnvironmentCredential: Authentication failed: .*\); run az login$"):
        azure_api.connect(server.url)
    assert capfd.readouterr().err == ""
