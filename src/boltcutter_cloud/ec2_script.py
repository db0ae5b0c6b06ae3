"""Render the script that an instance of EC2 runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from boltcutter_cloud import aws
from boltcutter_launch.job import Job, assignments, render_template, seconds

if TYPE_CHECKING:
    from boltcutter_cloud.ec2 import EC2Launcher

HOME = "/opt/boltcutter"  # on the instance
VENV = f"{HOME}/venv/bin/python"
PRIVATE = re.compile(r"""["']([\w.-]+(?:\[[\w,. -]*\])? *@ *(?:git\+)?(?:file|ssh):[^"']*)["']""")  # of requirements


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


def render_user_data(ec2: EC2Launcher, job: Job) -> str:
    """Render the script that cloud-init runs on the instance at its first boot.

    systemd then runs the job at each boot, and stops it before the network.
    """
    url, variables = shlex.quote(ec2.remote_folder(job.folder)), ec2.variables(job)
    program = shlex.join(ec2.command(job))
    if ec2.image:
        options = ["--rm", "--network=host", "--ipc=host", *(["--gpus=all"] if job.gpus else [])]
        options += [f"--env={name}" for name in ("AWS_DEFAULT_REGION", *variables)]
        program = f"docker run {shlex.join(options)} {shlex.quote(ec2.image)} {program}"
    head = [f"url={url}", *(["notice=/run/boltcutter-notice"] if ec2.spot else [])]
    packages = ["s3fs", *(["jupyterlab", "ipykernel"] if ec2.jupyter else [])]
    return render_template(
        Path(__file__).with_name("ec2_user_data.sh.j2"),
        home=HOME,
        name=job.name,
        url=url,
        setup=ec2.setup,
        image=shlex.quote(ec2.image) if ec2.image else "",
        registry=shlex.quote(str(ec2.image).partition("/")[0]),
        registry_region=aws.image_region(ec2.image or ""),
        python=shlex.quote(ec2.python),
        packages=shlex.join(packages) if ec2.install else "",
        variables="\n".join([*head, *assignments({"HOME": "/root", "PYTHONUNBUFFERED": "1", **variables})]),
        command=program,
        spot=ec2.spot,
        restarts=ec2.max_restarts,
        time=ec2.time,
        seconds=seconds(ec2.time),
        minutes=-(-seconds(ec2.time) // 60),
    )
