import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import environment, require

from boltcutter.environment import ray_cluster as module
from boltcutter.environment.ray_cluster import ClusterError, ray_cluster, remove_stale_clusters

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
KILLED = """
import os
from boltcutter.environment.ray_cluster import ray_cluster

with ray_cluster(num_cpus=3):
    import ray
    assert ray.cluster_resources()["CPU"] == 3
    assert ray.get(ray.remote(lambda: os.getppid()).remote())
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_home_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, root = tmp_path / "home", Path(tempfile.mkdtemp())  # with a path that is short enough for sockets
    home.mkdir()
    monkeypatch.setattr(module, "_temp_root", lambda: str(root))
    command = [sys.executable, "-W", "error", "-c", KILLED]
    done = subprocess.run(
        command, env=environment(HOME=str(home), TMPDIR=str(root)), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -9, done.stderr
    assert done.stdout + done.stderr == ""
    assert not list(home.iterdir())
    remove_stale_clusters()
    assert "removed its processes" in capsys.readouterr().err
    root.rmdir()
    left = [process for process in psutil.process_iter(["cmdline"]) if str(root) in str(process.info["cmdline"])]
    assert not psutil.wait_procs(left, timeout=10)[1]


@pytest.mark.slow
def test_the_dashboard_is_started_at_the_given_port(tmp_path: Path) -> None:
    code = """
import os, sys, urllib.request
from pathlib import Path
from boltcutter.environment.ray_cluster import ray_cluster

with ray_cluster(num_cpus=1, dashboard=True, ports={"dashboard": int(sys.argv[1])}):
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    headers = {"Authorization": f"Bearer {token.read_text()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/api/version", headers=headers)
    print(urllib.request.urlopen(request, timeout=30).status)
assert not token.parent.exists()
assert not [name for name in os.environ if name.startswith("RAY_")]
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "error", "-c", code, port]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    note, status = done.stdout.splitlines()
    assert note.startswith(f"note: Ray's dashboard is at http://127.0.0.1:{port}; its token is in ")
    assert status == "200"


def test_a_running_cluster_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_temp_root", lambda: str(tmp_path))
    with module._temp_folder() as temp:
        remove_stale_clusters()
        assert temp.is_dir()
    left = tmp_path / "ray-bc-left"
    left.mkdir()
    remove_stale_clusters()
    assert left.is_dir()  # is just being created
    (left / "lock").touch()
    assert not capsys.readouterr().err
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"{left}/logs"]) as process:
        remove_stale_clusters()
        assert process.wait(5) == -9
    assert f"removed its processes and {left}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_mistakes_are_reported_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(**options: object) -> str:
        with pytest.raises(ValueError, match=r"^launch") as caught, ray_cluster(**options):  # type: ignore[arg-type]
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
        if len(started) < 3:
            raise Exception("The current node timed out during startup.\nThe GCS is overloaded.")  # as Ray does

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(module._end, "__defaults__", (0.1,))
    with pytest.raises(ClusterError) as caught, ray_cluster():
        pass
    fault = "The current node timed out during startup. The GCS is overloaded"
    assert str(caught.value).startswith(f"launch: Ray does not start on this machine ({fault}); try again when it is ")
    assert "\n" not in str(caught.value)
    with ray_cluster(timeout=600):  # within which it is started again
        assert len(started) == 3
    assert [process.wait(5) for process in started] == [-9] * 3
    assert not list(tmp_path.iterdir())
