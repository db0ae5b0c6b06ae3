"""Projects that use the library from outside its repository."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, environment
from slurm_cluster import Cluster

FILES = {
    "pyproject.toml": '[project]\nname = "small"\nversion = "0"\n\n[tool.boltcutter]\npackage = "small"\n',
    ".gitignore": "runs/\n",
    "src/small/__init__.py": "",
    "src/small/tiny.py": """from math import prod

from torch import Tensor, nn


class Tiny(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden_size: int = 8) -> None:
        super().__init__()
        layers = nn.Linear(prod(input_shape), hidden_size), nn.ReLU(), nn.Linear(hidden_size, num_classes)
        self.layers = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() / 16)
""",
    "configs/model/tiny.yaml": "# Two layers.\n_target_: small.tiny.Tiny\ninput_shape: ${data.shape}\n"
    "num_classes: ${data.num_classes}\n",
    "configs/train.yaml": "# Defaults of this project.\ndefaults:\n  model: tiny\n  logger: null\n",
    "configs/experiment/short.yaml": "# Two epochs.\ntrainer:\n  max_epochs: 2\n",
}
Call = Callable[..., subprocess.CompletedProcess[str]]


def git(where: Path, *arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout.strip()


def create_project(root: Path) -> Path:
    """A committed project with a model and an experiment, and one file that is not committed."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "notes.txt").write_text("not committed\n")
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return create_project(tmp_path / "Jürgen's project")


def caller(project: Path, python: str) -> Call:
    def call(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "boltcutter", *arguments]
        done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, timeout=500)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return call


def read_record(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "record.json").read_text()))


def wait_until(reached: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.1)


def check_workflow(project: Path, python: str, cluster: Cluster) -> dict[str, object]:
    """Train, evaluate, kill, resume, reproduce, launch locally and on SLURM; returns the record of the first run."""
    call = caller(project, python)
    whole, cut, again, launched = (project / "runs" / name for name in ("whole", "cut", "again", "launched"))
    done = call("train", "experiment=short", f"folder={whole}")
    assert f"boltcutter evaluate {shlex.quote(f'run={whole}')}" in done.stdout
    call("evaluate", f"run={whole}")
    record = read_record(whole)
    assert record["git"]["commit"] == git(project, "rev-parse", "HEAD")  # type: ignore[index]
    assert "notes.txt" in (whole / "code.patch").read_text()

    more = ["trainer.max_epochs=40", "test=false", "report=false"]
    command = [python, "-m", "boltcutter", "train", *more, f"folder={cut}"]
    process = subprocess.Popen(command, cwd=project, env=environment(), start_new_session=True)
    try:
        wait_until(lambda: (cut / "checkpoints" / "last.ckpt").is_file())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    call("train", f"resume={cut}")
    assert "differ" not in call("train", f"reproduce={cut}", f"folder={again}").stderr
    call("compare", f"run={cut}", f"with={again}")

    assert "-m boltcutter train" in call("launch", "launch=local", "trainer.devices=1", "--dry-run").stdout
    call("launch", "launch=local", "experiment=short", "trainer.devices=1", f"folder={launched}", "--wait")
    on_slurm = project / "runs" / "slurm"
    if os.getuid() == 0:  # the user of the cluster is another
        subprocess.run(["chown", "-R", cluster.user, project], check=True)
    submit = ["env", "-C", str(project), python, "-m", "boltcutter", "launch", "launch=slurm", "experiment=short"]
    done = cluster.call(
        *submit, "trainer.accelerator=cpu", "trainer.devices=2", f"folder={on_slurm}", "--wait", timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (launched, on_slurm):
        job = read_record(folder)
        assert job["attempts"][-1]["reason"] == "completed"  # type: ignore[index]
        assert (folder / "code" / "src" / "small" / "tiny.py").is_file()
        for state in ("git", "library"):
            assert job[state]["commit"] == record[state]["commit"]  # type: ignore[index]
    return record


@pytest.mark.slow
def test_a_project_outside_trains_and_is_recorded(project: Path) -> None:
    call = caller(project / "src", sys.executable)
    call("train", "trainer.max_epochs=1", "report=false")
    (folder,) = project.glob("runs/digits-tiny/*")
    record = read_record(folder)
    assert record["config"]["model"]["_target_"] == "small.tiny.Tiny"  # type: ignore[index]
    assert record["git"]["commit"] == git(project, "rev-parse", "HEAD")  # type: ignore[index]
    assert record["library"]["path"] == str(ROOT / "src" / "boltcutter")  # type: ignore[index]
    assert record["library"]["commit"] == git(ROOT, "rev-parse", "HEAD")  # type: ignore[index]
    assert "notes.txt" in (folder / "code.patch").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_workflow_with_an_editable_library(cluster: Cluster) -> None:
    project = create_project(cluster.runs / "editable library" / "small project")
    record = check_workflow(project, sys.executable, cluster)
    assert record["library"]["path"] == str(ROOT / "src" / "boltcutter")  # type: ignore[index]
    for name in ("launched", "slurm"):
        assert (project / "runs" / name / "code" / "src" / "boltcutter" / "configs" / "train.yaml").is_file()


def copy_repository(target: Path) -> Path:
    """Copy what git tracks, without the results of earlier builds."""
    for name in git(ROOT, "ls-files", "-z").rstrip("\0").split("\0"):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build_wheel(source: Path, target: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(target)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = target.glob("boltcutter-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_workflow_with_an_installed_wheel(cluster: Cluster, tmp_path: Path) -> None:
    wheel = build_wheel(copy_repository(tmp_path / "repository"), tmp_path / "wheel")
    home = cluster.runs / "installed library"
    venv.create(home / "venv", with_pip=False)
    python = str(home / "venv" / "bin" / "python")
    purelib = next((home / "venv" / "lib").glob("python*")) / "site-packages"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    (purelib / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and all others; read last
    record = check_workflow(create_project(home / "small project"), python, cluster)
    assert record["library"]["version"]  # type: ignore[index]
    assert "path" not in record["library"]  # type: ignore[operator]
    listed = subprocess.run([home / "venv" / "bin" / "boltcutter"], capture_output=True, text=True, check=True)
    assert "train" in listed.stdout
