"""Launch runs on AWS Batch, with the image and the machines of a job definition and a queue that exist there."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from boltcutter.config.errors import one_line
from boltcutter_cloud import aws
from boltcutter_launch.job import FINAL, Job, NoAnswerError, State, Status, UnreachableError

MAX_ARRAY = 10_000  # runs, https://docs.aws.amazon.com/batch/latest/userguide/array_jobs.html
STATES: dict[str, State] = {"RUNNING": "running", "SUCCEEDED": "ended", "FAILED": "ended"}  # others: pending
FIND_SECONDS = (0, 2, 5)  # before each search for a job whose submission was not answered


@dataclass(kw_only=True, eq=False)
class AwsBatchLauncher(aws.AwsLauncher):
    """Submit runs to a queue of AWS Batch; with several nodes, as a multi-node parallel job.

    The job file is the input of ``aws batch submit-job``.

    Args:
        queue: Job queue, whose compute environment has the machines.
        job_definition: Job definition with the image, memory, CPUs and role; of type multinode for several nodes.
        max_restarts: How often the run is started again: after its host is lost or reclaimed, and on several nodes
            after every failure but a mistake in the configuration.
        time: Time limit of each attempt, H:MM:SS or D-HH:MM:SS.
        array: Overrides in which the runs of an array differ, such as "seed=1,2;optimizer.lr=0.1,0.01".
    """

    option = "aws_batch"
    # Region and ID, with the index in an array.
    id_form = r"arn:aws[a-z-]*:batch:([a-z0-9-]+):[0-9]{12}:job/([a-z0-9-]+(?::[0-9]+)?)", "the ARN of a job"
    index_variable = "AWS_BATCH_JOB_ARRAY_INDEX"
    ranges: ClassVar = {"time": ("0:01:00", None), "max_restarts": (0, 9)}

    queue: str | None = None
    job_definition: str | None = None
    max_restarts: int = 9
    array: str | list[str] | None = None

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that AWS Batch cannot run, as far as can be known before submission."""
        super().check(job)
        for name in ("queue", "job_definition"):
            self.check_set(name, "give the name of one; docs/cloud.md creates it")
        if job.array_size == 1 or job.array_size > MAX_ARRAY:
            remedy = "remove launch.array" if job.array_size == 1 else "launch several arrays"
            raise ValueError(f"launch.array: {job.array_size} runs, but AWS Batch takes 2 to {MAX_ARRAY}; {remedy}")

    def create(self, job: Job, file: Path) -> str:
        """Submit the job; returns its ARN."""
        request = json.loads(file.read_text())
        try:
            with aws.as_value_errors():  # once, since SubmitJob has no token by which AWS would know a repeated request
                return str(aws.client("batch", self.region, repeats=False).submit_job(**request)["jobArn"])
        except NoAnswerError:
            if found := self._find(request):
                return found
            raise

    def _find(self, request: dict[str, Any]) -> str | None:
        """Return the ARN of a job that was submitted although AWS did not answer; the name is unique to the run."""
        query = {"jobQueue": request["jobQueue"], "filters": [{"name": "JOB_NAME", "values": [request["jobName"]]}]}
        for delay in FIND_SECONDS:
            time.sleep(delay)
            with suppress(UnreachableError):
                for job in aws.pages("batch", self.region, "list_jobs", "jobSummaryList", **query):
                    if STATES.get(job["status"]) != "ended":
                        return str(job["jobArn"])
        return None

    def status(self, job_id: str) -> Status:
        """Return the status of a job."""
        region, number = self.split_id(job_id)
        found = aws.call("batch", region, "describe_jobs", jobs=[number])["jobs"]
        if not found:
            return Status("unknown", f"job {number}: not found in {region}")
        job = found[0]
        if "nodeProperties" in job:  # the container is that of the main node
            main = f"{number}#{job['nodeProperties']['mainNode']}"
            nodes = aws.call("batch", region, "describe_jobs", jobs=[main])["jobs"]
            job = {**(nodes[0] if nodes else {}), **job}
        reasons = [job.get("statusReason"), job.get("container", {}).get("reason")]
        text = ": ".join([f"job {number}, {job['status']}", *map(one_line, filter(None, reasons))])
        return Status(STATES.get(job["status"], "pending"), text)

    def cancel(self, job_id: str) -> None:
        """Terminate a job: AWS Batch sends SIGTERM, and SIGKILL after 30 seconds."""
        region, number = self.split_id(job_id)
        if self.status(job_id).state not in FINAL:
            aws.call("batch", region, "terminate_job", jobId=number, reason="canceled by the launcher")
