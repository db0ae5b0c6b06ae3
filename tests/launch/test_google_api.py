import json
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter_launch import google_api
from boltcutter_launch.google_api import call, connect, endpoint
from boltcutter_launch.job import ForbiddenError, NoAnswerError, UnreachableError

from .google_server import ACCOUNT, NO_ANSWER, GoogleServer, error, google_server, isolated


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    with google_server(tmp_path) as (found, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield found


def test_the_endpoint_is_regional_or_the_one_of_gcloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", raising=False)
    assert endpoint("aiplatform", "us-east1-") == "https://us-east1-aiplatform.googleapis.com"
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "https://us-east1-p.p.googleapis.com/")
    assert endpoint("aiplatform", "us-east1-") == "https://us-east1-p.p.googleapis.com"


def test_requests_have_a_token_for_the_credentials(server: GoogleServer) -> None:
    server.answers["GET /v1/a?b=1"] = [(200, {"c": 2})]
    server.answers["POST /v1/a"] = [(200, "")]
    session = connect()
    assert call(session, "GET", f"{server.url}/v1/a?b=1") == {"c": 2}
    assert call(session, "POST", f"{server.url}/v1/a", {"d": 3}) == {}
    assert server.requests == [("GET", "/v1/a?b=1", None, "t"), ("POST", "/v1/a", {"d": 3}, "t")]
    (token,) = server.tokens
    assert token.body["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
    claims = json.loads(urlsafe_b64decode(token.body["assertion"][0].split(".")[1] + "=="))
    assert (claims["iss"], claims["scope"]) == (ACCOUNT, "https://www.googleapis.com/auth/cloud-platform")


def test_missing_and_rejected_credentials_name_the_command_to_log_in(
    server: GoogleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["POST /token"] = [(400, {"error": "invalid_grant", "error_description": "Invalid\nJWT."})]
    with pytest.raises(
        ValueError, match=r"rejected the credentials \(.*Invalid JWT.*; run gcloud auth app"
    ) as rejected:
        connect()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json.*; run gcloud auth application-default login$") as no_file:
        connect()
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    for name, value in isolated(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"no valid credentials.*; run gcloud auth application-default login$") as none:
        connect()
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
        call(connect(), "POST", f"{server.url}/v1/a", {})
    assert type(raised.value) is kind
    assert str(raised.value) == message


def test_a_server_that_does_not_answer_is_given_up(server: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_api, "TIMEOUT", 0.5)
    session = connect()
    server.answers["GET /v1/a"] = [(NO_ANSWER, None)]
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match=rf"no answer from 127.0.0.1:{server.server_port} .*check the network"):
        call(session, "GET", f"{server.url}/v1/a")
    server.answers["POST /token"] = [(NO_ANSWER, None)]
    with pytest.raises(UnreachableError, match="check the network and try again"):
        connect()
    with pytest.raises(UnreachableError, match=r"no answer from 127\.0\.0\.1:9 .*check the network") as refused:
        call(session, "GET", "http://127.0.0.1:9/v1/a")
    assert not isinstance(refused.value, NoAnswerError)  # the request was not sent
    assert time.monotonic() - start < 10
