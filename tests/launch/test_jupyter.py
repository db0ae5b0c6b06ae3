import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from boltcutter_launch import jupyter
from boltcutter_launch.bundle import pack

from .nodes import Machine, Process, nodes

URL = f"http://127.0.0.1:{jupyter.PORT}"
VARIABLES = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin", "HOME": "/tmp/home", "MPLBACKEND": "agg"}
VARIABLES |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine that has the bundle of a project with a notebook."""
    for name in ("pyproject.toml", "docs/notebook.ipynb"):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "code" / name)
    pack(tmp_path)
    with nodes(1, shared=[tmp_path]) as (found,):
        yield found


def start(machine: Machine, bundle: Path, idle_minutes: float) -> Process:
    """Run the command that a platform runs on its node."""
    command = [sys.executable, "-m", "boltcutter_launch.node", "/tmp/run", "--bundle", str(bundle), "trust=true"]
    return machine.start([*command, "--jupyter", f"{idle_minutes:g}"], VARIABLES)


@pytest.mark.slow
def test_the_server_is_open_only_with_its_token_and_runs_the_notebook(machine: Machine, tmp_path: Path) -> None:
    server = start(machine, tmp_path / "job.tar.gz", 30)
    server.wait_for(f"{URL}/lab")
    mode, token = machine.run("sh", "-c", f"stat -c %a {jupyter.TOKEN_FILE}; cat {jupyter.TOKEN_FILE}").split()
    assert mode == "600"
    assert len(token) == 64
    client = [sys.executable, str(Path(__file__).with_name("notebook_client.py")), URL, str(jupyter.TOKEN_FILE)]
    done = machine.start([*client, str(ROOT / "docs" / "notebook.ipynb")], VARIABLES)
    assert done.wait(170) == 0, done.output + server.output
    found = json.loads(done.output.splitlines()[-1])
    assert found.pop("page").startswith("/login?")
    assert sorted(found.pop("files")) == ["docs", "pyproject.toml"]
    cells = found.pop("cells")
    assert [cell["status"] for cell in cells] == ["ok"] * len(cells), cells
    assert found == {
        "api": 403,
        "wrong token": 403,
        "new kernel": 403,
        "websocket": 403,
        "websocket with token": 101,
        "page with token": 200,
        "other host": 403,
    }
    listening = [line.split()[3] for line in machine.run("ss", "-Hltn").splitlines()]
    assert f"127.0.0.1:{jupyter.PORT}" in listening
    assert all(address.startswith("127.0.0.1:") for address in listening)  # those of the kernels, too
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((machine.address, jupyter.PORT), timeout=10)
    server.signal("TERM")
    assert server.wait(30) == 0
    assert token not in server.output + done.output
    assert machine.run("ps", "ax", "-o", "command").count("ipykernel") == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_idle_server_ends_although_a_kernel_runs(machine: Machine, tmp_path: Path) -> None:
    server = start(machine, tmp_path / "job.tar.gz", 0.1)
    server.wait_for(f"{URL}/lab")
    post = f'curl -sf -X POST -H "Authorization: token $(cat {jupyter.TOKEN_FILE})" {URL}/api/kernels'
    assert json.loads(machine.run("sh", "-c", post))["name"] == "python3"
    assert server.wait(300) == 0, server.output


def test_a_link_in_place_of_the_token_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_text("")
    monkeypatch.setattr(jupyter, "TOKEN_FILE", tmp_path / "token")
    jupyter.TOKEN_FILE.symlink_to(target)
    tokens = set()
    for _ in range(2):
        jupyter.write_token()
        tokens.add(jupyter.TOKEN_FILE.read_text())
    assert target.read_text() == ""
    assert len(tokens) == 2
    assert os.stat(jupyter.TOKEN_FILE).st_mode & 0o777 == 0o600


def test_the_tunnel_of_each_platform() -> None:
    on_ec2 = jupyter.tunnel("ec2", "i-0abc", region="eu-west-1")
    assert "aws ssm start-session --target i-0abc --region eu-west-1 --document-name AWS-StartPortForw" in on_ec2
    assert "--parameters portNumber=8888,localPortNumber=8888\n" in on_ec2
    assert f"command='sudo cat {jupyter.TOKEN_FILE}'" in on_ec2
    assert "--target sagemaker-training-job:digits-x_algo-1 --document-name" in jupyter.tunnel("sagemaker", "digits-x")
