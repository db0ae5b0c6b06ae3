"""Launch runs on Ray: on this machine, on an existing cluster, or through the Jobs API of a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from boltcutter.config.errors import one_line
from boltcutter.environment.ray_cluster import PORTS, check_reachable
from boltcutter.launch.job import (
    Job,
    NoAnswerError,
    Status,
    UnclearSubmissionError,
    UnreachableError,
    assignments,
    code_path,
    first_output,
)
from boltcutter.launch.local import LocalLauncher
from boltcutter.launch.stored_runs import StoredRuns
from boltcutter.project import install_command

STOP_SECONDS = 120  # that a cancelled job has to save; Ray's default is 3
ANSWER_SECONDS = 30  # that the Jobs API has
NO_AGENT = "No available agent"
STATES = {"PENDING": "pending", "RUNNING": "running"}


@dataclass(kw_only=True, eq=False)
class RayLauncher(StoredRuns, LocalLauncher):
    """Start the run on Ray, and restart its processes when one is lost.

    Args:
        address: ``host:port`` or ``auto``: cluster of which this machine is a node; ``http://host:8265``: cluster that
            starts the driver as a job; null: a Ray of its own on this machine, which ends with the run.
        storage: Parent URL of the runs, such as s3://bucket/runs, for a cluster whose nodes share no disk with this
            machine; null: they do.
        max_code_mb: Limit of the size of the project's files, which are sent to the storage with each job.
        cpus_per_task: CPUs of each process; null: one plus one for each dataloader worker.
        max_restarts: How often the processes are restarted when one is killed or a node is lost.
        timeout: Seconds to wait for a cluster, and for nodes with the requested resources.
        dashboard: Whether a Ray of its own has a dashboard.
        ports: Ports of a Ray of its own, by name: dashboard, metrics; others are free ports.
        python: Python interpreter of the nodes; null: the one that runs the launcher, or with ``storage`` python.
        environment: Environment variables of the run.
        snapshot: Whether the run uses a copy of the code made at submission.
    """

    option, log_name = "ray", "ray.log"
    kill = staticmethod(os.kill)  # Ray's processes must run until the driver has ended
    ranges: ClassVar = dict.fromkeys(("cpus_per_task", "max_restarts", "timeout"), (0, None))

    address: str | None = None
    storage: str | None = None
    max_code_mb: float = 50
    cpus_per_task: float | None = None
    max_restarts: int = 10
    timeout: float = 60
    dashboard: bool = False
    ports: dict[str, int] = field(default_factory=dict)
    torchrun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.python = self.python or ("python" if self.storage else None)
        super().__post_init__()
        if unknown := self.ports.keys() - PORTS:
            raise ValueError(f"launch.ports.{min(unknown)}: no such port; choose from {', '.join(PORTS)}")
        if self.address is not None and not re.fullmatch(r"auto|(https?://)?[\w.:\[\]-]+:[0-9]+/?", self.address):
            raise ValueError(f"launch.address={self.address}: expected auto, host:port or http://host:8265; correct it")
        if self.address and (self.dashboard or self.ports):
            name = "dashboard" if self.dashboard else "ports"
            raise ValueError(f"launch.{name}: that of an existing cluster is not changed; remove it or launch.address")

    @property
    def is_remote(self) -> bool:
        """Whether the cluster starts the driver as a job."""
        return "://" in (self.address or "")

    def check(self, job: Job) -> None:
        """Raise ValueError if the storage cannot be used, or a Ray of its own has too few nodes or no GPU."""
        if self.storage:
            self.check_storage(job)
            if not self.address:
                raise ValueError("launch.storage: a Ray of its own needs none; remove it, or set launch.address")
        if self.address:
            return
        if job.nodes != 1:
            raise ValueError(f"trainer.num_nodes={job.nodes}: a Ray of its own has one node; try launch.address=auto")
        if job.gpus and find_spec("torch"):
            from boltcutter.checks.hardware import unusable_gpus  # imports torch

            if fault := unusable_gpus():  # Ray would hide the GPUs, and the run train on the CPU
                raise ValueError(f"trainer.accelerator=auto: {fault}; install a build that fits the driver")

    def render(self, job: Job) -> str:
        """Render a shell script that starts the driver; also for ``ray job submit -- bash <script>``."""
        from boltcutter.launch.ray_driver import Plan

        command, folder = [str(self.python), *job.program, f"resume={job.folder}", *job.trust], str(job.folder)
        if self.storage:
            command, folder = self.command(job), self.remote_folder(job.folder)
        threads = {"OMP_NUM_THREADS": str(max(1, int(self.cpus(job))))}
        plan = Plan(
            folder=folder,
            command=command,
            nodes=job.nodes,
            devices=job.devices,
            gpus=job.gpus and (self.address is not None or _has_gpu()),
            cpus=self.cpus(job),
            environment={**threads, **job.environment, **self.environment},
            max_restarts=self.max_restarts,
            timeout=self.timeout,
            address="auto" if self.is_remote else self.address,
            dashboard=self.dashboard,
            ports=self.ports,
        )
        text = json.dumps(asdict(plan), indent=2)
        has_code = not self.storage or not self.is_remote  # where the driver runs
        lines = ["#!/bin/bash", *assignments(plan.environment), *(code_path(job) if has_code else [])]
        python = sys.executable if self.storage and has_code else str(self.python)
        lines.append(f"exec {shlex.quote(python)} -m boltcutter.launch.ray_driver <<'PLAN'\n{text}\nPLAN")
        return "\n".join(lines) + "\n"

    def cpus(self, job: Job) -> float:
        """Return the CPUs of each process."""
        return self.cpus_per_task if self.cpus_per_task is not None else 1 + job.num_workers

    def submit(self, job: Job, file: Path) -> list[str]:
        """Start the driver on this machine, or submit it as a job; returns the id of the process or of the job.

        Raises:
            ValueError: Ray is not installed, or the cluster cannot be reached.
        """
        if self.python == sys.executable and not find_spec("ray"):
            raise ValueError(f"launch=ray: ray is not installed; {install_command('ray')}, or try --dry-run")
        if self.address:
            check_reachable(self.address.rstrip("/"), "launch.address")
        if self.storage:
            self.send(job, file)
        if not self.is_remote:
            return super().submit(job, file)
        command = f"cd {shlex.quote(os.getcwd())} && exec bash {shlex.quote(str(file))}"
        if self.storage:
            command = f"bash -c {shlex.quote(file.read_text())}"
        variables, end = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}, time.monotonic() + self.timeout
        while True:
            try:
                return [str(self._call("submit_job", entrypoint=command, runtime_env={"env_vars": variables}))]
            except NoAnswerError as error:
                raise UnclearSubmissionError(f"{error}; see `ray job list` before you launch again") from None
            except UnreachableError as error:  # the head of a cluster answers before it can start jobs
                if NO_AGENT not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(1)

    def status(self, job_id: str) -> Status:
        """Return whether the driver or the job runs."""
        if not self.is_remote:
            return super().status(job_id)
        found = str(self._call("get_job_status", job_id).value)
        return Status(STATES.get(found, "ended"), f"job {job_id}, {found}")  # type: ignore[arg-type]

    def cancel(self, job_id: str) -> None:
        """Send SIGTERM, on which the run saves and ends."""
        if self.is_remote:
            self._call("stop_job", job_id)
        else:
            super().cancel(job_id)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of the driver and of all ranks; without a shared disk that of rank 0, else of the driver."""
        if not self.storage:
            yield from LocalLauncher.logs(self, job_id, folder, follow=follow)
            return
        stored = super().logs(job_id, folder, follow=follow)
        yield from first_output(stored, self._driver_log(job_id, folder))

    def _driver_log(self, job_id: str, folder: Path) -> Iterator[str]:
        if self.is_remote:
            yield str(self._call("get_job_logs", job_id))
        else:
            yield from LocalLauncher.logs(self, job_id, folder, follow=False)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the Jobs API of the cluster.

        Raises:
            UnreachableError: It does not respond, or with an error.
            NoAnswerError: The request may have had an effect.
        """
        from ray.job_submission import JobSubmissionClient
        from requests import ReadTimeout

        class Client(JobSubmissionClient):  # whose requests have no time-out
            def _do_request(self, *arguments: Any, **options: Any) -> Any:
                return super()._do_request(*arguments, **{"timeout": ANSWER_SECONDS} | options)

        try:
            return getattr(Client(self.address), name)(*arguments, **options)
        except (OSError, RuntimeError) as error:  # OSError: all of requests
            kind = NoAnswerError if isinstance(error, ReadTimeout) else UnreachableError
            fault = f"launch.address={self.address}: {one_line(error, 200)}"
            raise kind(f"{fault}; start its dashboard, or correct it") from None


def _has_gpu() -> bool:
    """Whether ``trainer.accelerator=auto`` is a GPU on this machine."""
    import torch  # slow import

    return torch.cuda.is_available()
