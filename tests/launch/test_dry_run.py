"""The documented launch commands with ``--dry-run``: without account, SDK and network, and only with their settings."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

COMMAND = re.compile(r"^python scripts/launch\.py (launch=(\w+)(?:\\\n|.)*)$", re.M)
SDKS = ["boto3", "botocore", "s3fs", "aiobotocore", "google.auth", "google.cloud", "gcsfs", "azure", "adlfs"]
SDKS += ["kubernetes", "sky"]
PROGRAM = """
import json, socket, sys, traceback
from contextlib import redirect_stdout, redirect_stderr
from io import StringIO

commands, sdks = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(sdks))

def refuse(*_, **__):
    raise AssertionError("the network is used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from boltcutter.project import Project
from boltcutter.launch.command import launch_command

found = []
for arguments in commands:
    out, error = StringIO(), ""
    try:
        with redirect_stdout(out), redirect_stderr(StringIO()):
            launch_command(Project.find("scripts/launch.py"), arguments)
    except BaseException:
        error = traceback.format_exc()
    found.append((out.getvalue(), error))
print(json.dumps(found))
"""


def documented() -> list[tuple[str, list[str]]]:
    """Launcher and arguments of each command."""
    text = "\n".join((ROOT / file).read_text() for file in ("README.md", "docs/launch.md", "docs/cloud.md"))
    found = [(launcher, text.replace("\\\n", " ")) for text, launcher in COMMAND.findall(text)]
    given = [(launcher, shlex.split(arguments, comments=True)) for launcher, arguments in found]
    return [(launcher, [one for one in arguments if not one.startswith("--")]) for launcher, arguments in given]


@pytest.mark.slow
def test_documented_commands_print_their_job(tmp_path: Path) -> None:
    given = documented()
    clouds = {"vertex", "azureml", "kubernetes", "sky"}
    assert clouds <= {launcher for launcher, _ in given}
    commands = [[*arguments, "--dry-run"] for _, arguments in given]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([commands, SDKS])],
        cwd=ROOT,
        env=environment(HOME=str(tmp_path), AWS_EC2_METADATA_DISABLED="true"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for arguments, (output, error) in zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert not error, f"{shlex.join(arguments)}\n{error}"
        assert len(output.splitlines()) > 5, shlex.join(arguments)
