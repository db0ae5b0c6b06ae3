"""Requests to Azure Resource Manager with azure-core, and the credentials of azure-identity.

The package azure-ai-ml needs 112 MB, and pins packages that others need in newer versions, for five requests.
azure-core and azure-identity come with adlfs, which reads and writes runs on Blob Storage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter_launch.job import NoAnswerError, as_error

if TYPE_CHECKING:
    from azure.core import PipelineClient

VERSION = "2024-10-01"  # of Azure's REST API for machine learning
TIMEOUT = 30.0  # seconds to wait for an answer
RETRIES = 3  # of a request that is not answered, or that is rejected because of too many requests
LOGIN = "run az login"
REMEDIES = {
    401: LOGIN,
    403: "ask for the role AzureML Data Scientist on the workspace",
    429: "try again later",
    409: "cancel the earlier job, or choose another name",
}


def connect(endpoint: str) -> PipelineClient[Any, Any]:
    """Return a client with the credentials of az login, of the environment or of this machine."""
    try:
        from azure.core import PipelineClient
        from azure.core.exceptions import ClientAuthenticationError
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy, RetryPolicy
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError:
        raise ValueError(f"launch=azureml: adlfs is not installed; {install_command('adlfs')}") from None
    credential, scope = DefaultAzureCredential(), f"{endpoint}/.default"
    try:
        credential.get_token(scope)
    except ClientAuthenticationError as error:
        text = str(error.message)
        found = re.search(r"\w+Credential: Authentication failed.*", text)
        reason = found[0] if found else text.partition("\n")[0]
        raise ValueError(f"launch=azureml: no valid credentials of Azure ({one_line(reason, 400)}); {LOGIN}") from None
    policies = [RetryPolicy(retry_total=RETRIES), BearerTokenCredentialPolicy(credential, scope)]
    return PipelineClient(endpoint, policies=policies)


def call(
    client: PipelineClient[Any, Any],
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    version: str = VERSION,
) -> dict[str, Any]:
    """Send a request; returns the answer.

    Raises:
        ValueError: The request was rejected; the message has the reason that Azure gives.
        UnreachableError: Azure does not respond, or cannot answer now.
    """
    from azure.core.exceptions import AzureError, HttpResponseError
    from azure.core.rest import HttpRequest

    request = HttpRequest(method, url, params={"api-version": version}, json=body)
    try:
        answer = client.send_request(request, connection_timeout=TIMEOUT, read_timeout=TIMEOUT)
        answer.raise_for_status()
        return dict(answer.json()) if answer.content else {}
    except HttpResponseError as error:
        status = error.status_code or 401  # none: the credentials could not be renewed
        reason = f"{error.error.code}: {error.error.message}" if error.error else error.message
        raise as_error("azureml", status, reason, REMEDIES) from None
    except AzureError as error:
        host = url.split("/")[2]
        raise NoAnswerError(f"launch=azureml: no answer from {host} ({one_line(error, 400)}); try again") from None
