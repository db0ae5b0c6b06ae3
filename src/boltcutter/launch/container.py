"""Launch runs in a container on this machine, in the background."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from boltcutter.config.errors import one_line
from boltcutter.launch.cloud_job import job_name
from boltcutter.launch.job import Job, assignments, render_template, run
from boltcutter.launch.local import LocalLauncher

ANSWER_SECONDS = 60  # that the engine has


@dataclass(kw_only=True, eq=False)
class ContainerLauncher(LocalLauncher):
    """Start the run in a container, as the user who launches it; project and run folder have the same paths there.

    Args:
        image: Container image, such as one built from the project's Dockerfile; for apptainer also a .sif file.
        engine: Container engine: docker, podman or apptainer.
        mounts: Folders to mount besides those of the project and the run: source, source:target or source:target:ro.
        shm_size: Size of /dev/shm, through which dataloader workers send batches; apptainer uses that of this machine.
        grace: Seconds between SIGTERM, on which the run saves, and SIGKILL, if the engine stops the container.
        pass_environment: Names of variables, such as secrets, whose values the container gets when it starts.
        options: Further options of the engine, such as ["--network=host"]; rootless docker needs ["--user=0:0"].
        torchrun: Whether torchrun starts the processes; otherwise Lightning does.
        python: Python interpreter in the image.
        environment: Environment variables of the run.
        snapshot: Whether the run uses a copy of the code made at submission.
    """

    option = "container"
    log_name = "container.log"

    image: str | None = None
    engine: Literal["docker", "podman", "apptainer"] = "docker"
    mounts: list[str] = field(default_factory=list)
    shm_size: str = "8g"
    grace: int = 600
    pass_environment: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    python: str = "python"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[0-9]+[bkmg]?", self.shm_size, re.I):
            raise ValueError(f"launch.shm_size={self.shm_size} is not a size; try launch.shm_size=8g")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that the engine cannot run on this machine."""
        super().check(job)
        if not self.image:
            example = "docker build -t my-project ., then launch.image=my-project"
            raise ValueError(f"launch.image: not set; build one from the project's Dockerfile: {example}")
        if self.engine == "apptainer" and self.image.endswith(".sif") and not Path(self.image).is_file():
            raise ValueError(f"launch.image={self.image}: no such file; run apptainer build {self.image} <image>")
        for mount in self.mounts:
            source = mount.partition(":")[0]
            if not os.path.isabs(source) or not os.path.exists(source):
                raise ValueError(f"launch.mounts={source}: no such file or folder; give its absolute path")
        for path in job.mounts:
            if ":" in path:
                raise ValueError(f"{path}: engines cannot mount a path with :; rename the folder")

    def render(self, job: Job) -> str:
        """Render a shell script with the command of the engine, an option on each line."""
        root = job.mounts[0]
        is_mapped = self.engine == "podman" and os.getuid() != 0
        return render_template(
            Path(__file__).with_name("container.sh.j2"),
            own=self,
            quote=shlex.quote,
            assignments=assignments,
            root=root,
            gpus=job.gpus and shutil.which("nvidia-smi"),
            name=job_name(job),
            user="--userns keep-id" if is_mapped else f"--user {os.getuid()}:{os.getgid()}",
            login=os.environ.get("USER", "user"),
            variables={"PYTHONPATH": f"{job.code or root}/src", **job.environment, **self.environment},
            mounts=[mount if ":" in mount else f"{mount}:{mount}" for mount in (*job.mounts, *self.mounts)],
            command=shlex.join(self.command(job)),
        )

    def submit(self, job: Job, file: Path) -> list[str]:
        """Start the container; its output is written to the folder of the run, and the engine removes it at its end."""
        try:
            done = run(self.engine, "version", timeout=ANSWER_SECONDS)
        except FileNotFoundError:
            raise ValueError(f"launch.engine={self.engine} is not installed; install it, or choose another") from None
        if done.returncode:
            raise ValueError(f"launch.engine={self.engine} does not work: {one_line(done.stderr)}; start it first")
        return super().submit(job, file)
