"""Launch runs on an instance of Amazon EC2, which terminates when the run has ended."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import yaml

from boltcutter.checkpoint.storage import resolve_filesystem, store_errors
from boltcutter_cloud import aws
from boltcutter_cloud.machines import check_devices, find_machine
from boltcutter_launch import jupyter as notebook
from boltcutter_launch.cloud import earlier_id
from boltcutter_launch.job import (
    Job,
    NoAnswerError,
    State,
    Status,
    assignments,
    first_output,
    render_template,
    seconds,
)
from boltcutter_launch.stored_runs import read

TAG = "boltcutter-job"  # of all that belongs to a job
# With the NVIDIA driver, Docker, Python 3.12 and the AWS CLI: https://docs.aws.amazon.com/dlami/latest/devguide
AMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
PROFILE_SECONDS = (3, 6, 12)  # between requests with an instance profile that EC2 does not know
MAX_USER_DATA = 16384  # bytes, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html
ALIVE = ("pending", "running", "stopping", "stopped")
HOME = "/opt/boltcutter"  # on the instance
PRIVATE = re.compile(r"""["']([\w.-]+(?:\[[\w,. -]*\])? *@ *(?:git\+)?(?:file|ssh):[^"']*)["']""")  # of requirements


@dataclass(kw_only=True, eq=False)
class EC2Launcher(aws.AwsLauncher):
    """Run on an instance that sets itself up, and terminates at the end.

    Args:
        instance_profile: Name or ARN of the instance profile with whose role the instance uses the storage.
        image: Container image with Python, the library and the project's dependencies; null: none is used.
        instance_type: Type of the instance, such as g5.12xlarge.
        spot: Whether to use a Spot Instance. EC2 stops an interrupted one, and starts it again when it has capacity.
        max_restarts: How often the training starts again after a failure or an interruption.
        disk_gb: Size of the root volume.
        ami: ID of the image of the machine, or a parameter of SSM that has it.
        root_device: Name of the root device of the AMI.
        install: Whether to create a virtual environment with the project's dependencies; not with an image.
        setup: Lines of shell that root runs at the first boot, before all else.
        jupyter: Whether to start JupyterLab with the project instead of training.
        idle_minutes: Minutes without activity after which JupyterLab, and with it the job, ends.
        python: Python interpreter that creates the environment, or runs the training if there is none.
        time: Lifetime of the instance, which then terminates, D-HH:MM:SS or H:MM:SS.
    """

    option, job_file = "ec2", "job.yaml"
    search_hint = f"look for the tag {TAG}={{name}}, cancel a Spot request that has it, and terminate the instance"
    id_form = rf"({aws.REGION})/([a-z0-9-]+)", "<region>/<tag of the job>"
    ranges: ClassVar = {"time": ("0:06:00", None), "disk_gb": (8, None)}  # with the time to set the instance up

    instance_profile: str | None = None
    image: str | None = None
    instance_type: str | None = None
    spot: bool = False
    max_restarts: int = 10
    disk_gb: int = 100
    ami: str = AMI
    root_device: str = "/dev/sda1"
    install: bool = True
    setup: list[str] = field(default_factory=list)
    jupyter: bool = False
    idle_minutes: float = 60
    python: str = ""

    def __post_init__(self) -> None:
        self.install = self.install and not self.image
        self.python = self.python or ("python" if self.image else "python3")
        super().__post_init__()

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that EC2 cannot run, as far as can be known before submission."""
        super().check(job)
        if job.nodes > 1:
            raise ValueError(
                f"trainer.num_nodes={job.nodes}: launch=ec2 starts one instance; use launch=sky or launch=aws_batch"
            )
        self.check_set("instance_type", f"try launch.instance_type={'g5.xlarge' if job.gpus else 'm7i.xlarge'}")
        self.check_set("instance_profile", "it gives access to the storage; docs/cloud.md shows how to create one")
        if self.install and job.root:
            check_requirements(job.root)
        machine = str(self.instance_type)
        check_devices("launch.instance_type", machine, find_machine("ec2", machine), job)
        if (size := len(self._user_data(job).encode())) > MAX_USER_DATA:
            raise ValueError(
                f"launch.setup: the script of the instance has {size} bytes with it and the variables, but EC2 takes "
                f"{MAX_USER_DATA}; move its lines to a script in the project or to an AMI"
            )

    def command(self, job: Job) -> list[str]:
        """Return the command that the instance runs."""
        return [f"{HOME}/venv/bin/python" if self.install else self.python, *super().command(job)[1:]]

    def render(self, job: Job) -> str:
        """Render the request for the instance, with the script that it runs.

        Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html.
        """
        request = self.fill(Path(__file__).with_name("ec2.yaml.j2"), job, user_data=self._user_data(job), tag=TAG)
        region = f" --region {self.region}" if self.region else ""
        submit = f"aws ec2 run-instances{region} --cli-input-yaml file://{self.job_file}"
        return self.job_yaml(request, job, submit)

    def _user_data(self, job: Job) -> str:
        """Render the script that cloud-init runs on the instance at its first boot.

        systemd then runs the job at each boot, and stops it before the network.
        """
        url, variables = shlex.quote(self.remote_folder(job.folder)), self.variables(job)
        program = shlex.join(self.command(job))
        if self.image:
            options = ["--rm", "--network=host", "--ipc=host", *(["--gpus=all"] if job.gpus else [])]
            options += [f"--env={name}" for name in ("AWS_DEFAULT_REGION", *variables)]
            program = f"docker run {shlex.join(options)} {shlex.quote(self.image)} {program}"
        head = [f"url={url}", *(["notice=/run/boltcutter-notice"] if self.spot else [])]
        packages = ["s3fs", *(["jupyterlab", "ipykernel"] if self.jupyter else [])]
        return render_template(
            Path(__file__).with_name("ec2_user_data.sh.j2"),
            own=self,
            home=HOME,
            name=job.name,
            url=url,
            image=shlex.quote(self.image) if self.image else "",
            registry=shlex.quote(str(self.image).partition("/")[0]),
            registry_region=aws.image_region(self.image or ""),
            python=shlex.quote(self.python),
            packages=shlex.join(packages) if self.install else "",
            variables="\n".join([*head, *assignments({"HOME": "/root", "PYTHONUNBUFFERED": "1", **variables})]),
            command=program,
            seconds=seconds(self.time),
        )

    def create(self, job: Job, file: Path) -> str:
        """Start the instance; returns the region and the tag of the job."""
        request = yaml.safe_load(file.read_text())
        ec2 = aws.client("ec2", self.region)
        job_id = f"{ec2.meta.region_name}/{request['ClientToken']}"
        if self.spot:  # from then on EC2 does not start it again
            limit = datetime.now(timezone.utc) + timedelta(seconds=seconds(self.time))
            request["InstanceMarketOptions"]["SpotOptions"]["ValidUntil"] = limit.replace(microsecond=0)
        if re.fullmatch(self.id_form[0], earlier := earlier_id(job)):
            self.cancel(earlier)  # it has ended, but may have left a stopped Spot Instance, whose disk is billed
        self._run(ec2.meta.region_name, request)
        seen = {"Filters": _tagged(request["ClientToken"]), "WaiterConfig": {"Delay": 1, "MaxAttempts": 30}}
        with suppress(ValueError), aws.as_value_errors():  # until then, the status would be that of an ended job
            ec2.get_waiter("instance_exists").wait(**seen)
        return job_id

    def _run(self, region: str, request: dict[str, Any]) -> None:
        """Start the instance; its profile may not be visible to EC2 for some seconds after it was created.

        Source: https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html, on eventual consistency.
        """
        for delay in (*PROFILE_SECONDS, None):
            try:
                aws.call("ec2", region, "run_instances", **request)
                return
            except ValueError as error:
                if isinstance(error, NoAnswerError) or "iamInstanceProfile" not in str(error):
                    raise
                if delay is None:
                    fault = f"launch.instance_profile={self.instance_profile}: {error}"
                    raise ValueError(f"{fault}; correct it, or create it in IAM") from error
                time.sleep(delay)

    def status(self, job_id: str) -> Status:
        """Return the status of the instance."""
        region, token = self.split_id(job_id)
        found, requests = _instances(region, token), _spot_requests(region, token)
        states = [instance["State"]["Name"] for instance in found]
        alive = [state for state in states if state in ALIVE]
        waiting = [request for request in requests if request["State"] == "open"]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no instances"
        text = f"job {token}, {counted}"
        if "stopped" in alive and self.spot and not requests:
            text += "; its Spot request has expired, so it does not start again; cancel or resume the run"
            return Status("ended", f"{text}, as its disk is billed")
        if "stopped" in alive or waiting:
            return Status("pending", f"{text}, waits for Spot capacity" if self.spot else text)
        state: State = "pending" if "pending" in alive else "running" if alive else "ended"
        if self.jupyter and alive:
            instance = next(one["InstanceId"] for one in found if one["State"]["Name"] in ALIVE)
            text += "\n" + notebook.tunnel("ec2", instance, region=region)
        return Status(state, text)

    def cancel(self, job_id: str) -> None:
        """Cancel the Spot request and terminate the instance, whose training saves while it shuts down."""
        region, token = self.split_id(job_id)
        requests = [request["SpotInstanceRequestId"] for request in _spot_requests(region, token)]
        if requests:  # before the instance, which EC2 would replace
            aws.call("ec2", region, "cancel_spot_instance_requests", SpotInstanceRequestIds=requests)
        found = [one["InstanceId"] for one in _instances(region, token) if one["State"]["Name"] in ALIVE]
        if found:
            aws.call("ec2", region, "terminate_instances", InstanceIds=found)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of rank 0; without any, the log of the instance."""
        return first_output(super().logs(job_id, folder, follow=follow), self._instance_log(folder))

    def _instance_log(self, folder: Path) -> Iterator[str]:
        place = f"{self.remote_folder(folder)}/logs"
        with store_errors(place):
            store, path = resolve_filesystem(place)
            names = [name.rpartition("/")[2] for name in store.glob(f"{path}/ec2-*.log")]
        for name in sorted(names):
            yield read(f"{place}/{name}").decode(errors="replace")


def check_requirements(project: Path) -> None:
    """Check that an instance can install what a project requires, as far as its addresses tell.

    Raises:
        ValueError: A requirement is on this machine, or needs a key.
    """
    file = project / "pyproject.toml"
    if file.is_file() and (match := PRIVATE.search(file.read_text())):
        raise ValueError(
            f"launch.install: pyproject.toml requires {match[1]}, which the instance cannot read; give an https address"
            ", set launch.image, or use an AMI that has it with launch.install=false"
        )


def _tagged(token: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{TAG}", "Values": [token]}]


def _instances(region: str, token: str) -> list[dict[str, Any]]:
    groups = aws.pages("ec2", region, "describe_instances", "Reservations", Filters=_tagged(token))
    return [one for group in groups for one in group["Instances"]]


def _spot_requests(region: str, token: str) -> list[dict[str, Any]]:
    """Return the requests that can still start an instance."""
    found = aws.call("ec2", region, "describe_spot_instance_requests", Filters=_tagged(token))["SpotInstanceRequests"]
    return [request for request in found if request["State"] in ("open", "active", "disabled")]
