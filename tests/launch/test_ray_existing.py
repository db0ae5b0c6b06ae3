"""Runs on a Ray cluster of two nodes that exists before them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
import pytest
from conftest import Script, environment, patience, require
from object_storage import s3_server
from ray_run import OVERRIDES, Run, assert_bitwise_equal

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
BIN = Path(sys.executable).parent
TWO_NODES = ["trainer.num_nodes=2", "trainer.devices=1", "launch.cpus_per_task=1", "launch.timeout=240"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Nodes on this machine, each started by ``ray start``."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        require(package="aiohttp-cors", install="pip install 'ray[default]'")  # of the Jobs API
        self.folder, self.port, self.dashboard = folder, free_port(), free_port()
        self.env = environment(HOME=str(folder), RAY_USAGE_STATS_ENABLED="0", **variables)
        self.log: IO[bytes] = (folder / "cluster.log").open("ab")
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str) -> None:
        command = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", f"--labels=name={name}", *options]
        self.nodes[name] = subprocess.Popen(
            command, env=self.env, cwd=self.folder, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def start_head(self) -> None:
        options = ["--include-dashboard=true", f"--dashboard-port={self.dashboard}", "--dashboard-host=127.0.0.1"]
        self.start("head", "--head", f"--port={self.port}", "--num-cpus=1", f"--temp-dir={self.folder}", *options)
        for port in (self.port, self.dashboard):
            self.wait(port)

    def start_worker(self, name: str) -> None:
        self.start(name, f"--address={self.address}", "--num-cpus=1")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self, port: int) -> None:
        end = time.monotonic() + patience(60)
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.2)
        pytest.fail((self.folder / "cluster.log").read_text())

    def kill(self, name: str) -> None:
        """Kill all processes of a node at once."""
        node = self.nodes.pop(name)
        children = psutil.Process(node.pid).children(recursive=True)
        node.kill()
        node.wait(10)
        for child in children:
            with suppress(psutil.NoSuchProcess):  # those of a killed raylet end by themselves
                child.kill()
        psutil.wait_procs(children, timeout=10)

    def stop(self) -> None:
        for name in list(self.nodes):
            self.kill(name)
        self.log.close()


@contextmanager
def started_cluster(variables: Mapping[str, str]) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path, for sockets
    found = Cluster(folder, variables)
    try:
        found.start_head()
        found.start_worker("one")
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with started_cluster({}) as found:
        yield found


def test_a_run_survives_the_loss_of_a_node(cluster: Cluster, run: Run, script: Script, tmp_path: Path) -> None:
    run.launch(*TWO_NODES, "trainer.max_epochs=60", f"launch.address={cluster.address}")
    ranks = run.wait_until_training(0)
    cluster.start_worker("two")
    cluster.kill("one")
    assert not psutil.wait_procs(ranks.values(), timeout=60)[1]
    run.wait_until_training(1)
    run.wait_until_ended()
    assert run.reasons[-1] == "completed"
    assert len(run.reasons) == 2
    done = script("train", *OVERRIDES, "trainer.max_epochs=60", f"folder={tmp_path}/ddp", timeout=400)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")
    assert cluster.nodes["head"].poll() is None  # the cluster is not ours to end


def test_ranks_end_with_a_killed_driver(cluster: Cluster, run: Run) -> None:
    run.launch(*TWO_NODES, "trainer.max_epochs=60", f"launch.address={cluster.address}")
    ranks = run.wait_until_training(0)
    os.kill(run.driver, signal.SIGKILL)
    assert not psutil.wait_procs(ranks.values(), timeout=60)[1]
    done = run.script("launch", "launch=ray", f"resume={run.folder}", "--wait", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.reasons == ["killed", "completed"]


def test_missing_nodes_are_reported(cluster: Cluster, run: Run) -> None:
    overrides = ["trainer.num_nodes=4", "trainer.devices=1", "launch.timeout=20", f"launch.address={cluster.address}"]
    done = run.script("launch", "launch=ray", *OVERRIDES, *overrides, f"folder={run.folder}", "--wait", timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error: trainer.num_nodes=4 trainer.devices=1: needs 4 nodes with CPU: 1; the cluster has " in run.log
    assert "try trainer.num_nodes=2\n" in run.log


def test_a_job_of_the_cluster_trains_and_is_cancelled(cluster: Cluster, run: Run, script: Script) -> None:
    address = f"launch.address=http://127.0.0.1:{cluster.dashboard}"
    shown = run.launch(*TWO_NODES, "trainer.max_epochs=60", address, fresh=True)
    assert re.search(r"job raysubmit_\w+, (PENDING|RUNNING)", shown)
    run.wait_until_training(0)
    cancelled = script("launch", "cancel", f"run={run.folder}", fresh=True)
    assert cancelled.returncode == 0, cancelled.stderr
    run.wait(lambda: "STOPPED" in script("launch", "status", f"run={run.folder}", fresh=True).stdout)
    assert run.reasons == ["preempted by SIGTERM"]
    # The same script, submitted by hand.
    command = [str(BIN / "ray"), "job", "submit", f"--address=http://127.0.0.1:{cluster.dashboard}"]
    command += ["--", "bash", str(run.folder / "job.sh")]
    done = subprocess.run(command, env=cluster.env, cwd=cluster.folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 60/60" in done.stdout
    assert run.reasons == ["preempted by SIGTERM", "completed"]


@pytest.mark.parametrize("submission", ["node", "jobs-api"])
def test_a_run_without_a_shared_disk_reads_its_code_from_object_storage(
    submission: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes know only the URL; a rank that is killed is restarted, and the run resumes from the storage."""
    with s3_server() as variables, started_cluster(variables) as cluster:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        storage = f"launch.storage=s3://bucket/{tmp_path.name}"
        place = cluster.address if submission == "node" else f"http://127.0.0.1:{cluster.dashboard}"
        address = f"launch.address={place}"
        run = Run(tmp_path / "runs" / "digits" / "stored", script)
        run.launch(*TWO_NODES, "trainer.max_epochs=30", address, storage, f"launch.python={sys.executable}", fresh=True)
        url = f"s3://bucket/{tmp_path.name}/digits/stored"

        def ranks() -> list[psutil.Process]:
            found = psutil.process_iter(["cmdline"])
            return [process for process in found if f"resume={url}" in (process.info["cmdline"] or ())]

        def has_ended() -> bool:  # status reads the record from the storage
            assert script("launch", "status", f"run={run.folder}", fresh=True).returncode == 0
            return run.reasons[-1:] == ["completed"]

        shown = lambda: script("launch", "logs", f"run={run.folder}", fresh=True).stdout  # noqa: E731
        run.wait(lambda: "\nepoch " in shown() and ranks(), 240)
        ranks()[0].kill()
        run.wait(has_ended, 600)
        first, _ = run.reasons
        assert first.startswith(("RankLostError: rank 1 of 2", "killed"))  # depends on which rank was killed
        assert "epoch 30/30" in shown()
        fetched = script("launch", "fetch", f"run={run.folder}", fresh=True)
        assert fetched.returncode == 0, fetched.stderr
    done = script("train", *OVERRIDES, "trainer.max_epochs=30", f"folder={tmp_path}/ddp", timeout=400)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run.folder, tmp_path / "ddp")
