"""Managed jobs of SkyPilot: its own schemas, an equally strict ``sky``, and two nodes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from conftest import QUICK, Script, require, saved_weights

from boltcutter.launch import sky
from boltcutter.launch.job import Job, NoAnswerError, Status, UnreachableError
from boltcutter.launch.sky import SkyLauncher

from .aws_server import aws_server
from .nodes import Machine, Process, nodes, reachable
from .test_cloud_job import write_run

JOBS = Path(__file__).with_name("jobs")
FAKE = Path(__file__).with_name("fake_sky.py")
SCHEMA = json.loads(Path(__file__).with_name("sky_schema.json").read_text())
JOB = Job("digits", Path("/project/runs/digits/20261122-120000-1a2b3c4d"), None, devices=8, gpus=True, nodes=2)
SETTINGS: dict[str, Any] = {"storage": "s3://bucket/runs", "infra": ["aws/us-east-1"], "gpu_type": "H100"}
ANYWHERE = SETTINGS | {
    **{"infra": ["aws/us-east-1", "k8s/my-context"], "gpu_type": ["H100", "A100-80GB"], "spot": True, "memory": "512+"},
    **{"cpus": "64+", "max_hourly_cost": 40.0, "max_restarts": 0, "time": "2:00:00", "grace": 300, "disk_gb": 500},
    **{"secrets": {"WANDB_API_KEY": "env"}, "tags": {"team": "vision"}, "environment": {"A": "it's $1"}},
    **{"setup": ["sudo apt-get install -y ffmpeg"]},
}
ON_CPUS = {"storage": "gs://bucket/runs", "infra": ["gcp"], "image": "team/train:1", "python": "/opt/venv/bin/python"}
RENDERED: dict[str, tuple[dict[str, Any], Job]] = {
    "sky.yaml": (SETTINGS, JOB),
    "sky_anywhere.yaml": (ANYWHERE, replace(JOB, name="9-digits", digests=("0" * 32,), num_workers=3)),
    "sky_image.yaml": (ON_CPUS, replace(JOB, gpus=False, nodes=1, devices=1)),
}
READ = "import json, sys, sky; from sky.utils import schemas; task = sky.Task.from_yaml(sys.argv[1]); "
READ += "print(json.dumps([task.num_nodes, len(task.resources), sky.__version__, schemas.get_task_schema()]))"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the command, and return the folder of its jobs."""
    folder = tmp_path / "sky"
    folder.mkdir()
    (folder / "sky").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    (folder / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SKY", str(folder))
    monkeypatch.setenv("PYTHONPATH", "/of/another/environment")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return write_run(tmp_path / "project", JOB)


def submit(job: Job, **settings: Any) -> str:
    """Check and submit a job, as the launch command does after it has sent the code."""
    launcher = SkyLauncher(**SETTINGS | settings)
    launcher.check(job)
    file = job.folder / launcher.job_file
    file.write_text(launcher.render(job))
    launcher.check_credentials()
    return launcher.create(job, file)


def commands(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "commands").read_text().splitlines()]


@pytest.mark.parametrize("name", RENDERED)
def test_a_task_is_rendered(name: str) -> None:
    settings, job = RENDERED[name]
    assert SkyLauncher(**settings).render(job) == (JOBS / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_skypilot_accepts_the_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``sky.Task.from_yaml``, which needs no network, in SkyPilot's own environment."""
    require("sky", install=f"uv tool install skypilot=={SCHEMA['version']}")
    first, *_ = Path(str(shutil.which("sky"))).read_text().splitlines()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [first.removeprefix("#!"), "-c", READ, str(JOBS / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    nodes, choices, version, schema = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, choices) == {"sky.yaml": (2, 1), "sky_anywhere.yaml": (2, 4), "sky_image.yaml": (1, 1)}[name]
    if version == SCHEMA["version"]:
        assert without_descriptions(schema) == SCHEMA["task"]


def without_descriptions(node: Any) -> Any:
    if isinstance(node, list):
        return [without_descriptions(value) for value in node]
    if not isinstance(node, dict):
        return node
    kept = {name: value for name, value in node.items() if name != "$schema"}
    return {
        name: without_descriptions(value)
        for name, value in kept.items()
        if name != "description" or not isinstance(value, str)
    }


def test_a_job_is_submitted_queried_and_cancelled(state: Path, job: Job, tmp_path: Path) -> None:
    job_id = submit(job, secrets={"WANDB_API_KEY": "env"})
    assert job_id == "1/digits-one"
    sent = commands(state)[0]
    # Without these, SkyPilot copies the user's keys for all clouds to the nodes.
    # https://docs.skypilot.co/en/latest/reference/config.html#aws-remote-identity
    identities = [pair for pair in sent if ".remote_identity=" in pair]
    assert identities[0] == "aws.remote_identity=SERVICE_ACCOUNT"
    assert {pair.partition(".")[0] for pair in identities[1:]} == {"azure", "gcp", "kubernetes"}
    assert all(pair.endswith("=NO_UPLOAD") for pair in identities[1:])
    assert "0123456789abcdef" not in (job.folder / "job.yaml").read_text() + str(sent)
    launcher = SkyLauncher(**SETTINGS)
    assert launcher.status(job_id) == Status("pending", "job 1, STARTING, on aws/us-east-1")
    launcher.cancel(job_id)
    assert launcher.status(job_id).state == "running"
    (state / "log").write_text("(head, rank=0) epoch 0\n")
    for follow in (False, True):
        assert list(launcher.logs(job_id, tmp_path, follow=follow)) == ["(head, rank=0) epoch 0\n"]
    assert [command[-1] for command in commands(state)[-2:]] == ["1", "1"]
    assert submit(job) == "2/digits-one"


# https://docs.skypilot.co/en/latest/reference/cli.html#sky-jobs-queue
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"status": "RECOVERING", "recovery_count": 2}, Status("pending", "job 1, RECOVERING, on aws, recoveries 2")),
        ({"status": "RUNNING"}, Status("running", "job 1, RUNNING, on aws")),
        ({"status": "A_NEW_STATE"}, Status("running", "job 1, A_NEW_STATE, on aws")),
        ({"status": "SUCCEEDED", "infra": "-"}, Status("ended", "job 1, SUCCEEDED")),
        (
            {"status": "FAILED_NO_RESOURCE", "failure_reason": "no H100\n in aws", "infra": None},
            Status("ended", "job 1, FAILED_NO_RESOURCE (no H100 in aws)"),
        ),
    ],
)
def test_states(state: Path, facts: dict[str, Any], expected: Status) -> None:
    defaults = {"job_id": 1, "job_name": "digits-one", "infra": "aws", "recovery_count": 0, "failure_reason": None}
    (state / "jobs.json").write_text(json.dumps([defaults | facts]))
    assert SkyLauncher(**SETTINGS).status("1/digits-one") == expected
    known = [name for name in sky.STATES if sky.STATES[name] == "ended"]
    assert (expected.state == "ended") == (facts["status"] in known)


def test_a_job_without_a_controller_has_ended(state: Path) -> None:
    assert SkyLauncher(**SETTINGS).status("1/digits-one") == Status("ended", "job 1, no longer known to SkyPilot")


def test_a_rejected_task_is_one_line(state: Path, job: Job) -> None:
    (state / "answer.json").write_text(json.dumps({"launch": {"text": "a\nb\n\x1b[31mNo cloud is enabled.\x1b[0m\n"}}))
    with pytest.raises(ValueError, match=r"^launch=sky: sky jobs launch fails: .*No cloud is enabled; correct .*$"):
        submit(job)


def test_an_ended_job_of_the_same_name_is_not_the_rejected_one(state: Path, job: Job) -> None:
    (state / "jobs.json").write_text(json.dumps([{"job_id": 1, "job_name": "digits-one", "status": "FAILED"}]))
    (state / "answer.json").write_text(json.dumps({"launch": {"text": "No cloud is enabled"}}))
    with pytest.raises(ValueError, match="sky jobs launch fails"):
        submit(job)


def test_a_job_that_was_accepted_before_an_error_is_found(state: Path, job: Job) -> None:
    (state / "answer.json").write_text(json.dumps({"launch": {"text": "connection lost", "late": True}}))
    assert submit(job) == "1/digits-one"


def test_a_job_that_cannot_be_looked_up_is_unclear(state: Path, job: Job) -> None:
    (state / "answer.json").write_text(json.dumps({"queue": {"text": "server unhealthy"}}))
    with pytest.raises(NoAnswerError, match="server unhealthy; try again later"):
        submit(job)
    with pytest.raises(UnreachableError, match="server unhealthy; try again later"):
        SkyLauncher(**SETTINGS).status("1/digits-one")


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ({"infra": []}, {}, "launch.infra: not set"),
        ({"infra": ["AWS"]}, {}, "launch.infra=AWS is not a place"),
        ({"gpu_type": None}, {}, "launch.gpu_type: not set; try launch.gpu_type=L4"),
        ({}, {"gpus": False}, "launch.gpu_type=H100: the run uses no GPUs"),
        ({"storage": "az://bucket/runs"}, {}, "launch.storage=az://bucket/runs: the nodes cannot write there"),
        ({"secrets": {"HF_TOKEN": "env"}}, {}, "launch.secrets.HF_TOKEN=env: not set in this environment"),
        ({"secrets": {"HF_TOKEN": "hf_1"}}, {}, "launch.secrets.HF_TOKEN: not a reference to a secret"),
        ({"image": "a", "grace": 5}, {}, "launch.grace=5 is less than 30"),
    ],
)
def test_a_mistake_is_refused(
    state: Path, job: Job, settings: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        submit(replace(job, **facts), **settings)
    assert not (state / "commands").exists()


def test_skypilot_is_not_installed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"^launch=sky: sky is not installed; uv tool install"):
        submit(job)


def test_a_dry_run_needs_no_skypilot(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    settings = ["launch=sky", "launch.storage=s3://bucket/runs", "launch.infra=[aws/us-east-1]", "launch.gpu_type=H100"]
    done = script("launch", *settings, "trainer.devices=8", "trainer.num_nodes=2", f"runs={tmp_path}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["resources"]["accelerators"] == "H100:8"


@pytest.mark.parametrize(
    ("infra", "cloud"), [(["aws/us-east-1", "aws"], "ec2"), (["gcp"], "gce"), (["aws", "gcp"], None), (["k8s"], None)]
)
def test_interruptions_are_announced_where_the_cloud_is_known(infra: list[str], cloud: str | None) -> None:
    assert SkyLauncher(**SETTINGS | {"infra": infra}).notices == cloud


def run_task(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a task as SkyPilot does: by bash, without ``set -e``."""
    env = {"HOME": str(folder), "PATH": "/usr/bin:/bin"} | env
    return subprocess.run(["bash", "-c", script], env=env, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("program", "time", "status"), [("exit 3", "1:00:00", 3), ("exit 143", "1:00:00", 143), ("sleep 60", "0:00:01", 0)]
)
def test_the_time_limit_is_not_a_failure(tmp_path: Path, program: str, time: str, status: int) -> None:
    """SkyPilot starts a job that fails again, so that one that has reached its limit must not fail."""
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    launcher = SkyLauncher(**SETTINGS, time=time, install=False, python=str(tmp_path / "python"))
    done = run_task(yaml.safe_load(launcher.render(JOB))["run"], tmp_path)
    assert done.returncode == status
    assert ("launch.time=0:00:01 reached" in done.stdout) == (status == 0)


def test_the_hook_waits_until_the_run_has_saved(tmp_path: Path) -> None:
    """SkyPilot runs it before it removes the nodes: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""
    (tmp_path / "python").write_text("#!/bin/sh\ntrap 'sleep 1; echo saved >saved; exit 143' TERM\nsleep 60 &\nwait\n")
    (tmp_path / "python").chmod(0o755)
    launcher = SkyLauncher(**SETTINGS, install=False, python=str(tmp_path / "python"))
    task = yaml.safe_load(launcher.render(JOB))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    running = subprocess.Popen(["bash", "-c", task["run"]], env=env, cwd=tmp_path)
    while not (tmp_path / ".boltcutter-pid").is_file() or not (tmp_path / ".boltcutter-pid").read_text().strip():
        pass
    (hook,) = task["config"]["hooks"]
    assert "down" in hook["events"]
    while not subprocess.run(["pgrep", "-P", (tmp_path / ".boltcutter-pid").read_text().strip()], capture_output=True):
        pass
    run_task(hook["run"], tmp_path)
    assert (tmp_path / "saved").is_file()
    assert running.wait(10) == 143


def test_the_setup_installs_the_project_with_its_pins(tmp_path: Path) -> None:
    """The script of each node, with a ``uv`` that records its arguments."""
    tools, venv = tmp_path / ".local" / "bin", tmp_path / "boltcutter-venv" / "bin"
    for file, line in ((tools / "uv", f'echo "$@" >>{tmp_path}/uv'), (venv / "python", f'exec {sys.executable} "$@"')):
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "constraints.txt").touch()
    runs = tmp_path / "bucket" / JOB.folder.parent.name / JOB.folder.name
    runs.mkdir(parents=True)
    subprocess.run(["tar", "-czf", runs / "job.tar.gz", "-C", tmp_path, "code"], check=True)
    text = yaml.safe_load(SkyLauncher(**SETTINGS).render(JOB))["setup"]
    done = run_task(text.replace("s3://bucket/runs", f"file://{tmp_path}/bucket"), tmp_path)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "uv").read_text().splitlines()
    assert called[-1].endswith("-c boltcutter-job/code/constraints.txt ./boltcutter-job/code s3fs")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_job_resumes(
    script: Script, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes train as SkyPilot starts them, one is interrupted, and the job that is started again continues."""
    overrides = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]
    with aws_server("0.0.0.0") as variables, nodes(2, hosts=["head", "worker"]) as machines:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PYTHONPATH")
        store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        store.mkdir("bucket")
        settings = ["launch=sky", "launch.storage=s3://bucket/runs", "launch.infra=[aws]", "launch.install=false"]
        settings += [f"launch.python={sys.executable}", f"runs={tmp_path}", "name=digits"]
        settings += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads
        submitted = script("launch", *settings, *overrides, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1")
        assert submitted.returncode == 0, submitted.stderr
        (folder,) = (tmp_path / "digits").iterdir()
        task = yaml.safe_load((folder / "job.yaml").read_text())
        place = f"bucket/runs/digits/{folder.name}"

        def start() -> list[Process]:
            return [start_node(machines, rank, task, variables) for rank in range(2)]

        first, second = start()
        second.wait_until(lambda: store.exists(f"{place}/checkpoints/last.ckpt"))
        run_hook(machines[0], task)
        for process in (first, second):
            assert process.wait() == signal.SIGTERM + 128, process.output
        last = torch.load(io.BytesIO(store.cat(f"{place}/checkpoints/last.ckpt")), weights_only=True)
        assert last["epoch"] < 4
        for process in start():
            assert process.wait() == 0, process.output
        fetched = script("launch", "fetch", f"run={folder}")
        assert fetched.returncode == 0, fetched.stderr
    record = json.loads((folder / "record.json").read_text())
    assert [attempt["reason"].partition(",")[0] for attempt in record["attempts"]][1:] == ["completed"]
    whole = script("train", *overrides, "trainer.devices=2", f"folder={tmp_path}/whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    ours, theirs = saved_weights(folder), saved_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def start_node(machines: list[Machine], rank: int, task: dict[str, Any], variables: dict[str, str]) -> Process:
    """Run the task on a node, with the variables that SkyPilot documents.

    https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html; the ID is the same in all attempts.
    """
    own = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    own |= {"SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in machines), "HOME": "/root"}
    own |= {"SKYPILOT_TASK_ID": "sky-managed-2026-11-22-12-00-00-000000_digits_1-0"}
    env = own | reachable(variables, machines[rank]) | task["envs"]
    return machines[rank].start(["bash", "-c", task["run"]], env)


def run_hook(machine: Machine, task: dict[str, Any]) -> None:
    machine.run("env", "HOME=/root", "bash", "-c", task["config"]["hooks"][0]["run"])
