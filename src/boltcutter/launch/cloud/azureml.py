"""Launch runs on Azure Machine Learning as command jobs."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml

from boltcutter.launch.cloud.machines import check_devices, find_machine
from boltcutter.launch.cloud_job import CloudLauncher
from boltcutter.launch.job import Job, State, Status, render_yaml
from boltcutter.launch.rest_api import Api, connect_azure

VERSION = "2024-10-01"  # of the REST API
STORAGE = re.compile(r"\w+://(?P<container>[a-z0-9-]{3,63})(@(?P<account>[a-z0-9]{3,24})\.(dfs|blob)\.[\w.]+)?(/.*)?")
JOB = (
    r"/subscriptions/[\w-]+/resourceGroups/[\w.()-]+/providers/Microsoft\.MachineLearningServices"
    r"/workspaces/[\w-]+/jobs/([\w-]+)"
)
WORKSPACE = {  # settings with the parts of a workspace's path, and environment variables with their defaults
    "subscription": "AZURE_SUBSCRIPTION_ID",
    "resource_group": "AZURE_RESOURCE_GROUP",
    "workspace": "AZURE_ML_WORKSPACE",
}
ANONYMOUS = "CliV2AnonymousEnvironment"  # name that az ml gives to environments that only have an image
ENVIRONMENT = re.compile(r"azureml:(?P<name>[\w.-]+):(?P<version>[\w.-]+)|azureml://registries/[^/]+/environments/.+")
# https://learn.microsoft.com/rest/api/azureml/jobs/get#jobstatus; in all others, also Unknown, the job is running
STATES: dict[str, State] = {
    **dict.fromkeys(("NotStarted", "Scheduled", "Starting", "Provisioning", "Preparing", "Queued"), "pending"),
    **dict.fromkeys(("Completed", "Failed", "Canceled"), "ended"),
}


@dataclass(kw_only=True, eq=False)
class AzureMLLauncher(CloudLauncher):
    """Submit a run as a command job, on a compute cluster or on serverless compute.

    Args:
        subscription: ID of the subscription; null: ``AZURE_SUBSCRIPTION_ID``.
        resource_group: Resource group; null: ``AZURE_RESOURCE_GROUP``.
        workspace: Name of the workspace; null: ``AZURE_ML_WORKSPACE``.
        image: Container image with Python, the library and the project's dependencies, or an environment of the
            workspace as azureml:<name>:<version>.
        compute: Compute cluster; null: serverless compute.
        instance_type: Size of the machines of serverless compute, such as Standard_NC24ads_A100_v4.
        spot: Whether serverless compute uses low-priority machines; a cluster determines this itself.
        shm_size: Shared memory of each container, which dataloader workers need, such as 16g.
        inputs: Data to mount by name, such as {images: "azureml://datastores/<name>/paths/images"}; its folder is
            ``${oc.env:INPUT_IMAGES}`` in overrides of training.
        jupyter: Whether to start the JupyterLab of Azure ML with the project instead of training; it runs until the job
            is cancelled or its time limit is reached.
        resource_manager: Azure Resource Manager; other clouds of Azure have another.
    """

    option, protocols, notices = "azureml", ("abfss", "abfs", "az"), "azure"
    id_form, defaults = (JOB, "/subscriptions/…/jobs/<name>"), WORKSPACE
    forms: ClassVar = {
        **dict.fromkeys((*WORKSPACE, "compute"), (r"[\w.()-]+", "a name in Azure; correct it")),
        # https://learn.microsoft.com/rest/api/azureml/jobs/create-or-update#jobresourceconfiguration
        "shm_size": ("[0-9]+[bBkKmMgG]", "a size with its unit; try launch.shm_size=16g"),
    }

    subscription: str | None = None
    resource_group: str | None = None
    workspace: str | None = None
    image: str | None = None
    compute: str | None = None
    instance_type: str | None = None
    spot: bool = False
    shm_size: str = "16g"
    inputs: dict[str, str] = field(default_factory=dict)
    jupyter: bool = False
    resource_manager: str = "https://management.azure.com"

    def __post_init__(self) -> None:
        self.resource_manager = self.resource_manager.rstrip("/")
        super().__post_init__()
        for name in self.inputs:
            if not re.fullmatch(r"[A-Za-z]\w*", name):
                raise ValueError(f"launch.inputs.{name}: not a valid name; use letters, digits and _")
        variables = map(variable_of, self.inputs)
        self.environment = self.environment | {name: f"${name}" for name in variables}  # set only in the job

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that Azure ML cannot run, as far as can be known before submission."""
        super().check(job)
        found = STORAGE.fullmatch(str(self.storage))
        if not found or not (found["account"] or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
            raise ValueError(
                f"launch.storage={self.storage} has no storage account; try "
                f"launch.storage=abfss://{found['container'] if found else '<container>'}"
                f"@<account>.dfs.core.windows.net/runs"
            )
        self.check_set("image", "give the image of the nodes, launch.image=<registry>/<image>:<tag>")
        if not self.instance_type:
            example = "Standard_NC24ads_A100_v4" if job.gpus else "Standard_D8s_v5"
            self.check_set("compute", f"give a cluster, or try launch.instance_type={example}")
        elif self.compute:
            raise ValueError(f"launch.instance_type={self.instance_type}: set by launch.compute; remove one of them")
        else:
            check_devices("launch.instance_type", self.instance_type, find_machine("azure", self.instance_type), job)
        if self.jupyter and job.nodes > 1:
            raise ValueError(
                f"trainer.num_nodes={job.nodes}: launch.jupyter=true uses one machine; set trainer.num_nodes=1"
            )
        if self.compute and self.spot:
            raise ValueError("launch.spot=true: set by launch.compute; remove one of them")

    @property
    def _workspace(self) -> str:
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )

    def render(self, job: Job) -> str:
        """Render the file for ``az ml job create``.

        Source: https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command.
        """
        where = zip(("--subscription", "--resource-group", "--workspace-name"), WORKSPACE, strict=True)
        place = [text for option, name in where for text in (option, str(getattr(self, name)))]
        submit = shlex.join(["az", "ml", "job", "create", "--file", self.job_file, *place])
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        content = self.fill(
            Path(__file__).with_name("azureml.yaml.j2"),
            job,
            display_name=f"{job.name}/{job.folder.name}",
            experiment=re.sub("[^a-zA-Z0-9_-]+", "-", job.name).strip("-_") or "run",
            shell=self._shell(job),
            account={"AZURE_STORAGE_ACCOUNT_NAME": account} if account else {},
            inputs={variable_of(name): name for name in self.inputs},
        )
        return self.job_yaml(content, job, submit)

    def _shell(self, job: Job) -> str:
        # The identity of the cluster; adlfs would otherwise use the one of the machine.
        lines = ['[ -z "$DEFAULT_IDENTITY_CLIENT_ID" ] || export AZURE_CLIENT_ID="$DEFAULT_IDENTITY_CLIENT_ID"']
        lines += [f'export {variable_of(name)}="${{{{inputs.{name}}}}}"' for name in self.inputs]
        unpack = ["--unpack"] if self.jupyter else []
        command = shlex.join([*self.command(job), *unpack])  # the platform starts JupyterLab in the working directory
        return "; ".join([*lines, f"{command} && exec sleep infinity" if self.jupyter else f"exec {command}"])

    @cached_property
    def _api(self) -> Api:
        return connect_azure(self.resource_manager)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._api.call(method, f"{self.resource_manager}{path}?api-version={VERSION}", body)

    def check_credentials(self) -> None:
        """Raise ValueError if there are no credentials, or the workspace or the cluster does not exist."""
        self._call("GET", self._workspace + (f"/computes/{self.compute}" if self.compute else ""))

    def create(self, job: Job, file: Path) -> str:
        """Submit the job file; returns the path of the job in Azure."""
        place, content = self._workspace, yaml.safe_load(file.read_text())
        body = request_body(content, place)
        if isinstance(content["environment"], dict):
            image = {"image": content["environment"]["image"], "isAnonymous": True}
            self._call("PUT", body["environmentId"], {"properties": image})
        answer = self._call("PUT", path := f"{place}/jobs/{content['name']}", {"properties": body})
        # If there is a job of this name, Azure changes its tags, and answers with it.
        found = body | answer.get("properties", {})
        if found["command"] != body["command"] or STATES.get(found.get("status")) == "ended":
            raise ValueError(
                f"launch=azureml: the workspace has another job {content['name']}; launch the run in another folder"
            )
        return path

    def status(self, job_id: str) -> Status:
        """Return the status of a job, with the addresses of its page and of JupyterLab."""
        name = self.split_id(job_id)[0]
        found = self._call("GET", job_id)["properties"]
        state = str(found.get("status", "Unknown"))
        text = f"job {name}, {state}"
        services = found.get("services") or {}
        for name in ("Studio", "jupyter"):
            address = (services.get(name) or {}).get("endpoint")
            if address and (name == "jupyter" or state != "Completed"):
                text += f", {name}: {address}"
        return Status(STATES.get(state, "running"), text)

    def cancel(self, job_id: str) -> None:
        """Cancel the job."""
        self.split_id(job_id)
        self._call("POST", f"{job_id}/cancel")


def variable_of(name: str) -> str:
    """Return the variable with the folder of an input."""
    return f"INPUT_{name.upper()}"


def request_body(content: Mapping[str, Any], workspace: str) -> dict[str, Any]:
    """Convert a job file to what Azure Resource Manager expects, as ``az ml job create`` does.

    Source: https://learn.microsoft.com/rest/api/azureml/jobs/create-or-update#commandjob.
    """
    environment, compute = content["environment"], content.get("compute")
    if isinstance(environment, dict):
        version = hashlib.sha256(environment["image"].encode()).hexdigest()
        environment_id = f"{workspace}/environments/{ANONYMOUS}/versions/{version}"
    elif (found := ENVIRONMENT.fullmatch(environment)) and found["name"]:
        environment_id = f"{workspace}/environments/{found['name']}/versions/{found['version']}"
    else:
        environment_id = environment
    return dict(
        render_yaml(
            Path(__file__).with_name("azureml_request.yaml.j2"),
            content=content,
            environment_id=environment_id,
            compute=f"{workspace}/computes/{compute.removeprefix('azureml:')}" if compute else None,
        )
    )
