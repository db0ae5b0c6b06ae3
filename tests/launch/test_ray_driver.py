import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from conftest import environment

from boltcutter.environment import startup
from boltcutter_launch import ray_driver
from boltcutter_launch.ray_driver import Driver, Plan, missing


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
    command = [sys.executable, "-W", "error", "-m", "boltcutter_launch.ray_driver"]
    done = subprocess.run(command, input=plan, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: launch.address=127.0.0.1:9 cannot be reached (")
    assert len(done.stderr.splitlines()) == 1


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
