"""Launch runs as training jobs of Amazon SageMaker."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from boltcutter.config.errors import one_line
from boltcutter_cloud import aws
from boltcutter_cloud.machines import check_devices, find_machine
from boltcutter_launch import jupyter as jupyterlab
from boltcutter_launch.job import FINAL, ForbiddenError, Job, NoAnswerError, State, Status, UnreachableError, seconds

NOT_FOUND = {"ResourceNotFound", "ValidationException"}
LOG_GROUP = "/aws/sagemaker/TrainingJobs"  # https://docs.aws.amazon.com/sagemaker/latest/dg/logging-cloudwatch.html
WAITING = {"Starting", "Pending", "Downloading", "Interrupted", "Restarting"}  # secondary status before the run starts


@dataclass(kw_only=True, eq=False)
class SageMakerLauncher(aws.AwsLauncher):
    """Submit runs to SageMaker; the number of instances is ``trainer.num_nodes``.

    The job file is the input of ``aws sagemaker create-training-job``.

    Args:
        role: ARN of the role that the job has, which must be able to read the image and to write to ``storage``.
        image: Container image in Amazon ECR, in the region of the job.
        instance_type: Type of each instance, such as ml.g5.12xlarge.
        spot: Whether to use managed spot training, which starts the run again after an interruption.
        max_wait: Limit of the training time and of waiting for spot capacity together; null: ``time`` and one day.
        max_restarts: How often the job is started again after an internal error of SageMaker.
        disk_gb: Size of the disk of each instance; types with local disks have these instead, of a fixed size.
        jupyter: Whether to start JupyterLab with the project instead of training.
        idle_minutes: Minutes without activity after which JupyterLab, and with it the job, ends.
        time: Time limit of all attempts together, after which the run saves and ends, D-HH:MM:SS or H:MM:SS.
    """

    option = "sagemaker"
    # Region and name.
    id_form = (
        r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):[0-9]{12}:training-job/([a-zA-Z0-9-]+)",
        "the ARN of a training job",
    )
    # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    ranges: ClassVar = {"max_restarts": (0, 30), "disk_gb": (1, 16384), "time": ("0:00:01", "28-00:00:00")}

    role: str | None = None
    image: str | None = None
    instance_type: str = "ml.g5.xlarge"
    spot: bool = False
    max_wait: str | None = None
    max_restarts: int = 10
    disk_gb: int = 50
    jupyter: bool = False
    idle_minutes: float = 60

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that SageMaker cannot run, as far as can be known before submission."""
        super().check(job)
        self.check_set("role", "give the ARN of the job's role, launch.role=arn:aws:iam::<account>:role/<name>")
        self.check_set("image", "push it to Amazon ECR, and give its URI with the tag")
        if self.max_wait and not self.spot:
            raise ValueError(f"launch.max_wait={self.max_wait} applies to spot instances; set launch.spot=true too")
        if self.max_wait and seconds(self.max_wait, "launch.max_wait") < seconds(self.time):
            raise ValueError(
                f"launch.max_wait={self.max_wait} is less than launch.time={self.time}, which it includes; "
                f"try launch.max_wait={self.time}"
            )
        machine = find_machine("ec2", self.instance_type.removeprefix("ml."))
        check_devices("launch.instance_type", self.instance_type, machine, job)
        if machine and machine.gpus and self.disk_gb != type(self).disk_gb:
            print(
                f"note: launch.disk_gb={self.disk_gb}: {self.instance_type} has local disks, which SageMaker mounts "
                "instead, and refuses a larger size",
                file=sys.stderr,
            )

    def create(self, job: Job, file: Path) -> str:
        """Create the training job once; returns its ARN."""
        request = json.loads(file.read_text())
        try:
            return str(aws.call("sagemaker", self.region, "create_training_job", **request)["TrainingJobArn"])
        except ValueError as error:
            if not isinstance(error, NoAnswerError) and aws.error_code(error) != "ResourceInUse":
                raise
            created = _describe(self.region, request["TrainingJobName"])
            place = created.get("OutputDataConfig", {}).get("S3OutputPath")
            is_other = place != request["OutputDataConfig"]["S3OutputPath"]  # a job of another run
            if is_other or created.get("TrainingJobStatus") not in ("InProgress", "Stopping"):
                raise
            return str(created["TrainingJobArn"])  # of a request whose answer was lost

    def status(self, job_id: str) -> Status:
        """Return the status of a training job, with the reason of a failure."""
        region, name = self.split_id(job_id)
        if not (found := _describe(region, name)):
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
        if self.status(job_id).state not in FINAL:
            aws.call("sagemaker", region, "stop_training_job", TrainingJobName=name)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Return the output of all instances from CloudWatch."""
        region, name = self.split_id(job_id)
        query = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/algo-"}

        def read(since: float) -> Iterator[tuple[str, float, str]]:
            try:
                start = max(0, int(1000 * since))
                for event in aws.pages("logs", region, "filter_log_events", "events", **query, startTime=start):
                    yield event["eventId"], event["timestamp"] / 1000, _line(event, name)
            except UnreachableError:
                raise
            except ValueError as error:
                if (code := aws.error_code(error)) == "ResourceNotFoundException":
                    return  # no output is there yet
                raise ForbiddenError(str(error)) if code else error from error

        return self.follow_events(read, job_id, folder, follow=follow)


def _describe(region: str | None, name: str) -> dict[str, Any]:
    """Describe a training job; empty if it does not exist."""
    try:
        return aws.call("sagemaker", region, "describe_training_job", TrainingJobName=name)
    except ValueError as error:
        if aws.error_code(error) in NOT_FOUND and re.search("not f(ind|ound)", str(error)):
            return {}
        raise


def _line(event: dict[str, Any], name: str) -> str:
    """Return a line of output; lines of instances other than the first begin with their host."""
    host = re.sub(r"-[0-9]+$", "", event["logStreamName"].removeprefix(f"{name}/"))
    return f"{'' if host == 'algo-1' else f'[{host}] '}{event['message'].rstrip()}\n"
