import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Script, require
from ray_run import OVERRIDES, Run, assert_bitwise_equal

from boltcutter.launch import ray as launcher_module
from boltcutter.launch.job import Job, UnclearSubmissionError, UnreachableError
from boltcutter.launch.ray import RayLauncher

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")


def job(folder: Path, **facts: Any) -> Job:
    return Job("digits", folder, Path("/p/train.py"), **facts)


def plan(text: str) -> dict[str, Any]:
    """The plan in a job script, as the driver reads it."""
    return dict(json.loads(text.split("<<'PLAN'\n")[1].removesuffix("\nPLAN\n")))


def test_the_script_starts_the_driver_with_its_plan(tmp_path: Path) -> None:
    launcher = RayLauncher(python="/v/python", environment={"A": "it's"}, max_restarts=3)
    text = launcher.render(job(tmp_path, devices=2, num_workers=1, digests=("0" * 32,), code=tmp_path / "code"))
    assert "export A='it'\"'\"'s'\n" in text
    assert f"export PYTHONPATH={tmp_path}/code/src" in text
    assert "exec /v/python -m boltcutter.launch.ray_driver <<'PLAN'\n" in text
    found = plan(text)
    assert found["command"] == [
        "/v/python",
        "/p/train.py",
        f"resume={tmp_path}",
        "trust=sha256:00000000000000000000000000000000",
    ]
    assert (found["nodes"], found["devices"], found["cpus"], found["gpus"]) == (1, 2, 2, False)
    assert found["environment"] == {"OMP_NUM_THREADS": "2", "A": "it's"}
    assert (found["address"], found["max_restarts"]) == (None, 3)
    assert plan(RayLauncher(address="auto", cpus_per_task=0.5).render(job(tmp_path)))["cpus"] == 0.5
    assert plan(RayLauncher(address="auto").render(job(tmp_path, gpus=True)))["gpus"]
    assert plan(RayLauncher().render(job(tmp_path, gpus=True)))["gpus"] == torch.cuda.is_available()
    assert plan(RayLauncher(address="http://head:8265").render(job(tmp_path)))["address"] == "auto"
    assert not RayLauncher(address="http.example:8265").is_remote  # an address of a record that is not seen to be a URL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "head"}, "launch.address=head: expected auto, host:port or http://host:8265; correct it"),
        ({"max_restarts": -1}, "launch.max_restarts=-1 is less than 0; try launch.max_restarts=0"),
        ({"ports": {"gcs": 1}}, "launch.ports.gcs: no such port; choose from dashboard, metrics"),
        ({"address": "auto", "dashboard": True}, "launch.dashboard: that of an existing cluster is not changed; "),
        ({"environment": {"API_TOKEN": "x"}}, "launch.environment.API_TOKEN: secrets must not be written"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        RayLauncher(**settings)


def test_gpus_with_a_driver_that_is_too_old_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"^trainer\.accelerator=auto: .* the driver may be too old for CUDA 13\.0"):
        RayLauncher().check(job(tmp_path, gpus=True))
    RayLauncher().check(job(tmp_path, gpus=False))


def test_a_job_that_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.num_nodes=2: a Ray of its own has one node"):
        RayLauncher().check(job(tmp_path, nodes=2))
    for address in ("127.0.0.1:9", "http://127.0.0.1:9"):
        RayLauncher(address=address).check(job(tmp_path, nodes=2))
        with pytest.raises(ValueError, match=rf"^launch\.address={address} cannot be reached"):
            RayLauncher(address=address).submit(job(tmp_path, nodes=2), tmp_path / "job.sh")
    monkeypatch.setattr("boltcutter.launch.ray.find_spec", lambda name: None)
    RayLauncher().check(job(tmp_path))  # --dry-run needs no Ray
    with pytest.raises(ValueError, match=r"^launch=ray: ray is not installed; pip install 'boltcutter\[ray\]'"):
        RayLauncher().submit(job(tmp_path), tmp_path / "job.sh")


class JobsAPI(ThreadingHTTPServer):
    """The Jobs API: replies by method and path, the last one again and again; None: no answer.

    https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), JobsAnswer)
        self.replies: dict[str, list[tuple[int, str] | None]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class JobsAnswer(BaseHTTPRequestHandler):
    server: JobsAPI

    def do_GET(self) -> None:
        version = {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}
        replies = self.server.replies.get(f"{self.command} {self.path}", [(200, json.dumps(version))])
        if not (reply := replies.pop(0) if len(replies) > 1 else replies[0]):
            time.sleep(1)
            return
        self.send_response(reply[0])
        self.send_header("Content-Length", str(len(reply[1])))
        self.end_headers()
        self.wfile.write(reply[1].encode())

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobsAPI]:
    monkeypatch.setattr(launcher_module, "ANSWER_SECONDS", 0.5)
    with JobsAPI() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_head_that_is_starting_is_waited_for(jobs: JobsAPI, tmp_path: Path) -> None:
    busy = (500, "No available agent to submit job, please try again later.")
    jobs.replies["POST /api/jobs/"] = [busy, (200, '{"job_id": "1", "submission_id": "raysubmit_1"}')]
    launcher = RayLauncher(address=jobs.address, timeout=20)
    assert launcher.submit(job(tmp_path), tmp_path / "job.sh") == ["raysubmit_1"]
    jobs.replies["POST /api/jobs/"] = [busy]
    with pytest.raises(
        UnreachableError, match=r"^launch\.address=http.* 500: No available agent .*; start its dashboa"
    ):
        RayLauncher(address=jobs.address, timeout=0).submit(job(tmp_path), tmp_path / "job.sh")


def test_a_jobs_api_that_does_not_answer_is_one_line(jobs: JobsAPI, tmp_path: Path) -> None:
    launcher = RayLauncher(address=jobs.address)
    jobs.replies = {"POST /api/jobs/": [None], "GET /api/jobs/raysubmit_1": [None]}
    with pytest.raises(UnclearSubmissionError, match=r"^launch\.address=http.*timed out.*; see `ray job list` before"):
        launcher.submit(job(tmp_path), tmp_path / "job.sh")
    with pytest.raises(UnreachableError, match=r"^launch\.address=http.*timed out.*; start its dashboard"):
        launcher.status("raysubmit_1")
    jobs.replies["GET /api/jobs/raysubmit_1"] = [(404, "Job raysubmit_1 does not exist")]
    with pytest.raises(UnreachableError, match="404: Job raysubmit_1 does not exist"):
        launcher.status("raysubmit_1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_train_as_two_processes_of_ddp(run: Run, script: Script, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    run.launch("--wait", "test=false", f"launch.environment={{HOME: {home}}}", timeout=200)
    assert run.reasons == ["completed"]
    assert "launch: ends with status 0" in run.log
    assert {path.name for path in home.iterdir()} <= {".cache", ".config"}  # of Matplotlib, and our key
    done = script("train", *OVERRIDES, "test=false", f"folder={tmp_path}/ddp")
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_the_loss_of_a_process_and_of_a_worker(run: Run, script: Script, tmp_path: Path) -> None:
    run.launch("trainer.max_epochs=60")
    run.wait_until_training(0)[1].kill()
    worker = run.wait_until_training(1)[0].parent()
    assert worker is not None
    assert "Node" in worker.name()
    worker.kill()
    run.wait_until_training(2)
    run.wait_until_ended()
    first, *others = run.reasons
    assert first.startswith(("RankLostError: rank 1 of 2", "killed"))  # depends on whether rank 0 could still record it
    assert others == ["killed", "completed"]
    assert "launch: rank 1 was killed by SIGKILL" in run.log
    done = script("train", *OVERRIDES, "trainer.max_epochs=60", f"folder={tmp_path}/ddp", timeout=300)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_run_saves_and_is_resumed(run: Run, script: Script, tmp_path: Path) -> None:
    run.launch("trainer.max_epochs=60")
    run.wait_until_training(0)
    assert script("launch", "cancel", f"run={run.folder}").returncode == 0
    run.wait_until_ended()
    assert run.reasons == ["preempted by SIGTERM"]
    done = script("launch", "launch=ray", f"resume={run.folder}", "--wait", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.reasons == ["preempted by SIGTERM", "completed"]
    done = script("train", *OVERRIDES, "trainer.max_epochs=60", f"folder={tmp_path}/ddp", timeout=300)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_of_a_killed_driver_is_left(run: Run, script: Script, tmp_path: Path) -> None:
    run.launch("trainer.max_epochs=60")
    ranks = run.wait_until_training(0)
    started = " ".join(" ".join(child.cmdline()) for child in psutil.Process(run.driver).children(recursive=True))
    folder = re.findall(r"/[\w/-]*/ray-bc-\w+", started)[0]
    os.kill(run.driver, signal.SIGKILL)
    assert not psutil.wait_procs(ranks.values(), timeout=30)[1]
    done = script("launch", "launch=ray", f"resume={run.folder}", "--wait", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.reasons == ["killed", "completed"]
    assert "note: Ray was not shut down by an earlier process" in run.log
    assert not Path(folder).exists()
    done = script("train", *OVERRIDES, "trainer.max_epochs=60", f"folder={tmp_path}/ddp", timeout=300)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_ends_when_it_was_restarted_as_often_as_allowed(run: Run) -> None:
    run.launch("trainer.max_epochs=60", "launch.max_restarts=0")
    run.wait_until_training(0)[1].kill()
    run.wait_until_ended()
    assert "launch: launch.max_restarts=0 reached" in run.log
    assert "all ranks restart" not in run.log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failure_of_the_training_is_not_restarted(run: Run) -> None:
    done = run.script(
        "launch", "launch=ray", *OVERRIDES, "optimizer.lr=1e30", f"folder={run.folder}", "--wait", timeout=300
    )
    assert done.returncode == 1
    assert "exited with status 1" in run.log
    assert "all ranks restart" not in run.log
    assert sys.executable in (run.folder / "job.sh").read_text()
