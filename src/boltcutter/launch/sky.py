"""Launch runs with SkyPilot, as managed jobs on any of its clouds, by its command-line tool.

SkyPilot's packages conflict with those of this library, so it is installed into an environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from boltcutter import run_files
from boltcutter.config.errors import one_line
from boltcutter.launch.cloud_job import CloudLauncher
from boltcutter.launch.job import (
    Job,
    NoAnswerError,
    State,
    Status,
    UnreachableError,
    first_output,
    render_template,
    run,
    seconds,
)

INSTALL = "uv tool install --with pip 'skypilot[aws,gcp,kubernetes]>=0.14', then run sky check"
TIMEOUT = 300  # seconds for a command; the first one starts SkyPilot's server
LAUNCH_TIMEOUT = 1800  # seconds to submit, which starts the machine of the jobs controller if there is none
HERE = Path(__file__).parent
VENV = "boltcutter-venv"  # on the nodes, in the working directory of a task
NO_CONTROLLER = "No in-progress managed jobs"
# Clouds that have the setting remote_identity.
IDENTITIES = ("aws", "azure", "gcp", "kubernetes")
NOTICES = {"aws": "ec2", "azure": "azure", "gcp": "gce"}  # names of their metadata servers
# https://docs.skypilot.co/en/latest/reference/cli.html#sky-jobs-queue; a state that is not known here is not final.
STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "RECOVERING"), "pending"),
    **dict.fromkeys(("SUCCEEDED", "CANCELLED", "FAILED", "FAILED_SETUP", "FAILED_PRECHECKS"), "ended"),
    **dict.fromkeys(("FAILED_NO_RESOURCE", "FAILED_CONTROLLER"), "ended"),
}


@dataclass(kw_only=True, eq=False)
class SkyLauncher(CloudLauncher):
    """Submit a run as a managed job, which SkyPilot moves to where there is capacity.

    Args:
        infra: Where the job may run: cloud, cloud/region or cloud/region/zone, such as [aws/us-east-1, gcp, k8s]; the
            cheapest that has capacity is used.
        gpu_type: GPU as SkyPilot names it, such as H100, or several of which any will do.
        cpus: CPUs of each node: 16, or 16+ for at least 16; null: one for each process and dataloader worker.
        memory: Memory of each node in GB: 64, or 64+ for at least 64.
        image: Container image with Python, the library and the project's dependencies; null: none is used.
        install: Whether to create a virtual environment with the project's dependencies; not with an image.
        setup: Lines of shell that each node runs before all else.
        spot: Whether to use spot instances; an interrupted job continues on others.
        max_restarts: How often a job that has failed is started again; lost and interrupted nodes do not count.
        max_hourly_cost: Highest price of all nodes together, in dollars an hour.
        network_tier: Network between several nodes; best: EFA, InfiniBand or GPUDirect where there is one.
        disk_gb: Size of the disk of each node.
        grace: Seconds that a cancelled run has to save.
        secrets: Environment variables that hold secrets, and where each node reads its value; env: from the variable
            of this name here, whose value SkyPilot sends.
        time: Time limit of each attempt, H:MM:SS or D-HH:MM:SS.
        extra: Further fields of the task, such as {"resources": {"ports": 8080}}.
    """

    option, protocols = "sky", ("s3", "gs")
    id_form = r"([0-9]+)/[\w.-]+", "<number>/<name>"
    own_secret, secret_example = "env", "env"
    forms: ClassVar = {"infra": (r"[a-z0-9]+(/[^\s/*]+)*", "a place; try launch.infra=[aws/us-east-1]")}
    ranges: ClassVar = {"grace": (30, None), "disk_gb": (1, None)}

    infra: list[str] = field(default_factory=list)
    gpu_type: str | list[str] | None = None
    cpus: str | None = None
    memory: str | None = None
    image: str | None = None
    install: bool = True
    setup: list[str] = field(default_factory=list)
    spot: bool = False
    max_restarts: int = 3
    max_hourly_cost: float | None = None
    network_tier: Literal["standard", "best"] = "best"
    disk_gb: int = 100
    grace: int = 120
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.install = self.install and not self.image
        super().__post_init__()
        self.python = f"{VENV}/bin/python" if self.install else self.python

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that SkyPilot cannot run, as far as can be known before submission."""
        super().check(job)
        self.check_set("infra", "give the clouds or regions, such as launch.infra=[aws/us-east-1]")
        if job.gpus:
            self.check_set("gpu_type", "try launch.gpu_type=L4, or set trainer.accelerator=cpu")
        elif self.gpu_type:
            raise ValueError(f"launch.gpu_type={self.gpu_type}: the run uses no GPUs; remove it or trainer.accelerator")
        if missing := sorted(name for name in self._sent if name not in os.environ):
            raise ValueError(f"launch.secrets.{missing[0]}=env: not set in this environment; export it first")

    @property
    def notices(self) -> str | None:  # type: ignore[override]
        """Metadata server that announces interruptions; None if that depends on where the job runs."""
        found = {NOTICES.get(place.partition("/")[0]) for place in self.infra}
        return found.pop() if len(found) == 1 else None

    @property
    def _sent(self) -> list[str]:
        """Secrets that SkyPilot takes from the environment here."""
        return [name for name, place in self.secrets.items() if place == self.own_secret]

    def render(self, job: Job) -> str:
        """Render the task for ``sky jobs launch``.

        Source: https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
        """
        places = [{"infra": place} for place in self.infra]
        if self.gpu_type:
            kinds = self.gpu_type if isinstance(self.gpu_type, list) else [self.gpu_type]
            places = [{**one, "accelerators": f"{kind}:{job.devices}"} for one in places for kind in kinds]
        values = {"own": self, "venv": VENV, "command": shlex.join(self.command(job)), "seconds": seconds(self.time)}
        values["store"] = {"s3": "s3fs", "gs": "gcsfs"}[str(self.storage).partition("://")[0]]
        values["bundle"] = shlex.quote(f"{self.remote_folder(job.folder)}/{run_files.BUNDLE}")
        parts = ("setup", "run", "hook")
        scripts = {part: render_template(HERE / f"sky_{part}.sh.j2", **values) for part in parts}
        place = places[0] if len(places) == 1 else {"any_of": places}
        task = self.fill(HERE / "sky.yaml.j2", job, place=place, **scripts)
        return self.job_yaml(task, job, shlex.join(self._launch_command(self.job_file)))

    def _launch_command(self, file: str) -> list[str]:
        own = {place.partition("/")[0].replace("k8s", "kubernetes") for place in self.infra}
        command = ["sky", "jobs", "launch", "--yes", "--detach-run"]
        for cloud in IDENTITIES:  # by default, SkyPilot copies your keys for all clouds to the nodes
            command += ["--config", f"{cloud}.remote_identity={'SERVICE_ACCOUNT' if cloud in own else 'NO_UPLOAD'}"]
        for name in self._sent:
            command += ["--secret", name]
        return [*command, file]

    def check_credentials(self) -> None:
        """Raise ValueError if SkyPilot is not installed."""
        if not shutil.which("sky"):
            raise ValueError(f"launch=sky: sky is not installed; {INSTALL}")

    def create(self, job: Job, file: Path) -> str:
        """Submit the task; returns the number and the name of the job."""
        name = re.findall(r"^name: (.*)$", file.read_text(), re.M)[0]
        done = run_sky(*self._launch_command(str(file))[1:], timeout=LAUNCH_TIMEOUT)
        try:  # by the name, as an error or a time-out may come after the job was accepted
            named = [one for one in queue() if one["job_name"] == name]
        except UnreachableError as error:
            raise NoAnswerError(str(error)) from None
        known = [one["job_id"] for one in named if not done.returncode or STATES.get(one["status"]) != "ended"]
        if not known:
            raise ValueError(f"launch=sky: sky jobs launch fails: {fault(done)}; correct the setting, or run sky check")
        return f"{max(known)}/{name}"

    def status(self, job_id: str) -> Status:
        """Return the status of the job, with where it runs and why it has failed."""
        number = int(*self.split_id(job_id))
        facts = next((one for one in queue() if one["job_id"] == number), None)
        if not facts:
            return Status("ended", f"job {number}, no longer known to SkyPilot")
        parts = [f"job {number}", str(facts["status"])]
        parts += [f"on {facts['infra']}"] if facts.get("infra") not in (None, "", "-") else []
        parts += [f"recoveries {facts['recovery_count']}"] if facts.get("recovery_count") else []
        reason = facts.get("failure_reason")
        text = ", ".join(parts) + (f" ({one_line(reason, 400)})" if reason else "")
        return Status(STATES.get(str(facts["status"]), "running"), text)

    def cancel(self, job_id: str) -> None:
        """Cancel the job, whose training saves before the nodes are removed."""
        done = run_sky("jobs", "cancel", "--yes", *self.split_id(job_id))
        if done.returncode:
            raise ValueError(f"cancel: sky jobs cancel fails: {fault(done)}")

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of all nodes; without any, that of rank 0 from the storage."""
        options = ["--tail", "0", "--follow" if follow else "--no-follow"]
        command = ["sky", "jobs", "logs", *options, *self.split_id(job_id)]
        return first_output(output(*command), super().logs(job_id, folder, follow=follow))


def queue() -> list[dict[str, Any]]:
    """Return all managed jobs of the user; none while there is no controller.

    Raises:
        UnreachableError: SkyPilot does not respond.
    """
    done = run_sky("jobs", "queue", "--all", "--verbose", "--output", "json")
    if done.returncode == 0 and (found := re.search(r"^\[.*", done.stdout, re.M | re.S)):
        return list(json.loads(found[0]))
    if NO_CONTROLLER in done.stdout + done.stderr:
        return []
    raise UnreachableError(f"launch=sky: sky jobs queue fails: {fault(done)}; try again later")


def run_sky(*command: str, timeout: int = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run a command of SkyPilot; one that does not end in time has failed."""
    try:
        return run("sky", *command, env=environment(), timeout=timeout)
    except FileNotFoundError:
        raise ValueError(f"launch=sky: sky is not installed; {INSTALL}") from None


def output(*command: str) -> Iterator[str]:
    """Yield the output of a command of SkyPilot."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **options) as process:
        try:
            yield from process.stdout or ()
        finally:
            process.terminate()


def environment() -> dict[str, str]:
    """Return the environment of SkyPilot: without packages of this one, and without its collection of usage data."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}


def fault(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a command has printed."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", f"{done.stdout}\n{done.stderr}").splitlines()]
    return one_line(" ".join([line for line in lines if line][-3:]), 400)
