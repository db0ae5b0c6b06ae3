"""Launch runs in a container on this machine, in the background."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from boltcutter.config.errors import one_line
from boltcutter_launch.cloud import job_name
from boltcutter_launch.job import Job, run
from boltcutter_launch.local import LocalLauncher

ANSWER_SECONDS = 60  # that the engine and the driver of the GPUs have
Engine = Literal["docker", "podman", "apptainer"]


@dataclass(kw_only=True, eq=False)
class ContainerLauncher(LocalLauncher):
    """Start the run in a container, as the user who launches it; project and run folder have the same paths there.

    Args:
        image: Container image, such as one built from the project's Dockerfile; for apptainer also a .sif file.
        engine: Container engine: docker, podman or apptainer.
        mounts: Folders to mount besides those of the project and the run: source, source:target or source:target:ro.
        shm_size: Size of /dev/shm, through which dataloader workers send batches; apptainer uses that of this machine.
        user: User and group, such as 1000:1000; null: the user who launches. Rootless docker needs 0:0.
        grace: Seconds between SIGTERM, on which the run saves, and SIGKILL, if the engine stops the container.
        pass_environment: Names of variables, such as secrets, whose values the container gets when it starts.
        options: Further options of the engine, such as ["--network=host"].
        torchrun: Whether torchrun starts the processes; otherwise Lightning does.
        python: Python interpreter in the image.
        environment: Environment variables of the run.
        snapshot: Whether the run uses a copy of the code made at submission.
    """

    option = "container"
    log_name = "container.log"

    image: str | None = None
    engine: Engine = "docker"
    mounts: list[str] = field(default_factory=list)
    shm_size: str = "8g"
    user: str | None = None
    grace: int = 600
    pass_environment: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    python: str = "python"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"\d+[bkmg]?", self.shm_size, re.I):
            raise ValueError(f"launch.shm_size={self.shm_size} is not a size; try launch.shm_size=8g")
        if self.engine == "apptainer" and self.user:
            raise ValueError(f"launch.user={self.user}: apptainer runs as the user who launches; remove it")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that the engine cannot run on this machine."""
        super().check(job)
        if not self.image:
            example = "docker build -t my-project ., then launch.image=my-project"
            raise ValueError(f"launch.image: not set; build one from the project's Dockerfile: {example}")
        if self.engine == "apptainer" and self.image.endswith(".sif") and not Path(self.image).is_file():
            raise ValueError(f"launch.image={self.image}: no such file; run apptainer build {self.image} <image>")
        for source, target, _ in map(_split, self.mounts):
            if not os.path.isabs(source) or not os.path.isabs(target):
                raise ValueError(f"launch.mounts={source}: not an absolute path; try {os.path.abspath(source)}")
            if target in _outermost(job.mounts):
                raise ValueError(f"launch.mounts={target}: the project and the run are mounted already; remove it")
            if not os.path.exists(source):
                raise ValueError(f"launch.mounts={source}: no such file or folder; create it, or correct the path")
        for path in (*job.mounts, *(part for mount in self.mounts for part in _split(mount)[:2])):
            if found := re.search(r'[:,"]', path):
                raise ValueError(f"{path}: engines cannot mount a path with {found[0]}; rename the folder")
        available = count_gpus() if job.gpus else None
        if available is not None and job.devices > available:
            raise ValueError(
                f"trainer.devices={job.devices}: this machine has {available} GPU{'' if available == 1 else 's'}; "
                f"try trainer.devices={max(available, 1)}"
            )

    def render(self, job: Job) -> str:
        """Render a shell script with the command of the engine, an option on each line."""
        root = job.mounts[0]
        variables = {"PYTHONPATH": f"{job.code or root}/src", **job.environment, **self.environment}
        mounts = [(mount, mount, False) for mount in _outermost(job.mounts)] + [_split(mount) for mount in self.mounts]
        gpus = job.gpus and count_gpus() is not None
        if self.engine == "apptainer":
            lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
            command = ["apptainer exec", *(["--nv"] if gpus else []), f"--pwd {shlex.quote(root)}"]
            command += [
                f"--bind {shlex.quote(':'.join([source, target, *(['ro'] if read_only else [])]))}"
                for source, target, read_only in mounts
            ]
        else:
            lines, command = [], [f"{self.engine} run --rm", f"--name {job_name(job)}", *self._user()]
            command += [f"--workdir {shlex.quote(root)}", f"--shm-size {self.shm_size}"]
            command += [f"--stop-timeout {self.grace}"]
            if gpus:
                command.append("--gpus all" if self.engine == "docker" else "--device nvidia.com/gpu=all")
            command += [
                "--mount " + shlex.quote(f"type=bind,source={source},target={target}{',readonly' if read_only else ''}")
                for source, target, read_only in mounts
            ]
            variables = {"HOME": "/tmp", "USER": os.environ.get("USER", "user"), **variables}  # noqa: S108 - of a container
            command += [f"--env {shlex.quote(f'{name}={value}')}" for name, value in variables.items()]
            command += [f"--env {name}" for name in self.pass_environment]
        command += [*map(shlex.quote, self.options), shlex.quote(str(self.image)), shlex.join(self.command(job))]
        return "\n".join(["#!/bin/bash", *lines, "exec " + " \\\n  ".join(command)]) + "\n"

    def _user(self) -> list[str]:
        if self.user:
            return [f"--user {shlex.quote(self.user)}"]
        if self.engine == "podman" and os.getuid() != 0:
            return ["--userns keep-id"]
        return [f"--user {os.getuid()}:{os.getgid()}"]

    def submit(self, job: Job, file: Path) -> list[str]:
        """Start the container; its output is written to the folder of the run, and the engine removes it at its end."""
        if shutil.which(self.engine) is None:
            others = [name for name in get_args(Engine) if shutil.which(name)]
            remedy = f"try launch.engine={others[0]}" if others else "install it"
            raise ValueError(f"launch.engine={self.engine} is not installed; {remedy}")
        if (done := run(self.engine, "version", timeout=ANSWER_SECONDS)).returncode:
            raise ValueError(f"launch.engine={self.engine} does not work: {one_line(done.stderr)}; start it first")
        return super().submit(job, file)


def count_gpus() -> int | None:
    """Return the number of NVIDIA GPUs of this machine; None without their driver, ValueError if it does not work."""
    if shutil.which("nvidia-smi") is None:
        return None
    if (done := run("nvidia-smi", "-L", timeout=ANSWER_SECONDS)).returncode:
        reason = one_line(done.stderr or done.stdout)
        raise ValueError(f"launch=container: nvidia-smi -L fails ({reason}); mend the driver of the GPUs")
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _split(mount: str) -> tuple[str, str, bool]:
    """Return source, target and whether the mount is read-only."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro"):
        raise ValueError(f"launch.mounts={mount}: {mode} is not known; write source, source:target or source:target:ro")
    return source, target or source, mode == "ro"


def _outermost(folders: list[str]) -> list[str]:
    """Return the folders that are not inside of another."""
    return [
        folder
        for folder in dict.fromkeys(folders)
        if not any(folder != other and Path(folder).is_relative_to(other) for other in folders)
    ]
