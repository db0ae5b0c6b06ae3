"""What the launchers of Amazon Web Services have in common: clients, credentials, regions, and errors on one line.

A launcher calls ``client("ec2", region)``, and uses the client inside ``with as_value_errors():``. What botocore raises
there becomes a ``ValueError`` of one line with a remedy, or an ``UnreachableError`` if AWS does not answer or is busy.
Endpoints, profiles and credentials come from botocore's own variables and files (AWS_PROFILE, AWS_ENDPOINT_URL, …).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter_launch.job import NoAnswerError, UnreachableError

LOGIN = "run `aws sso login` or `aws configure`, or set AWS_PROFILE"
LIMITS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 3}}
REGION = r"[a-z]{2,4}(?:-[a-z]+)+-\d+"
REGION_FORM = (REGION, "a region of AWS; try launch.region=us-east-1")
ECR_IMAGE = re.compile(r"\d{12}\.dkr[.-]ecr(?:-fips)?\.([a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|on\.aws)/.+")
# Error codes of the services, https://docs.aws.amazon.com/general/latest/gr/api-error-codes.html and of each API.
NO_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "AuthFailure"}
NO_CREDENTIALS |= {"UnrecognizedClientException", "SignatureDoesNotMatch", "IncompleteSignature", "InvalidAccessKeyId"}
NO_CREDENTIALS |= {"MissingAuthenticationToken", "TokenRefreshRequired", "IncompleteSignatureException"}
BUSY = {"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
FAULTY = {"InternalError", "InternalFailure", "InternalServerError", "503"}
FAULTY |= {"ServiceUnavailable", "ServiceUnavailableException"}
PERMISSION = "ask for this permission; docs/cloud.md has the policy"
QUOTA = "request a higher quota at Service Quotas, or use fewer or smaller machines"
REMEDIES = {
    **dict.fromkeys(("AccessDenied", "AccessDeniedException", "UnauthorizedOperation"), PERMISSION),
    **dict.fromkeys(("InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"), QUOTA),
    **dict.fromkeys(("ResourceLimitExceeded", "VcpuLimitExceeded"), QUOTA),
    "InsufficientInstanceCapacity": "use launch=sky, which tries zones and regions in turn",
    "OptInRequired": "enable the region or the service in the account",
}


def known_region(region: str | None) -> str | None:
    """Return the region as far as it is known without boto3: that of the setting, else of the environment."""
    return region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


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
        if not (region := known_region(region) or session.region_name):
            raise ValueError("launch.region: not set, and the AWS profile has none; try launch.region=us-east-1")
        return session.client(service, region_name=region, config=Config(**limits))


def check_credentials(region: str | None) -> str:
    """Check that there are credentials, and that AWS accepts them.

    Args:
        region: Region; None: that of the environment or of the profile.

    Returns:
        Number of the account.

    Raises:
        ValueError: There are none, or they have expired; the message has the command to log in.
    """
    caller = client("sts", region)
    with as_value_errors():
        return str(caller.get_caller_identity()["Account"])


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

    missing: tuple[type[Exception], ...]
    missing = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.CredentialRetrievalError)
    missing += (exceptions.SSOError, exceptions.TokenRetrievalError, exceptions.ProfileNotFound)
    missing += (getattr(exceptions, "LoginError", exceptions.SSOError),)  # since botocore 1.41
    silent = (exceptions.ConnectionError, exceptions.HTTPClientError)
    try:
        yield
    except exceptions.ClientError as error:
        code, text = error_code(error), one_line(error.response.get("Error", {}).get("Message", error), 500)
        if code in NO_CREDENTIALS:
            raise ValueError(f"AWS does not accept the credentials ({code}: {text}); {LOGIN}") from error
        if code in BUSY | FAULTY:
            kind = UnreachableError if code in BUSY else NoAnswerError
            raise kind(f"AWS is too busy for {error.operation_name} ({code}: {text}); try again") from error
        remedy = REMEDIES.get(code, "correct the settings of launch")
        raise ValueError(f"AWS rejected {error.operation_name} ({code}: {text}); {remedy}") from error
    except missing as error:
        raise ValueError(f"AWS credentials are missing or expired ({one_line(error)}); {LOGIN}") from error
    except silent as error:
        raise NoAnswerError(f"AWS does not respond ({one_line(error)}); check the network and the region") from error
    except exceptions.BotoCoreError as error:
        raise ValueError(f"AWS: {one_line(error)}; correct the settings of launch") from error
