"""Render the job of EC2: the request for the instance, and the script that it runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter_cloud import aws
from boltcutter_launch.bundle import BUNDLE, RECORD
from boltcutter_launch.job import Job, assignments, render_template, seconds

if TYPE_CHECKING:
    from boltcutter_cloud.ec2 import EC2Launcher

HERE = Path(__file__).parent
HOME = "/opt/boltcutter"  # on the instance
VENV = f"{HOME}/venv/bin/python"
MAX_USER_DATA = 16384  # bytes, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
PRIVATE = re.compile(r"""["']([\w.-]+(?:\[[\w,. -]*\])? *@ *(?:git\+)?(?:file|ssh):[^"']*)["']""")  # of requirements


def render_job(ec2: EC2Launcher, job: Job, request: dict[str, Any]) -> str:
    """Render the shell script that submits the job, from which ``read_job`` gets the request."""
    return render_template(
        HERE / "ec2_job.sh.j2",
        time=ec2.time,
        files=f"{', '.join((BUNDLE, *RECORD[:2]))} of this folder",
        url=ec2.remote_folder(job.folder),
        request=json.dumps(request, indent=2),
        user_data=render_user_data(ec2, job),
        region=f" --region {shlex.quote(ec2.region)}" if ec2.region else "",
    )


def read_job(text: str) -> dict[str, Any]:
    """Return the arguments of ``run_instances`` in a rendered job."""
    found = [re.search(rf"<<'{name}' .*?\n(.*?)\n{name}\n", text, re.DOTALL) for name in ("REQUEST", "USER_DATA")]
    if not found[0] or not found[1]:
        raise ValueError("job.sh: has no REQUEST and USER_DATA; launch the run again")
    return {**json.loads(found[0][1]), "UserData": found[1][1] + "\n"}


def check_requirements(project: Path) -> None:
    """Check that an instance can install what a project requires, as far as its addresses tell.

    Raises:
        ValueError: A requirement is on this machine, or needs a key.
    """
    file = project / "pyproject.toml"
    if file.is_file() and (found := PRIVATE.search(file.read_text())):
        raise ValueError(
            f"launch.install: pyproject.toml requires {found[1]}, which the instance cannot read; give an https address"
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
    notice = ["notice=/run/boltcutter-notice"] if ec2.spot else []
    head = [f"url={url}", *notice]
    packages = ["s3fs", *(["jupyterlab", "ipykernel"] if ec2.jupyter else [])]
    return render_template(
        HERE / "ec2_user_data.sh.j2",
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
