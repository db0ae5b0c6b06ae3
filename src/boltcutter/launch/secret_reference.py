"""Secrets by reference: a job file names secrets of a cloud, and each node reads them by its own identity.

For another cloud, add the form of its references and the function that reads one to ``READERS``.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence

from boltcutter.checkpoint.storage import error_text
from boltcutter.config.errors import ConfigError
from boltcutter.launch.job import UnreachableError

# With a key of JSON as ECS writes it:
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/secrets-envvar-secrets-manager.html
AWS = re.compile(r"(arn:aws[a-z-]*:secretsmanager:([a-z0-9-]+):[0-9]{12}:secret:[\w/+=.@-]+)(?::([^:]+)::)?")
EXAMPLE = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-a1b2c3"


def read_aws(reference: str) -> str:
    """Read a secret of AWS Secrets Manager."""
    from botocore.session import get_session  # of s3fs, as nodes may not have boto3

    found = AWS.fullmatch(reference)
    assert found
    arn, region, key = found.groups()
    client = get_session().create_client("secretsmanager", region_name=region)
    text = str(client.get_secret_value(SecretId=arn)["SecretString"])
    return str(json.loads(text)[key]) if key else text


# https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access
GOOGLE = re.compile(r"projects/[\w.:-]+/secrets/[\w-]+/versions/([0-9]+|latest)")
# https://learn.microsoft.com/azure/key-vault/general/about-keys-secrets-certificates#object-identifiers
AZURE = re.compile(r"https://[A-Za-z0-9-]{3,24}\.(vault\.[a-z.-]+)/secrets/[A-Za-z0-9-]+(/[0-9a-f]{32})?")
KEY_VAULT_VERSION = "7.4"


def read_google(reference: str) -> str:
    """Read a version of a secret of Google Secret Manager."""
    from boltcutter.launch.rest_api import connect_google, google_endpoint

    url = f"{google_endpoint('secretmanager')}/v1/{reference}:access"
    return b64decode(connect_google().call("GET", url)["payload"]["data"]).decode()


def read_azure(reference: str) -> str:
    """Read a secret of Azure Key Vault."""
    from boltcutter.launch.rest_api import connect_azure

    found = AZURE.fullmatch(reference)
    assert found
    return str(
        connect_azure(f"https://{found[1]}").call("GET", f"{reference}?api-version={KEY_VAULT_VERSION}")["value"]
    )


READERS: dict[re.Pattern[str], Callable[[str], str]] = {AWS: read_aws, GOOGLE: read_google, AZURE: read_azure}


def find_reader(reference: str) -> Callable[[str], str] | None:
    """Return the function that reads a reference; None if it is not one."""
    return next((read for form, read in READERS.items() if form.fullmatch(reference)), None)


def arguments(secrets: Mapping[str, str]) -> list[str]:
    """Return the arguments of ``boltcutter.launch.node`` that set environment variables to secrets."""
    return [f"--secret={name}={reference}" for name, reference in secrets.items() if find_reader(reference)]


def export(pairs: Sequence[str]) -> None:
    """Set environment variables of this process to secrets, each given as ``<variable>=<reference>``.

    Raises:
        ConfigError: A secret does not exist, or this node may not read it, which no restart corrects.
        ValueError: The service does not respond.
    """
    for pair in pairs:
        name, _, reference = pair.partition("=")
        if not (read := find_reader(reference)):
            raise ConfigError(f"launch.secrets.{name}={reference} is no reference to a secret; try {EXAMPLE}")
        try:
            os.environ[name] = read(reference)
        except Exception as error:  # each cloud raises its own exceptions
            is_answer = getattr(error, "response", None) is not None or isinstance(error, KeyError | ValueError)
            is_answer = is_answer and not isinstance(error, UnreachableError)
            raise (ConfigError if is_answer else ValueError)(
                f"launch.secrets.{name}={reference}: cannot be read ({error_text(error)}); check that it exists, and "
                "that the identity of this node may read it"
            ) from error
