"""Requests to Azure Resource Manager with azure-core, and the credentials of azure-identity.

The package azure-ai-ml needs 112 MB, and pins packages that others need in newer versions, for five requests.
azure-core and azure-identity come with adlfs, which reads and writes runs on Blob Storage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
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
# Part of a workspace's path: environment variables in the order of precedence, and its name in config.json.
WORKSPACE = {
    "subscription": (("AZURE_SUBSCRIPTION_ID",), "subscription_id"),
    "resource_group": (("AZURE_RESOURCE_GROUP", "AZURE_DEFAULTS_GROUP"), "resource_group"),
    "workspace": (("AZURE_ML_WORKSPACE", "AZURE_DEFAULTS_WORKSPACE"), "workspace_name"),
}
ANONYMOUS = "CliV2AnonymousEnvironment"  # name that az ml gives to environments that only have an image
ENVIRONMENT = re.compile(r"azureml:(?P<name>[\w.-]+):(?P<version>[\w.-]+)|azureml://registries/[^/]+/environments/.+")
REMEDIES = {
    401: LOGIN,
    403: "ask for the role AzureML Data Scientist on the workspace",
    429: "try again later",
    409: "cancel the earlier job, or choose another name",
}


def workspace_path(settings: Mapping[str, str | None]) -> str:
    """Return the path of the workspace from the settings, the environment or the ``config.json`` of Azure ML."""
    file = next(filter(Path.is_file, map(Path, ("config.json", ".azureml/config.json"))), None)
    known = json.loads(file.read_text()) if file else {}
    values = []
    for name, (variables, key) in WORKSPACE.items():
        value = settings[name] or next(filter(None, map(os.environ.get, variables)), None) or known.get(key)
        if not value:
            raise ValueError(
                f"launch.{name}: not set; give launch.{name}=…, export {variables[0]}=…, or save the config.json of "
                "the workspace here"
            )
        if not re.fullmatch(r"[\w.()-]+", value):
            raise ValueError(f"launch.{name}={value} is not a name in Azure; correct it")
        values.append(value)
    return "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.MachineLearningServices/workspaces/{}".format(
        *values
    )


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


def request_body(content: Mapping[str, Any], workspace: str) -> dict[str, Any]:
    """Convert a job file to what Azure Resource Manager expects, as ``az ml job create`` does.

    Source: https://learn.microsoft.com/rest/api/azureml/jobs/create-or-update#commandjob.
    """
    environment, compute, distribution = content["environment"], content.get("compute"), content["distribution"]
    if isinstance(environment, dict):
        version = hashlib.sha256(environment["image"].encode()).hexdigest()
        environment_id = f"{workspace}/environments/{ANONYMOUS}/versions/{version}"
    elif (found := ENVIRONMENT.fullmatch(environment)) and found["name"]:
        environment_id = f"{workspace}/environments/{found['name']}/versions/{found['version']}"
    else:
        environment_id = environment
    resources = {"instanceCount": content["resources"]["instance_count"], "shmSize": content["resources"]["shm_size"]}
    if not compute:
        resources["instanceType"] = content["resources"]["instance_type"]
    body = {
        "jobType": "Command",
        "displayName": content["display_name"],
        "experimentName": content["experiment_name"],
        "command": content["command"],
        "environmentId": environment_id,
        "environmentVariables": content.get("environment_variables", {}),
        "distribution": {
            "distributionType": "PyTorch",
            "processCountPerInstance": distribution["process_count_per_instance"],
        },
        "resources": resources,
        "limits": {"jobLimitsType": "Command", "timeout": f"PT{content['limits']['timeout']}S"},
        "identity": {"identityType": "Managed"},
        "inputs": {
            name: {"jobInputType": value["type"], "uri": value["path"], "mode": "ReadOnlyMount"}
            for name, value in content.get("inputs", {}).items()
        },
        "tags": content.get("tags", {}),
    }
    if compute:
        body["computeId"] = f"{workspace}/computes/{compute.removeprefix('azureml:')}"
    else:
        body["queueSettings"] = {"jobTier": content["queue_settings"]["job_tier"].capitalize()}
    if "services" in content:
        body["services"] = {name: {"jobServiceType": "JupyterLab"} for name in content["services"]}
    return body
