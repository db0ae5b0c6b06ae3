"""What the launchers of Amazon Web Services have in common: requests, credentials, regions, and errors on one line.

What botocore raises becomes a ``ValueError`` of one line with a remedy, or an ``UnreachableError`` if AWS does not
answer or is busy. Endpoints, profiles and credentials come from botocore's own variables and files (AWS_PROFILE,
AWS_ENDPOINT_URL, …).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter_launch.cloud import CloudLauncher
from boltcutter_launch.job import Job, NoAnswerError, UnreachableError

LOGIN = "run `aws sso login` or `aws configure`, or set AWS_PROFILE"
LIMITS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 3}}
REGION = r"[a-z]{2,4}(?:-[a-z]+)+-[0-9]+"
ECR_IMAGE = re.compile(r"[0-9]{12}\.dkr[.-]ecr(?:-fips)?\.([a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|on\.aws)/.+")
BUSY = re.compile("Throttling|RequestLimitExceeded|TooManyRequests")
# Error codes of the services, https://docs.aws.amazon.com/general/latest/gr/api-error-codes.html and of each API.
REMEDIES = (
    ("Expired|InvalidClientToken|AuthFailure|UnrecognizedClient|Signature|AccessKeyId|Token", LOGIN),
    ("AccessDenied|UnauthorizedOperation", "ask for this permission; docs/cloud.md has the policy"),
    ("LimitExceeded|CountExceeded", "request a higher quota, or use fewer or smaller machines"),
    ("InsufficientInstanceCapacity", "use launch=sky, which tries zones and regions in turn"),
    ("", "correct the settings of launch"),
)


@dataclass(kw_only=True, eq=False)
class AwsLauncher(CloudLauncher):
    """Base class of the launchers of AWS.

    Args:
        region: Region; null: that of AWS_REGION or of the AWS profile.
        extra: Further fields of the request, as the API names them, such as {shareIdentifier: vision} of AWS Batch or
            {SubnetId: subnet-0123} of EC2; they are merged into those of the launcher.
    """

    job_file, protocols = "job.json", ("s3",)
    forms: ClassVar = {"region": (REGION, "a region of AWS; try launch.region=us-east-1")}
    region: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def render(self, job: Job) -> str:
        """Render the input of the AWS CLI, ``--cli-input-json file://job.json``."""
        return json.dumps(self.fill(Path(__file__).with_name(f"{self.option}.yaml.j2"), job), indent=2) + "\n"

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no valid credentials."""
        call("sts", self.region, "get_caller_identity")


def image_region(image: str) -> str | None:
    """Return the region of an image in Amazon ECR; None for another registry."""
    found = ECR_IMAGE.fullmatch(image)
    return found[1] if found else None


def client(service: str, region: str | None, *, repeats: bool = True) -> Any:
    """Return a client of a service, which gives up after about a minute if nothing answers.

    Args:
        service: Name of the service.
        region: Region; None: that of the environment or of the profile.
        repeats: Whether a request that was not answered is sent again, by which it may be carried out twice.
    """
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        raise ValueError(f"launch: boto3 is not installed; {install_command('boto3')}") from None
    with as_value_errors():
        limits = LIMITS if repeats else LIMITS | {"retries": {"total_max_attempts": 1}}
        session = boto3.Session()
        if not (region := region or os.environ.get("AWS_REGION") or session.region_name):
            raise ValueError("launch.region: not set, and the AWS profile has none; try launch.region=us-east-1")
        return session.client(service, region_name=region, config=Config(**limits))


def call(service: str, region: str | None, operation: str, **parameters: Any) -> dict[str, Any]:
    """Send a request, and return the answer."""
    with as_value_errors():
        return dict(getattr(client(service, region), operation)(**parameters))


def pages(service: str, region: str | None, operation: str, key: str, **parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the items below a key in all pages of an answer."""
    with as_value_errors():
        for page in client(service, region).get_paginator(operation).paginate(**parameters):
            yield from page[key]


def error_code(error: BaseException | None) -> str:
    """Return the code with which AWS rejected a request, from an error or its cause; empty if it did not."""
    while error is not None and not isinstance(getattr(error, "response", None), dict):
        error = error.__cause__
    return str(error.response.get("Error", {}).get("Code", "")) if error is not None else ""  # type: ignore[attr-defined]


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Convert errors of botocore to a ``ValueError`` with one line.

    Raises:
        ValueError: The request was rejected, or there are no valid credentials.
        UnreachableError: AWS was too busy.
        NoAnswerError: AWS did not answer, or had an error of its own; it may have accepted the request.
    """
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        code, text = error_code(error), one_line(error.response.get("Error", {}).get("Message", error), 500)
        line = f"AWS rejected {error.operation_name} ({code}: {text})"
        if BUSY.search(code):
            raise UnreachableError(f"{line}; try again later") from error
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
            raise NoAnswerError(f"{line}; try again later") from error
        raise ValueError(f"{line}; {next(remedy for form, remedy in REMEDIES if re.search(form, code))}") from error
    except (exceptions.ConnectionError, exceptions.HTTPClientError) as error:
        raise NoAnswerError(f"AWS does not respond ({one_line(error)}); check the network and the region") from error
    except exceptions.BotoCoreError as error:
        is_invalid = isinstance(error, exceptions.ParamValidationError)
        remedy = "correct the settings of launch" if is_invalid else LOGIN
        raise ValueError(f"AWS: {one_line(error)}; {remedy}") from error
