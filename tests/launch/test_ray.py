import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import QUICK, Script, saved_weights

from boltcutter.launch.job import Job
from boltcutter.launch.ray import RayLauncher

# No dropout or BatchNorm, so that the epochs are short.
OVERRIDES = [*QUICK, "model=mlp", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def job(folder: Path, **facts: Any) -> Job:
    return Job("digits", folder, Path("/p/train.py"), **facts)


def plan(text: str) -> dict[str, Any]:
    """The plan in a job script, as the driver reads it."""
    return dict(json.loads(text.split("<<'PLAN'\n")[1].removesuffix("\nPLAN\n")))


def test_the_script_starts_the_driver_with_its_plan(tmp_path: Path) -> None:
    launcher = RayLauncher(python="/v/python", environment={"A": "it's"}, max_restarts=3)
    text = launcher.render(job(tmp_path, devices=2, num_workers=1, trusted=True, code=tmp_path / "code"))
    assert "export A='it'\"'\"'s'\n" in text
    assert f"export PYTHONPATH={tmp_path}/code/src" in text
    assert "exec /v/python -m boltcutter.launch.ray_driver <<'PLAN'\n" in text
    found = plan(text)
    assert found["command"] == ["/v/python", "/p/train.py", f"resume={tmp_path}", "trust=true"]
    assert (found["nodes"], found["devices"], found["cpus"], found["gpus"]) == (1, 2, 2, False)
    assert found["environment"] == {"OMP_NUM_THREADS": "2", "A": "it's"}
    assert (found["address"], found["max_restarts"]) == (None, 3)
    assert plan(RayLauncher(address="auto", cpus_per_task=0.5).render(job(tmp_path)))["cpus"] == 0.5
    assert plan(RayLauncher(address="http://head:8265").render(job(tmp_path)))["address"] == "auto"


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


def test_a_job_that_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = os.cpu_count() or 1
    with pytest.raises(
        ValueError, match=rf"^trainer\.devices={cpus + 1}: 1 CPUs each .* try launch\.cpus_per_task=0\."
    ):
        RayLauncher().check(job(tmp_path, devices=cpus + 1))
    with pytest.raises(ValueError, match=r"^trainer\.num_nodes=2: a Ray of its own has one node"):
        RayLauncher().check(job(tmp_path, nodes=2))
    with pytest.raises(ValueError, match=r"^launch\.address=127\.0\.0\.1:9 cannot be reached"):
        RayLauncher(address="127.0.0.1:9").check(job(tmp_path, nodes=2))
    with pytest.raises(ValueError, match=r"^launch\.address=http://127\.0\.0\.1:9 cannot be reached"):
        RayLauncher(address="http://127.0.0.1:9").check(job(tmp_path, nodes=2))
    monkeypatch.setattr("boltcutter.launch.ray.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^launch=ray: ray is not installed; pip install 'boltcutter\[ray\]'"):
        RayLauncher().check(job(tmp_path))


class Run:
    """A run that is launched on Ray, and ended with the test."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.folder, self._script = folder, script

    def launch(self, *overrides: str, **options: Any) -> str:
        done = self._script("launch", "launch=ray", *OVERRIDES, *overrides, f"folder={self.folder}", **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "ray.log").read_text()

    @property
    def record(self) -> Any:
        return json.loads((self.folder / "record.json").read_text())

    @property
    def reasons(self) -> list[str]:
        return [attempt["reason"].partition(",")[0] for attempt in self.record["attempts"]]

    @property
    def driver(self) -> int:
        return int(self.record["launch"]["id"].split()[0])

    def ranks(self, attempt: int) -> dict[int, psutil.Process]:
        """The training processes of an attempt, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                if f"resume={self.folder}" in process.cmdline():
                    env = process.environ()
                    if int(env["TORCHELASTIC_RESTART_COUNT"]) == attempt:
                        found[int(env["RANK"])] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def wait(self, what: Callable[[], Any], seconds: float = 120) -> Any:
        """Return the first true value of ``what``, or fail with the log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.1)
        pytest.fail(f"not within {seconds} s:\n{self.log}")

    def is_training(self, attempt: int) -> bool:
        """Whether that attempt has trained for an epoch."""
        starts = self.log.split("all ranks restart, ")
        return len(starts) == attempt + 1 and "\nepoch " in starts[-1] and len(self.ranks(attempt)) == 2

    def wait_until_training(self, attempt: int) -> dict[int, psutil.Process]:
        self.wait(lambda: self.is_training(attempt))
        return self.ranks(attempt)

    def wait_until_ended(self, seconds: float = 180) -> None:
        self.wait(lambda: not psutil.pid_exists(self.driver) or self.status() == psutil.STATUS_ZOMBIE, seconds)

    def status(self) -> str:
        try:
            return psutil.Process(self.driver).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_ZOMBIE


@pytest.fixture
def run(tmp_path: Path, script: Script) -> Any:
    """A run, and the assertion that nothing of Ray is left behind it."""
    found = Run(tmp_path / "run", script)
    yield found
    if not (found.folder / "record.json").exists():
        return
    started = [psutil.Process(found.driver)] if psutil.pid_exists(found.driver) else []
    started += [child for process in started for child in process.children(recursive=True)]
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left
    assert not (found.folder / ".ray").exists()


def assert_bitwise_equal(one: Path, other: Path) -> None:
    ours, theirs = saved_weights(one), saved_weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


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
    assert "RayTrainWorker" in worker.name()
    worker.kill()
    run.wait_until_training(2)
    run.wait_until_ended()
    assert run.reasons == ["killed", "killed", "completed"]
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
def test_nothing_of_a_killed_driver_is_left(run: Run, script: Script) -> None:
    run.launch("trainer.max_epochs=60")
    ranks = run.wait_until_training(0)
    note = json.loads((run.folder / ".ray").read_text())
    os.kill(run.driver, signal.SIGKILL)
    assert not psutil.wait_procs(ranks.values(), timeout=30)[1]
    done = script("launch", "launch=ray", f"resume={run.folder}", "--wait", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.reasons == ["killed", "completed"]
    assert "note: Ray was not shut down by process" in run.log
    assert not Path(note["folder"]).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failure_of_the_training_is_not_restarted(run: Run) -> None:
    done = run._script(
        "launch", "launch=ray", *OVERRIDES, "optimizer.lr=1e30", f"folder={run.folder}", "--wait", timeout=300
    )
    assert done.returncode == 1
    assert "exited with status 1" in run.log
    assert "all ranks restart" not in run.log
    assert sys.executable in (run.folder / "job.sh").read_text()
