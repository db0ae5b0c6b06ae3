import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from conftest import environment, require

from boltcutter.environment.lease import Holder
from boltcutter_launch import ray_cluster as module
from boltcutter_launch.job import UnreachableError
from boltcutter_launch.ray_cluster import end_stale_clusters, ray_cluster

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
KILLED = """
import os, sys
from pathlib import Path
from boltcutter_launch.ray_cluster import ray_cluster

with ray_cluster(Path(sys.argv[1]), num_cpus=3):
    import ray
    assert ray.cluster_resources()["CPU"] == 3
    assert ray.get(ray.remote(lambda: os.getppid()).remote())
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_home_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(HOME=str(home)), capture_output=True, text=True, timeout=100)
    assert done.returncode == -9, done.stderr
    assert done.stdout + done.stderr == ""
    assert not list(home.iterdir())
    note = json.loads((tmp_path / "run" / ".ray").read_text())
    assert len(note["processes"]) > 3
    end_stale_clusters(tmp_path / "run")
    assert "removed its processes" in capsys.readouterr().err
    assert not Path(note["folder"]).exists()
    assert not (tmp_path / "run" / ".ray").exists()
    left = [psutil.Process(int(pid)) for pid in note["processes"] if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs([process for process in left if "ray" in process.name()], timeout=10)[1]


@pytest.mark.slow
def test_the_dashboard_is_started_at_the_given_port(tmp_path: Path) -> None:
    code = """
import os, sys, urllib.request
from pathlib import Path
from boltcutter_launch.ray_cluster import ray_cluster

with ray_cluster(Path(sys.argv[1]), num_cpus=1, dashboard=True, ports={"dashboard": int(sys.argv[2])}):
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    headers = {"Authorization": f"Bearer {token.read_text()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}/api/version", headers=headers)
    print(urllib.request.urlopen(request, timeout=30).status)
assert not token.parent.exists()
assert not [name for name in os.environ if name.startswith("RAY_")]
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path), port]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    note, status = done.stdout.splitlines()
    assert note.startswith(f"note: Ray's dashboard is at http://127.0.0.1:{port}; its token is in ")
    assert status == "200"
    assert not (tmp_path / ".ray").exists()


def write_note(folder: Path, holder: Holder) -> None:
    facts = {"holder": asdict(holder), "folder": "/tmp/ray-bc-none", "processes": {}}
    (folder / ".ray").write_text(json.dumps(facts))


def test_a_running_cluster_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Holder.here()
    write_note(tmp_path, here)
    with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*; end it with: kill {os.getpid()}$"):
        end_stale_clusters(tmp_path)
    write_note(tmp_path, replace(here, host="elsewhere"))
    end_stale_clusters(tmp_path)
    assert "on elsewhere" in (shown := capsys.readouterr().err)
    assert "rm -rf /tmp/ray-bc-none" in shown
    (tmp_path / ".ray").write_text('{"hol')
    end_stale_clusters(tmp_path)


def test_mistakes_are_reported_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(**options: object) -> str:
        with pytest.raises(ValueError, match=r"^launch") as caught, ray_cluster(tmp_path, **options):  # type: ignore[arg-type]
            pass
        return str(caught.value)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        unreachable = message(address=f"127.0.0.1:{port}")  # bound, but nothing listens
        assert unreachable.startswith(f"launch.address=127.0.0.1:{port} cannot be reached (")
        assert "ray start --head" in unreachable
        assert message(ports={"metrics": port}).startswith(f"launch.ports: {port} cannot be used (")
    assert message(ports={"gcs": 1}) == "launch.ports.gcs: no such port; choose from dashboard, metrics"
    monkeypatch.setitem(sys.modules, "ray", None)
    assert message() == "launch: ray is not installed; pip install 'boltcutter[ray]'"


def test_a_ray_that_does_not_start_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def init(**options: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.\nThe GCS is overloaded.")  # as Ray does

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(module._end, "__defaults__", (0.1,))
    with pytest.raises(UnreachableError) as caught, ray_cluster(tmp_path):
        pass
    fault = "The current node timed out during startup. The GCS is overloaded"
    assert str(caught.value).startswith(f"launch: Ray does not start on this machine ({fault}); try again when it is ")
    assert "\n" not in str(caught.value)
    assert started[0].wait(5) == -9
    assert not list(tmp_path.iterdir())
