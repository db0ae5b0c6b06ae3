"""Containers: real ones of podman, what docker's own client sends to its daemon, and apptainer's command line."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import pytest
from conftest import ROOT, require, run_command

from boltcutter.launch import container
from boltcutter.launch.container import ContainerLauncher
from boltcutter.launch.job import Job

from .podman import EMPTY, Podman, mounts
from .test_library import read_record

GOLDEN = Path(__file__).with_name("jobs")
FOLDER = Path("/p/runs/digits/20261122-120000-1a2b3c4d")
JOB = Job(
    "digits", FOLDER, FOLDER / "code/scripts/train.py", devices=2, gpus=True, root=Path("/p"), code=FOLDER / "code"
)
EVERYTHING: dict[str, Any] = {
    "image": "registry.example/my-project:1",
    "mounts": ["/tmp", "/usr:/data:ro"],
    "shm_size": "16g",
    "pass_environment": ["WANDB_API_KEY"],
    "environment": {"NAME": "it's a b"},
}
RENDERED: dict[str, dict[str, Any]] = {
    "container-docker.sh": {"engine": "docker", "options": ["--network=host"], "torchrun": True},
    "container-podman.sh": {"engine": "podman"},
    "container-apptainer.sh": {"engine": "apptainer", "image": "docker://registry.example/my-project:1"},
}
# What a training does with signals, without the time to import torch.
SCRIPT = """import os, signal, sys, time
signal.signal(15, lambda *_: (print("saved", flush=True), os._exit(143)))
facts = [os.getcwd(), os.getuid(), *map(os.environ.get, ["PYTHONPATH", "NAME", "WANDB_API_KEY"]), *sys.argv[1:]]
print("begun", *facts, sep="|", flush=True)
time.sleep(60)
"""
APPTAINER = """#!{python}
import argparse, os, sys
if sys.argv[1:] == ["version"]:
    sys.exit(print("1.3.6"))
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("action", choices=["exec"])
parser.add_argument("--nv", action="store_true")
parser.add_argument("--pwd", required=True)
parser.add_argument("--bind", action="append", default=[])
parser.add_argument("image")
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
for bind in given.bind:
    assert 2 <= len(bind.split(":")) <= 3, bind
    assert os.path.exists(bind.split(":")[0]), bind
os.chdir(given.pwd)
os.execvp(given.command[0], given.command)
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    found = Podman()
    found.import_empty()
    yield found
    found.remove()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def gpus(folder: Path, count: int) -> None:
    lines = "".join(f"echo 'GPU {index}: NVIDIA H200 (UUID: GPU-{index})'\n" for index in range(count))
    program(folder, "nvidia-smi", f"#!/bin/sh\n{lines}")


@pytest.mark.parametrize("name", RENDERED)
def test_job_files(name: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(programs, 8)
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    monkeypatch.setattr(os, "getgid", lambda: 1002)
    monkeypatch.setenv("USER", "ada")
    launcher = ContainerLauncher(**EVERYTHING | RENDERED[name])
    launcher.check(JOB)
    assert launcher.render(JOB) == (GOLDEN / name).read_text()


class Daemon(ThreadingMixIn, UnixStreamServer):
    """Answers docker's client until it creates a container, which it refuses."""

    daemon_threads = True
    created: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    server: Daemon

    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(200, {})

    def do_GET(self) -> None:
        self.answer(200, {"Version": "28.0.0", "ApiVersion": "1.48", "MinAPIVersion": "1.24"})

    def do_POST(self) -> None:
        assert "/containers/create?name=digits-20261122-120000-1a2b3c4d" in self.path
        self.server.created = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(409, {"message": "refused by the test"})

    def answer(self, status: int, content: dict[str, str]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Api-Version", "1.48")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    require("docker", install="apt-get install docker.io")
    with Daemon(str(tmp_path / "docker.sock"), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def test_docker_understands_the_job_file(daemon: Daemon, tmp_path: Path) -> None:
    env = {"DOCKER_HOST": f"unix://{tmp_path}/docker.sock", "WANDB_API_KEY": "secret", "HOME": str(tmp_path)}
    done = run_command(["bash", str(GOLDEN / "container-docker.sh")], env=env)
    assert "refused by the test" in done.stderr
    sent = daemon.created
    assert sent["Image"] == "registry.example/my-project:1"
    assert sent["Cmd"][:2] == ["python", "-m"]
    assert sent["Cmd"][-2:] == [str(JOB.script), f"resume={FOLDER}"]
    assert sent["User"] == "1001:1002"
    assert sent["WorkingDir"] == "/p"
    assert sent["StopTimeout"] == 600
    assert set(sent["Env"]) == {
        "HOME=/tmp",
        "USER=ada",
        f"PYTHONPATH={FOLDER}/code/src",
        "NAME=it's a b",
        "WANDB_API_KEY=secret",
    }
    host = sent["HostConfig"]
    assert host["AutoRemove"]
    assert host["NetworkMode"] == "host"
    assert host["ShmSize"] == 16 << 30
    assert [request["Count"] for request in host["DeviceRequests"]] == [-1]  # all GPUs
    assert set(host["Binds"]) == {"/p:/p", f"{FOLDER}:{FOLDER}", "/tmp:/tmp", "/usr:/data:ro"}


@pytest.mark.parametrize("engine", ["podman", "docker", "apptainer"])
def test_a_container_is_followed_and_cancelled(
    engine: str, podman: Podman, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**podman.variables, "WANDB_API_KEY": "given later"}.items():
        monkeypatch.setenv(name, value)
    program(programs, "docker", f'#!/bin/sh\nexec {shutil.which("podman")} "$@"\n')  # as Debian's podman-docker
    program(programs, "apptainer", APPTAINER.format(python=sys.executable))
    folder = tmp_path / "a run"
    (folder / "logs").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    job = Job("digits", folder, folder / "train.py", root=tmp_path, digests=("0" * 32,))
    launcher = ContainerLauncher(
        image=EMPTY,
        engine=engine,  # type: ignore[arg-type]
        python=sys.executable,
        mounts=mounts(),
        pass_environment=["WANDB_API_KEY"],
        environment={"NAME": "it's a b"},
        options=[] if engine == "apptainer" else ["--network=host"],
    )
    launcher.check(job)
    file = folder / "job.sh"
    file.write_text(launcher.render(job))
    (job_id,) = launcher.submit(job, file)
    end = time.monotonic() + 60
    while "begun" not in (text := "".join(launcher.logs(job_id, folder, follow=False))):
        assert launcher.status(job_id).state == "running", text
        assert time.monotonic() < end, text
        time.sleep(0.05)
    facts = [
        tmp_path,
        os.getuid(),
        tmp_path / "src",
        "it's a b",
        "given later",
        f"resume={folder}",
        "trust=sha256:00000000000000000000000000000000",
    ]
    assert text == "|".join(map(str, ["begun", *facts])) + "\n"
    assert "given later" not in file.read_text()
    if engine != "apptainer":
        assert podman("ps", "--format", "{{.Names}}").stdout.strip() == "digits-a-run"
    launcher.cancel(job_id)
    assert "".join(launcher.logs(job_id, folder, follow=True)).endswith("\nsaved\n")
    assert os.waitstatus_to_exitcode(os.waitpid(int(job_id.split()[0]), 0)[1]) == 143
    assert podman("ps", "--all", "--format", "{{.Names}}").stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_in_a_container_saves_and_resumes(podman: Podman, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["launch=container", "launch.engine=podman", f"launch.image={EMPTY}", f"launch.python={sys.executable}"]
    settings += [f"launch.mounts=[{','.join(mounts(without=ROOT))}]", "launch.options=[--network=host]"]
    overrides = [
        "model=mlp",
        "logger=null",
        "report=false",
        "test=false",
        "trainer.devices=1",
        "trainer.accelerator=cpu",
    ]

    def launch(*arguments: str) -> str:
        done = run_command([sys.executable, "scripts/launch.py", *arguments], env=podman.variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    launch(*settings, *overrides, "trainer.max_epochs=2000", f"folder={folder}")
    log, seen = folder / "logs" / "container.log", 0
    for start in (1, 2):
        end = time.monotonic() + 150
        while "epoch " not in (text := log.read_text()[seen:]):
            assert time.monotonic() < end, text
            assert "Error:" not in text, text
            time.sleep(0.2)
        launch("cancel", f"run={folder}")
        launch("logs", f"run={folder}", "--wait")
        attempts: Any = read_record(folder)["attempts"]
        assert len(attempts) == start
        assert attempts[-1]["reason"].startswith("preempted by SIGTERM, saved")
        if start == 1:
            assert podman("ps", "--all", "--quiet").stdout == ""
            seen = len(log.read_text())
            launch(f"resume={folder}")
    assert "epoch 1/2000" not in log.read_text().partition("preempted by")[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shm_size": "lots"}, "launch.shm_size=lots is not a size; try launch.shm_size=8g"),
        ({"pass_environment": ["A=b"]}, "launch.pass_environment.'A=b' is not a valid variable name"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: secrets must not be written"),
        ({"image": "a\nb"}, "launch.image=.* has the control character"),
        ({"image": None}, "launch.image: not set; build one from the project's Dockerfile: docker build"),
        ({"engine": "apptainer", "image": "/no/x.sif"}, "launch.image=/no/x.sif: no such file; run apptainer build"),
        ({"mounts": ["/no/data"]}, "launch.mounts=/no/data: no such file or folder"),
        ({"mounts": ["data"]}, "launch.mounts=data: no such file or folder; give its absolute path"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContainerLauncher(**{"image": "x"} | settings).check(JOB)


def test_jobs_that_do_not_fit_are_refused(programs: Path) -> None:
    launcher = ContainerLauncher(image="x")
    with pytest.raises(ValueError, match=r"trainer\.num_nodes=2: launch=container uses one machine; try launch=slurm"):
        launcher.check(replace(JOB, nodes=2))
    with pytest.raises(ValueError, match=r"/a:b/p: engines cannot mount a path with :; rename the folder"):
        launcher.check(replace(JOB, root=Path("/a:b/p")))
    gpus(programs, 1)
    assert "--gpus" in launcher.render(JOB)
    assert "--gpus" not in launcher.render(replace(JOB, gpus=False))


def test_podman_of_a_user_keeps_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ContainerLauncher(image="x", engine="podman")
    for uid, option in {1001: "--userns keep-id", 0: f"--user 0:{os.getgid()}"}.items():
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        assert f"  {option} \\\n" in launcher.render(JOB)


def test_engines_that_cannot_start_are_reported(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    file = tmp_path / "job.sh"
    with pytest.raises(ValueError, match=r"launch\.engine=docker is not installed; install it"):
        ContainerLauncher(image="x").submit(JOB, file)
    program(programs, "podman", "#!/bin/sh\necho 'Cannot connect' >&2\necho now >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"launch\.engine=podman does not work: Cannot connect.*; start it first"):
        ContainerLauncher(image="x", engine="podman").submit(JOB, file)


def test_an_engine_that_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(container, "ANSWER_SECONDS", 0.2)
    launcher = ContainerLauncher(image="i")
    with pytest.raises(
        ValueError, match=r"^launch\.engine=docker does not work: no response in 0\.2 seconds; start it first"
    ):
        launcher.submit(Job("digits", tmp_path, None), tmp_path / "job.sh")
