"""Clients of AWS: what goes wrong with credentials, regions and the network is one line with a remedy."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from boltcutter_cloud import aws
from boltcutter_cloud.aws_batch import AwsBatchLauncher
from boltcutter_launch.job import UnreachableError

from ..launch.aws_server import ACCOUNT, CREDENTIALS, aws_server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def check_credentials(region: str | None) -> None:
    AwsBatchLauncher(region=region).check_credentials()


class Rejecting(BaseHTTPRequestHandler):
    """Answers each request with the error whose code is the name of the region."""

    calls: list[str] = []  # noqa: RUF012  (reset by the fixture)
    status, code, message = 400, "", "No."

    def do_POST(self) -> None:
        self.calls.append(self.headers.get("X-Amz-Target", ""))
        if "sagemaker" in self.headers["Authorization"]:
            body = json.dumps({"__type": self.code, "message": self.message})
        else:
            error = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
            body = f"<ErrorResponse>{error}</ErrorResponse>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def rejecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Rejecting]]:
    Rejecting.calls, Rejecting.message = [], "No."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rejecting)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Rejecting
    server.shutdown()
    thread.join()
    server.server_close()


def test_credentials_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    with aws_server() as variables:
        monkeypatch.setenv("AWS_ENDPOINT_URL", variables["AWS_ENDPOINT_URL"])
        check_credentials(None)
        assert aws.call("sts", None, "get_caller_identity")["Account"] == ACCOUNT


def test_missing_credentials_give_the_login_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ValueError, match=r"^AWS: .* `aws configure`"):
        check_credentials("us-east-1")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ValueError, match=r"nobody.* `aws configure`"):
        check_credentials("us-east-1")


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidClientTokenId"])
def test_expired_credentials_give_the_login_command(rejecting: type[Rejecting], code: str) -> None:
    rejecting.code = code
    with pytest.raises(ValueError, match=rf"{code}: No\).* `aws sso login`") as error:
        check_credentials(None)
    assert "\n" not in str(error.value)
    assert aws.error_code(error.value) == code


def test_a_rejected_request_gives_its_reason_on_one_line(rejecting: type[Rejecting]) -> None:
    rejecting.code, rejecting.message = "ResourceLimitExceeded", "The limit is 0\n  instances."
    rejected = r"StopTrainingJob .*The limit is 0 instances\); request"
    with pytest.raises(ValueError, match=rejected):
        aws.call("sagemaker", None, "stop_training_job", TrainingJobName="job")
    assert len(rejecting.calls) == 1


def test_a_throttled_request_is_tried_again(rejecting: type[Rejecting]) -> None:
    rejecting.code = "ThrottlingException"
    with pytest.raises(UnreachableError, match=r"StopTrainingJob .*try again"):
        aws.call("sagemaker", None, "stop_training_job", TrainingJobName="job")
    assert len(rejecting.calls) == 3


def test_an_endpoint_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aws.LIMITS, "read_timeout", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(UnreachableError, match=r"^AWS does not respond .*; check the network"):
            check_credentials(None)
    assert time.monotonic() - start < 20
    with pytest.raises(UnreachableError):  # nothing listens there now
        check_credentials(None)


def test_no_region_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(ValueError, match=r"^launch\.region: not set.*us-east-1"):
        check_credentials(None)
    (tmp_path / "config").write_text("[default]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert aws.client("sts", None).meta.region_name == "eu-west-3"
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert aws.client("sts", None).meta.region_name == "eu-west-2"
    assert aws.client("sts", "eu-west-1").meta.region_name == "eu-west-1"


@pytest.mark.parametrize("region", [None, "us-east-1", "us-gov-west-1", "eusc-de-east-1", "cn-northwest-1"])
def test_regions_are_accepted(region: str | None) -> None:
    assert AwsBatchLauncher(region=region).region == region


@pytest.mark.parametrize(("region", "remedy"), [("us-east-1a", "=us-east-1$"), ("us-east1", "try"), ("US", "try")])
def test_what_is_no_region_is_refused(region: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"^launch\.region={region} .*{remedy}"):
        AwsBatchLauncher(region=region)


def test_the_region_of_an_image_is_that_of_its_registry() -> None:
    assert aws.image_region("123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/train:1.0") == "eu-west-1"
    assert aws.image_region("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/train") == "cn-north-1"
    assert aws.image_region("docker.io/team/train:1.0") is None
