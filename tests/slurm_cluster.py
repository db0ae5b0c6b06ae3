"""A SLURM cluster of three nodes for tests."""

import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, Script, run_command, unavailable
from ray_run import Run

from boltcutter.launch import command
from boltcutter.project import Project

Launch = Callable[..., str]
CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
# A login node needs no torch, and submissions are faster without it.
WITHOUT_TORCH = "import runpy, sys; sys.modules.update(torch=None, lightning=None); del sys.argv[0]; "
WITHOUT_TORCH += "runpy.run_path(sys.argv[0], run_name='__main__')"


class Cluster:
    """Commands on the login node, by a user who is not root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder / "cluster", folder / "runs"
        self.user = "nobody" if os.getuid() == 0 else getpass.getuser()
        self.runs.mkdir()
        if os.getuid() == 0:
            shutil.chown(self.runs, self.user)

    def manage(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # The user may not have access to the folders of Python or of the project.
        visible = {"SLURM_CLUSTER_VISIBLE": f"{ROOT}:{sys.base_prefix}:{sys.prefix}"}
        return run_command(["bash", str(CLUSTER), command, str(self.folder), *arguments], env=visible)

    def call(self, *command: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        # git trusts no repository of another user.
        given = {"HOME": self.runs, "PYTHONWARNINGS": "default", "GIT_CONFIG_COUNT": 1}
        given |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"} | env
        variables = [f"{name}={value}" for name, value in given.items()]
        arguments = ["exec", str(self.folder), "-u", self.user, "env", *variables, *command]
        return run_command(["bash", str(CLUSTER), *arguments], timeout=timeout)

    def launch(
        self, *overrides: str, torch: bool = False, timeout: float = 240, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run scripts/launch.py."""
        start = [sys.executable] if torch else [sys.executable, "-c", WITHOUT_TORCH]
        return self.call(*start, "scripts/launch.py", *overrides, timeout=timeout, **env)

    def submit(self, name: str, *overrides: str, torch: bool = False, **env: str) -> tuple[Path, str]:
        """Submit a new run; returns its folder and the job id."""
        folder = self.runs / name
        done = self.launch(
            "launch=slurm", f"folder={folder}", "trainer.accelerator=cpu", *overrides, torch=torch, **env
        )
        assert done.returncode == 0, done.stderr
        first = next(folder.rglob("record.json"))
        return folder, str(json.loads(first.read_text())["launch"]["id"])

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of scontrol show job."""
        output = self.call("scontrol", "-o", "show", "job", job_id).stdout
        return dict(field.split("=", 1) for field in output.split() if "=" in field)


def wait_until(found: Callable[[], Any], folder: Path, seconds: float = 90) -> Any:
    """Return the first true value of ``found``, or fail with the job's log in ``folder``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    log = folder / "logs" / "slurm.log"
    pytest.fail(f"not within {seconds} s:\n{log.read_text() if log.exists() else 'no log'}")


def processes(folder: Path) -> dict[tuple[str, int], int]:
    """Training processes of a run by node and rank."""
    found = {}
    for process in psutil.process_iter():
        try:
            if f"resume={folder}" in process.cmdline() and "srun" not in process.name():
                env = process.environ()
                found[env["SLURMD_NODENAME"], int(env["SLURM_PROCID"])] = process.pid
        except (psutil.Error, KeyError):
            continue
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        found = Cluster(folder)
        started = found.manage("start")
        if started.returncode:
            unavailable(started.stderr)
        yield found
        stopped = found.manage("stop")
        assert stopped.returncode == 0, stopped.stderr
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def run(tmp_path: Path, script: Script) -> Iterator[Run]:
    """A run, and the assertion that nothing of Ray is left behind it."""
    found = Run(tmp_path / "run", script)
    yield found
    if not (found.folder / "record.json").exists() or not found.driver:
        return
    started = [psutil.Process(found.driver)] if psutil.pid_exists(found.driver) else []
    started += [child for process in started for child in process.children(recursive=True)]
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Calls the launch command as a user with config files of their own on a host without torch; returns stdout."""
    monkeypatch.setattr(command, "USER_CONFIGS", tmp_path / "site")
    monkeypatch.setattr(command, "can_check_values", lambda: False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # whether SLURM is installed or not

    def call(*arguments: str) -> str:
        command.launch_command(Project.find(__file__), [*arguments])
        return capsys.readouterr().out

    return call
