import io
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from conftest import environment, require

from boltcutter.environment import startup
from boltcutter.launch import ray_driver
from boltcutter.launch.job import UnreachableError
from boltcutter.launch.ray_driver import Driver, Plan, missing

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")


@pytest.mark.parametrize(
    ("nodes", "devices", "gpus", "cluster", "remedy"),
    [
        (1, 2, False, [{"CPU": 2}], None),
        (1, 2, False, [{"CPU": 1}, {"CPU": 1}], "fewer devices, a smaller launch.cpus_per_task"),
        (2, 1, False, [{"CPU": 4}], "trainer.num_nodes=1"),
        (2, 1, False, [{"CPU": 4}, {"CPU": 1}], None),
        (1, 1, True, [{"CPU": 4}], "fewer devices, a smaller launch.cpus_per_task, or trainer.accelerator=cpu"),
        (1, 1, True, [], "fewer devices, a smaller launch.cpus_per_task, or trainer.accelerator=cpu"),
        (2, 4, True, [{"CPU": 8, "GPU": 4}] * 2, None),
    ],
)
def test_missing_resources_are_reported_with_the_remedy(
    nodes: int, devices: int, gpus: bool, cluster: list[dict[str, float]], remedy: str | None
) -> None:
    fault = missing(Plan("run", [], nodes=nodes, devices=devices, gpus=gpus), cluster)
    assert (fault and fault.rpartition("; try ")[2]) == remedy
    assert not fault or fault.startswith(f"trainer.num_nodes={nodes} trainer.devices={devices}: needs ")


def test_the_message_names_what_is_needed_and_what_is_there() -> None:
    plan = Plan("run", [], devices=2, cpus=3, gpus=True)
    assert missing(plan, [{"CPU": 4, "GPU": 1}, {"CPU": 8}]) == (
        "trainer.num_nodes=1 trainer.devices=2: needs 1 node with CPU: 6, GPU: 2; the cluster has CPU: 4, GPU: 1; "
        "CPU: 8, GPU: 0; try fewer devices, a smaller launch.cpus_per_task, or trainer.accelerator=cpu"
    )


def test_a_cluster_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    plan = json.dumps({"folder": str(tmp_path), "command": [], "address": "127.0.0.1:9", "timeout": 0})
    command = [sys.executable, "-W", "error", "-m", "boltcutter.launch.ray_driver"]
    done = subprocess.run(command, input=plan, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: launch.address=127.0.0.1:9 cannot be reached (")
    assert len(done.stderr.splitlines()) == 1


def test_a_ray_that_does_not_start_is_a_failure_not_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnreachableError("launch: Ray does not start")

    monkeypatch.setattr(ray_driver, "ray_cluster", refuse)
    plan = json.dumps({"folder": f"s3://bucket/{tmp_path.name}", "command": []})
    monkeypatch.setattr("sys.stdin", io.StringIO(plan))
    with startup.restored_signals():
        assert ray_driver.run_plan() == 1
    assert capsys.readouterr().err == "error: launch: Ray does not start\n"


def test_nodes_are_requested_before_they_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler adds nodes only then, and keeps them until the request is withdrawn.

    https://docs.ray.io/en/latest/cluster/running-applications/autoscaler/reference.html.
    """
    nodes: list[dict[str, Any]] = []
    requests: list[list[dict[str, float]]] = []

    def request_resources(*, bundles: list[dict[str, float]]) -> None:
        requests.append(bundles)
        nodes[:] = [{"Alive": True, "Resources": {"CPU": 8, "GPU": 2}} for _ in bundles]

    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", request_resources)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(ray_driver, "ray_cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Driver, "_train", lambda _: len(nodes))
    plan = Plan(str(tmp_path), [], nodes=2, devices=2, gpus=True, cpus=4, address="auto", timeout=0)
    with startup.restored_signals():
        assert Driver(plan).run() == 2
    assert requests == [[{"CPU": 8, "GPU": 2}] * 2, []]


RANK = """
import os, signal, sys, time
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
facts = [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ADDED")]
Path(sys.argv[1], f"{attempt}-{rank}").write_text(" ".join(facts))
if sys.argv[2] == "waits":
    time.sleep(600)
if attempt == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else sys.exit(3)
if attempt == "0":
    time.sleep(1)
    sys.exit(1)  # as a rank whose connections are closed
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("what", "status", "attempts"), [("killed", 0, 2), ("fails", 3, 1), ("waits", 4, 1)])
def test_ranks_restart_if_one_is_killed_and_get_signals(what: str, status: int, attempts: int, tmp_path: Path) -> None:
    own = [sys.executable, "-c", RANK, str(tmp_path), what]
    plan = {"folder": str(tmp_path / "run"), "command": own, "devices": 2, "cpus": 0.5, "environment": {"ADDED": "x"}}
    command = [sys.executable, "-m", "boltcutter.launch.ray_driver"]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment(HOME=str(tmp_path)), text=True, **options) as driver:
        assert driver.stdin
        assert driver.stdout
        driver.stdin.write(json.dumps(plan))
        driver.stdin.close()
        while what == "waits" and not (tmp_path / "0-1").exists():
            assert driver.poll() is None
            time.sleep(0.1)
        if what == "waits":
            driver.terminate()
        log = driver.stdout.read()
        assert driver.wait(60) == status, log
    found = {file.name: file.read_text() for file in tmp_path.glob("?-?")}
    assert found == {f"{attempt}-{rank}": f"2 {rank} 127.0.0.1 x" for attempt in range(attempts) for rank in range(2)}
    assert ("launch: all ranks restart, 1 of 10" in log) == (attempts == 2), log
    assert ("launch: rank 1 was killed by SIGKILL" in log) == (what == "killed"), log
