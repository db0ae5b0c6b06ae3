"""JupyterLab on the machine of a job, instead of training: ``launch.jupyter=true``.

The server is bound to 127.0.0.1 behind a random token, which is written to a file of the machine, and never to the job
file or to logs. It is reached through a tunnel of the platform, and ends when it has been idle for a while; with it
ends the job.

A launcher with the setting ``jupyter`` shows ``tunnel`` with the status of a job. A running cell, output of a terminal
and an open page in a visible tab are activity; kernels and terminals without it are shut down, and then the server.
"""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from boltcutter.config.errors import ConfigError

PORT = 8888
TOKEN_FILE = Path("/tmp/boltcutter-jupyter-token")  # noqa: S108 - the same on all machines, readable only by the user of the job
POLL_SECONDS = 60  # between two checks whether kernels and terminals are idle


def prepare(project: Path, idle_minutes: float) -> list[str]:
    """Write a new token, and return the arguments of the Python interpreter that start JupyterLab."""
    if find_spec("jupyterlab") is None:
        raise ConfigError(
            "jupyterlab is not installed on this node; pip install 'boltcutter[jupyter]' in its environment"
        )
    write_token()
    os.environ["JUPYTER_TOKEN_FILE"] = str(TOKEN_FILE)  # a token from a file is not printed to the log
    os.environ.pop("JUPYTER_TOKEN", None)
    print(f"JupyterLab on 127.0.0.1:{PORT} of this machine; the token is in {TOKEN_FILE}", flush=True)
    seconds = round(60 * idle_minutes)
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": PORT,
        "ServerApp.port_retries": 0,  # the tunnel leads to this port
        "ServerApp.allow_root": True,
        "ServerApp.open_browser": False,
        "ServerApp.root_dir": project,
        "ServerApp.shutdown_no_activity_timeout": seconds,
        "MappingKernelManager.cull_idle_timeout": seconds,
        "MappingKernelManager.cull_interval": POLL_SECONDS,
        "MappingKernelManager.cull_connected": True,  # to a page that was forgotten
        "TerminalManager.cull_inactive_timeout": seconds,
        "TerminalManager.cull_interval": POLL_SECONDS,
    }
    return ["-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def write_token() -> None:
    """Write a new token to ``TOKEN_FILE``, readable only by this user."""
    TOKEN_FILE.unlink(missing_ok=True)  # a link of another user is removed, not followed
    file = os.open(TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as out:
        out.write(secrets.token_hex(32))


def tunnel(platform: Literal["ec2", "sagemaker"], target: str, *, region: str | None = None) -> str:
    """Return the commands, for a terminal here, that lead to JupyterLab on a machine by AWS Systems Manager.

    Args:
        platform: Option of ``launch=``.
        target: Id of the instance on EC2, name of the job on SageMaker.
        region: Region; None: that of the profile.
    """
    show = f"sudo cat {TOKEN_FILE}" if platform == "ec2" else f"cat {TOKEN_FILE}"
    machine = target if platform == "ec2" else f"sagemaker-training-job:{target}_algo-1"
    session = f"aws ssm start-session --target {machine}{f' --region {region}' if region else ''} --document-name"
    ports = f"portNumber={PORT},localPortNumber={PORT}"
    return (
        f"JupyterLab, while this runs: {session} AWS-StartPortForwardingSession --parameters {ports}\n"
        f"  for the token: {session} AWS-StartInteractiveCommand --parameters command='{show}'\n"
        f"  then open http://127.0.0.1:{PORT}/lab"
    )
