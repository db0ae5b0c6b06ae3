"""Launch runs on Google Vertex AI as custom jobs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml

from boltcutter.config.errors import one_line
from boltcutter.launch.cloud.machines import check_devices, find_machine, read_machines
from boltcutter.launch.cloud_job import CloudLauncher
from boltcutter.launch.job import Job, State, Status, seconds
from boltcutter.launch.rest_api import Api, connect_google, google_endpoint

# https://cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws
FLEX_START_GPUS = {"NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB"}
FLEX_START_GPUS |= {"NVIDIA_H200_141GB", "NVIDIA_B200"}
FLEX_START_DAYS = 7
PAGE = 1000  # log entries in an answer, which is the maximum
# https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState; in all others the job is running
ENDED = ("SUCCEEDED", "PARTIALLY_SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
STATES: dict[str, State] = {
    **dict.fromkeys(("JOB_STATE_QUEUED", "JOB_STATE_PENDING"), "pending"),
    **dict.fromkeys((f"JOB_STATE_{name}" for name in ENDED), "ended"),
}


@dataclass(kw_only=True, eq=False)
class VertexLauncher(CloudLauncher):
    """Submit a run as a custom job: a worker pool for the first node, and one for all others.

    Args:
        project: ID of the project; null: GOOGLE_CLOUD_PROJECT.
        region: Region, such as us-central1; null: GOOGLE_CLOUD_REGION.
        image: Container image with Python, the library and the project's dependencies.
        machine_type: Machine of each node, such as g2-standard-8 or n2-standard-8.
        gpu_type: GPU to attach to each n1 machine, such as NVIDIA_TESLA_T4; other machines have theirs.
        spot: Whether to use spot VMs, which cost less and can be taken away at any time.
        max_wait: How long to wait for GPUs to become available, H:MM:SS or D-HH:MM:SS; null: do not wait. The job may
            then run for at most seven days.
        reservation: Reservation that the nodes use, projects/<project>/zones/<zone>/reservations/<name>.
        max_restarts: 0: Vertex AI does not restart the job; null: as often as it decides, when a node fails, is
            preempted or moved.
        disk_gb: Size of the boot disk, which holds the image and the data that is downloaded.
        service_account: Account with which the nodes access the storage; null: the service agent of Vertex AI.
        tags: Labels of the job, which also appear in the bill.
        extra: Further fields of the CustomJobSpec, such as {network: projects/123/global/networks/private}.
    """

    option, protocols, notices = "vertex", ("gs", "s3"), "gce"
    # Project, region and number.
    id_form = r"projects/([\w.:-]+)/locations/([a-z0-9-]+)/customJobs/([0-9]+)", "projects/…/customJobs/<number>"
    search_hint = "see gcloud ai custom-jobs list --project={own.project} --region={own.region}"
    pause = 15  # a project may read logs 60 times a minute, https://cloud.google.com/logging/quotas
    forms: ClassVar = {
        "project": (r"[a-z0-9.:-]+", "a project ID; try launch.project=my-project"),
        "region": (r"[a-z]+-[a-z]+[0-9]+", "a region; try launch.region=us-central1"),
    }
    ranges: ClassVar = {"disk_gb": (100, None)}
    defaults: ClassVar = {"project": "GOOGLE_CLOUD_PROJECT", "region": "GOOGLE_CLOUD_REGION"}

    project: str | None = None
    region: str | None = None
    image: str | None = None
    machine_type: str | None = None
    gpu_type: str | None = None
    spot: bool = False
    max_wait: str | None = None
    reservation: str | None = None
    max_restarts: int | None = None
    disk_gb: int = 100
    service_account: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_restarts:
            raise ValueError(f"launch.max_restarts={self.max_restarts}: Vertex AI decides how often; use null or 0")
        # Other scheduling strategies; https://cloud.google.com/compute/docs/instances/reservations-consume#limitations
        given = {"max_wait": self.max_wait, "spot=true": self.spot, "reservation": self.reservation}
        if len(found := [name for name, value in given.items() if value]) > 1:
            raise ValueError(f"launch.{found[0]}: not possible with launch.{found[1]}; remove one of them")
        if self.max_wait and seconds(self.time) > FLEX_START_DAYS * 86400:
            raise ValueError(f"launch.time={self.time}: at most {FLEX_START_DAYS} days with launch.max_wait; reduce it")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that Vertex AI cannot run, as far as can be known before submission."""
        super().check(job)
        example = f"{self.region}-docker.pkg.dev/{self.project}/<repository>/<image>:<tag>"
        self.check_set("image", f"give the image of the nodes, launch.image={example}")
        self.check_set("machine_type", f"try launch.machine_type={'g2-standard-8' if job.gpus else 'n2-standard-8'}")
        name, gpu = str(self.machine_type), self.gpu_type
        machine = find_machine("vertex", name)
        if self.max_wait and (found := self.gpus(job)) and found[0] not in FLEX_START_GPUS:
            raise ValueError(
                f"launch.max_wait: not possible with {found[0]}; remove it, or choose g2, a2 or a3 machines"
            )
        if gpu and (not job.gpus or (machine and not name.startswith("n1-"))):
            raise ValueError(f"launch.gpu_type={gpu}: only for n1 machines of runs that use GPUs; remove it")
        if not gpu:
            check_devices("launch.machine_type", name, machine, job)
        elif job.devices not in (counts := read_machines("vertex")["attachable"].get(gpu, [job.devices])):
            raise ValueError(
                f"trainer.devices={job.devices}: {name} takes {', '.join(map(str, counts))} {gpu}; try one"
            )

    def gpus(self, job: Job) -> tuple[str, int] | None:
        """Return the type and number of the GPUs of each node."""
        machine = find_machine("vertex", str(self.machine_type))
        if machine and machine.gpus:  # they must be named although the type of the machine determines them
            return machine.gpu_type, machine.gpus
        return (self.gpu_type, job.devices) if self.gpu_type else None

    def render(self, job: Job) -> str:
        """Render the file for ``--config`` of gcloud.

        Source: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec.
        """
        place = [f"--project={self.project}", f"--region={self.region}", f"--display-name={job.name}"]
        labels = [f"--labels={','.join(f'{key}={value}' for key, value in self.tags.items())}"] if self.tags else []
        submit = shlex.join(["gcloud", "ai", "custom-jobs", "create", *place, *labels, f"--config={self.job_file}"])
        spec = self.fill(Path(__file__).with_name("vertex.yaml.j2"), job, gpus=self.gpus(job))
        return self.job_yaml(spec, job, submit)

    @cached_property
    def _api(self) -> Api:
        return connect_google()

    def _call(self, method: str, region: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._api.call(method, f"{google_endpoint('aiplatform', f'{region}-')}/v1/{path}", body)

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no credentials."""
        _ = self._api

    def create(self, job: Job, file: Path) -> str:
        """Submit the job file; returns the full name of the job."""
        body = {"displayName": job.name[:128], "jobSpec": yaml.safe_load(file.read_text())}
        if self.tags:
            body["labels"] = self.tags
        path = f"projects/{self.project}/locations/{self.region}/customJobs"
        return str(self._call("POST", str(self.region), path, body)["name"])

    def status(self, job_id: str) -> Status:
        """Return the status of a job, with the reason if it has failed."""
        _, region, number = self.split_id(job_id)
        found = self._call("GET", region, job_id)
        state = str(found.get("state", "JOB_STATE_UNSPECIFIED"))
        reason = one_line(found.get("error", {}).get("message", ""))
        return Status(STATES.get(state, "running"), f"job {number}, {state}" + (f" ({reason})" if reason else ""))

    def cancel(self, job_id: str) -> None:
        """Cancel the job."""
        self._call("POST", self.split_id(job_id)[1], f"{job_id}:cancel", {})

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Return what all nodes have written, and messages of the platform, from Cloud Logging."""
        project, _, number = self.split_id(job_id)
        query = f'resource.type="ml_job" AND resource.labels.job_id="{number}"'

        def read(since: float) -> Iterator[tuple[str, float, str]]:
            start = f"{datetime.fromtimestamp(max(0.0, since), timezone.utc):%FT%TZ}"
            for entry in log_entries(self._api, project, f'{query} AND timestamp>="{start}"'):
                at = datetime.fromisoformat(f"{entry['timestamp'][:19]}+00:00").timestamp()
                yield entry["insertId"], at, _log_text(entry)

        return self.follow_events(read, job_id, folder, follow=follow)


def _log_text(entry: Mapping[str, Any]) -> str:
    node = entry.get("resource", {}).get("labels", {}).get("task_name", "")
    text = str(entry.get("textPayload") or entry.get("jsonPayload", {}).get("message", "")).rstrip("\n")
    return "".join(f"{node}: {line}\n" if node else f"{line}\n" for line in text.split("\n"))


def log_entries(api: Api, project: str, query: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of Cloud Logging that match a query, the oldest first."""
    body = {"resourceNames": [f"projects/{project}"], "filter": query, "orderBy": "timestamp asc", "pageSize": PAGE}
    while True:
        answer = api.call("POST", f"{google_endpoint('logging')}/v2/entries:list", body)
        yield from answer.get("entries", ())
        if not answer.get("nextPageToken"):
            return
        body = {**body, "pageToken": answer["nextPageToken"]}
