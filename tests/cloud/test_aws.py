"""AWS: what goes wrong with credentials, regions and the network is one line; the documented policies suffice."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from botocore.session import Session
from conftest import ROOT

from boltcutter_cloud import aws, aws_batch, ec2, sagemaker
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


def documented_policies(section: str) -> list[set[str]]:
    """Return the actions that each policy in a section of docs/cloud.md permits."""
    text = (ROOT / "docs" / "cloud.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    policies = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)]
    found = []
    for policy in (policy for policy in policies if "Statement" in policy):
        assert policy.keys() == {"Version", "Statement"}
        assert {statement["Effect"] for statement in policy["Statement"]} == {"Allow"}
        given = [statement["Action"] for statement in policy["Statement"]]
        found.append({action for one in given for action in ([one] if isinstance(one, str) else one)})
    return found


@pytest.mark.parametrize(
    ("section", "module", "implied"),
    [
        ("Amazon SageMaker", sagemaker, {"sagemaker:AddTags", "iam:PassRole"}),
        ("AWS Batch", aws_batch, {"batch:SubmitJob", "batch:TagResource"}),
        (
            "Amazon EC2",
            ec2,
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ExamplePolicies_EC2.html, and
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-systems-manager-parameter-to-find-AMI.html
            {"ec2:CreateTags", "ssm:GetParameters", "iam:PassRole", "iam:CreateServiceLinkedRole"},
        ),
    ],
)
def test_who_launches_may_send_each_request(section: str, module: ModuleType, implied: set[str]) -> None:
    """The last policy of a section permits what its launcher calls, and what that implies, and nothing else."""
    calls = re.findall(r'aws\.(?:call|pages)\(\s*"(\w+)", \S+ "(\w+)"', Path(str(module.__file__)).read_text())
    used = {f"{service}:{''.join(word.title() for word in name.split('_'))}" for service, name in calls}
    assert len(used) > 2
    assert documented_policies(section)[-1] == used | implied


def test_documented_policies_name_actions_of_the_services() -> None:
    sections = ("Amazon SageMaker", "Amazon EC2", "AWS Batch")
    named = {action for section in sections for actions in documented_policies(section) for action in actions}
    # Of S3, permissions have other names than operations; passing a role is none.
    named -= {"iam:PassRole", "s3:ListBucket", "s3:AbortMultipartUpload"}
    for service, _, operation in (action.partition(":") for action in named):
        assert operation in Session().get_service_model(service).operation_names, f"{service}:{operation}"


def test_the_documented_roles_permit_what_nodes_do() -> None:
    storage = {
        f"s3:{name}" for name in ("ListBucket", "GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
    }
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-push-iam.html, without the actions that push
    ecr = {"ecr:GetAuthorizationToken", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"}
    _, of_training, _ = documented_policies("Amazon SageMaker")
    assert storage | ecr <= of_training
    _, of_instances, _ = documented_policies("Amazon EC2")
    script = (Path(ec2.__file__).parent / "ec2_user_data.sh.j2").read_text()
    calls = re.findall(r"aws (ec2|ecr) ([a-z-]+)", script)
    used = {f"{service}:{''.join(word.title() for word in name.split('-'))}" for service, name in calls}
    assert used - {"ecr:GetLoginPassword"} == of_instances - storage
    assert "ecr:GetLoginPassword" in used  # a command that calls GetAuthorizationToken
    text = (ROOT / "docs" / "cloud.md").read_text()
    assert "the role also needs the two statements for `ecr` of [SageMaker's role](#amazon-sagemaker)" in text
