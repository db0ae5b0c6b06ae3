"""Launch runs as training jobs of Amazon SageMaker."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from boltcutter.config.errors import one_line
from boltcutter_cloud import aws
from boltcutter_cloud.machines import Machine, check_devices, find_machine
from boltcutter_launch import jupyter as jupyterlab
from boltcutter_launch.cloud import CloudLauncher, drop_unset, next_name
from boltcutter_launch.job import (
    FINAL,
    ForbiddenError,
    Job,
    NoAnswerError,
    State,
    Status,
    UnreachableError,
    seconds,
)

# Limits of https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
MAX_ARGUMENT, MAX_IMAGE, MAX_VALUE = 256, 255, 512  # characters
ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/[\w+=,.@/-]+")
NOT_FOUND = {"ResourceNotFound", "ValidationException"}
LOG_GROUP = "/aws/sagemaker/TrainingJobs"  # https://docs.aws.amazon.com/sagemaker/latest/dg/logging-cloudwatch.html
WAITING = {"Starting", "Pending", "Downloading", "Interrupted", "Restarting"}  # secondary status before the run starts


@dataclass(kw_only=True, eq=False)
class SageMakerLauncher(CloudLauncher):
    """Submit runs to SageMaker; the number of instances is ``trainer.num_nodes``.

    Args:
        region: Region; null: that of AWS_REGION or of the AWS profile.
        role: ARN of the role that the job has, which must be able to read the image and to write to ``storage``.
        image: Container image in Amazon ECR, in the region of the job.
        instance_type: Type of each instance, such as ml.g5.12xlarge.
        spot: Whether to use managed spot training, which starts the run again after an interruption.
        max_wait: Limit of the training time and of waiting for spot capacity together; null: ``time`` and one day.
        max_restarts: How often the job is started again after an internal error of SageMaker.
        disk_gb: Size of the disk of each instance; types with local disks have these instead, of a fixed size.
        disk_kms_key: Key that encrypts this disk; objects on ``storage`` are encrypted as the bucket is configured.
        training_plan: ARN of a training plan, which has reserved the instances.
        keep_alive: Seconds for which the instances are retained, and paid, for a next job.
        subnets: Subnets of a VPC.
        security_groups: Security groups in this VPC, which must allow all traffic between their members.
        jupyter: Whether to start JupyterLab with the project instead of training.
        idle_minutes: Minutes without activity after which JupyterLab, and with it the job, ends.
        time: Time limit of all attempts together, after which the run saves and ends, D-HH:MM:SS or H:MM:SS.
    """

    option, job_file, protocols = "sagemaker", "job.json", ("s3",)
    # Region and name.
    id_form = r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):\d{12}:training-job/([a-zA-Z0-9-]+)", "the ARN of a training job"
    forms: ClassVar = {
        "region": aws.REGION_FORM,
        "role": (ROLE.pattern, "the ARN of a role; try arn:aws:iam::<account>:role/<name>"),
        "instance_type": (r"ml\..+", "a type of SageMaker, which begins with ml.; try ml.g5.xlarge"),
        "subnets": (r"subnet-[0-9a-z]+", "the ID of one; expected subnet-0123456789abcdef0"),
        "training_plan": (
            r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.*",
            "the ARN of a training plan; correct it",
        ),
        "security_groups": (r"sg-[0-9a-z]+", "the ID of one; expected sg-0123456789abcdef0"),
    }

    ranges: ClassVar = {
        **{"max_restarts": (0, 30), "keep_alive": (0, 21600), "disk_gb": (1, 16384)},
        "time": ("0:00:01", "28-00:00:00"),
    }

    region: str | None = None
    role: str | None = None
    image: str | None = None
    instance_type: str = "ml.g5.xlarge"
    spot: bool = False
    max_wait: str | None = None
    max_restarts: int = 10
    disk_gb: int = 50
    disk_kms_key: str | None = None
    training_plan: str | None = None
    keep_alive: int = 0
    subnets: list[str] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)
    jupyter: bool = False
    idle_minutes: float = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_resources()
        if self.max_wait is not None:
            if not self.spot:
                raise ValueError(f"launch.max_wait={self.max_wait} applies to spot instances; set launch.spot=true too")
            if (wait := seconds(self.max_wait)) < seconds(self.time):
                raise ValueError(f"launch.max_wait={self.max_wait}: {wait} s are less than launch.time; increase it")
        if self.keep_alive and self.spot:
            raise ValueError("launch.keep_alive: spot instances cannot be retained; remove it or launch.spot")
        for name, value in self.environment.items():
            if len(str(value)) > MAX_VALUE:
                raise ValueError(f"launch.environment.{name} has more than {MAX_VALUE} characters; shorten it")

    def _check_resources(self) -> None:
        machine = self._machine()
        if self.disk_kms_key and machine and machine.gpus:
            raise ValueError(
                f"launch.disk_kms_key: {self.instance_type} has local disks, which are always encrypted; remove it"
            )
        if bool(self.subnets) != bool(self.security_groups):
            missing = "security_groups" if self.subnets else "subnets"
            raise ValueError(f"launch.{missing}: not set, but a VPC needs subnets and security groups; set both")

    def _machine(self) -> Machine | None:
        return find_machine("ec2", self.instance_type.removeprefix("ml."))

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that SageMaker cannot run, as far as can be known before submission."""
        super().check(job)
        self.check_set("role", "give the ARN of the job's role, launch.role=arn:aws:iam::<account>:role/<name>")
        self._check_image(aws.known_region(self.region))
        check_devices("launch.instance_type", self.instance_type, self._machine(), job)
        machine = self._machine()
        if machine and machine.gpus and self.disk_gb != type(self).disk_gb:
            print(
                f"note: launch.disk_gb={self.disk_gb}: {self.instance_type} has local disks, which SageMaker mounts "
                "instead, and refuses a larger size",
                file=sys.stderr,
            )
        for argument in self.command(job):
            if len(argument) > MAX_ARGUMENT:
                raise ValueError(f"name: {argument} has more than {MAX_ARGUMENT} characters; shorten name or storage")

    def _check_image(self, region: str | None) -> None:
        self.check_set("image", "push it to Amazon ECR, and give its URI with the tag")
        place = aws.image_region(str(self.image))
        if not place or len(str(self.image)) > MAX_IMAGE:
            raise ValueError(f"launch.image={self.image}: SageMaker starts images of Amazon ECR; push it there")
        if region and place != region:
            raise ValueError(
                f"launch.image={self.image}: the image is in {place}, but the job in {region}; push it to {region}, or "
                f"set launch.region={place}"
            )

    def render(self, job: Job) -> str:
        """Render the input of ``aws sagemaker create-training-job --cli-input-json file://job.json``."""
        command, limit = self.command(job), seconds(self.time)
        resources = {
            "InstanceType": self.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": self.disk_gb,
            "VolumeKmsKeyId": self.disk_kms_key,
            "TrainingPlanArn": self.training_plan,
            "KeepAlivePeriodInSeconds": self.keep_alive or None,
        }
        wait = seconds(self.max_wait) if self.max_wait else limit + 86400
        network = {"Subnets": self.subnets, "SecurityGroupIds": self.security_groups}
        request = {
            "TrainingJobName": next_name(job),
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": command[:3],
                "ContainerArguments": command[3:],
            },
            "ResourceConfig": drop_unset(resources),
            "StoppingCondition": {"MaxRuntimeInSeconds": limit} | ({"MaxWaitTimeInSeconds": wait} if self.spot else {}),
            "EnableManagedSpotTraining": self.spot,
            # No CheckpointConfig: it copies a local folder, but the run itself writes checkpoints to its URL.
            "OutputDataConfig": {"S3OutputPath": f"{self.remote_folder(job.folder)}/sagemaker"},
            "EnableNetworkIsolation": False,  # the run writes to S3
            "Environment": self.variables(job),
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
            "VpcConfig": drop_unset(network),
            # For sessions of AWS Systems Manager
            "RemoteDebugConfig": {"EnableRemoteDebug": True} if self.jupyter else None,
            "RetryStrategy": {"MaximumRetryAttempts": self.max_restarts} if self.max_restarts else None,
        }
        return json.dumps(drop_unset(request), indent=2) + "\n"

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no credentials."""
        account, role = aws.check_credentials(self.region), ROLE.fullmatch(str(self.role))
        if role and role[1] != account:
            raise ValueError(
                f"launch.role={self.role} is not in the account {account} of the credentials; choose another"
            )
        self._check_image(aws.client("sagemaker", self.region).meta.region_name)  # may be that of the profile

    def create(self, job: Job, file: Path) -> str:
        """Create the training job once; returns its ARN."""
        request, client = json.loads(file.read_text()), aws.client("sagemaker", self.region)
        try:
            with aws.as_value_errors():
                return str(client.create_training_job(**request)["TrainingJobArn"])
        except ValueError as error:
            if not isinstance(error, NoAnswerError) and aws.error_code(error) != "ResourceInUse":
                raise
            created = _describe(client, request["TrainingJobName"])
            if created.get("TrainingJobStatus") not in ("InProgress", "Stopping"):
                raise
            return str(created["TrainingJobArn"])  # of a request whose answer was lost

    def status(self, job_id: str) -> Status:
        """Return the status of a training job, with the reason of a failure."""
        region, name = self.split_id(job_id)
        found = _describe(aws.client("sagemaker", region), name)
        if not found:
            return Status("unknown", f"training job {name}: not found in {region}")
        primary, secondary = found["TrainingJobStatus"], found.get("SecondaryStatus", "")
        state: State = "ended"
        if primary in ("InProgress", "Stopping"):
            state = "pending" if secondary in WAITING else "running"
        words = primary if secondary in ("", primary) else f"{primary} ({secondary})"
        reason = f": {one_line(found['FailureReason'])}" if found.get("FailureReason") else ""
        is_used = self.jupyter and state != "ended"
        how = f"\n{jupyterlab.tunnel('sagemaker', name, region=region)}\n" if is_used else ""
        return Status(state, f"training job {name}, {words}{reason}{how}")

    def cancel(self, job_id: str) -> None:
        """Stop a training job: SageMaker sends SIGTERM, and SIGKILL after 120 seconds."""
        region, name = self.split_id(job_id)
        if self.status(job_id).state in FINAL:
            return
        with aws.as_value_errors():
            aws.client("sagemaker", region).stop_training_job(TrainingJobName=name)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Return the output of all instances from CloudWatch."""
        region, name = self.split_id(job_id)
        pages = aws.client("logs", region).get_paginator("filter_log_events")
        query = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/algo-"}

        def read(since: float) -> Iterator[tuple[str, float, str]]:
            try:
                with aws.as_value_errors():
                    for page in pages.paginate(**query, startTime=max(0, int(1000 * since))):
                        for event in page["events"]:
                            yield event["eventId"], event["timestamp"] / 1000, _line(event, name)
            except UnreachableError:
                raise
            except ValueError as error:
                if (code := aws.error_code(error)) == "ResourceNotFoundException":
                    return  # no output is there yet
                raise ForbiddenError(str(error)) if code else error from error

        return self.follow_events(read, job_id, folder, follow=follow)


def _describe(client: Any, name: str) -> dict[str, Any]:
    """Describe a training job; empty if it does not exist."""
    try:
        with aws.as_value_errors():
            return dict(client.describe_training_job(TrainingJobName=name))
    except ValueError as error:
        if aws.error_code(error) in NOT_FOUND and re.search("not f(ind|ound)", str(error)):
            return {}
        raise


def _line(event: dict[str, Any], name: str) -> str:
    """Return a line of output; lines of instances other than the first begin with their host."""
    host = re.sub(r"-\d+$", "", event["logStreamName"].removeprefix(f"{name}/"))
    return f"{'' if host == 'algo-1' else f'[{host}] '}{event['message'].rstrip()}\n"
