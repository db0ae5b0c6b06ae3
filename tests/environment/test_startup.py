import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment

# Waits inside torch for another rank, which is never started.
WAITING = """
import torch.distributed as dist
from boltcutter.environment import startup
startup.begin()
startup.prepare()
print("waiting", flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
"""


@pytest.mark.slow
def test_a_signal_ends_a_process_that_waits_for_other_ranks() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
            assert "SIGTERM" in process.stderr.read()
        finally:
            process.kill()


PREPARED = """
import os, signal, threading
from boltcutter.environment import startup
from boltcutter.environment import stop_signals as signals
startup.prepare()
try:
    os.kill(os.getpid(), signal.SIGUSR1)
except signals.PreemptionError as error:
    print(error.code - signal.SIGUSR1)
signals.restore_handlers()
startup.prepare()
startup.finish()
os.kill(os.getpid(), signal.SIGUSR2)
print(signals.received_signal() == signal.SIGUSR2, threading.active_count())
"""


def test_during_training_a_signal_only_sets_the_flag() -> None:
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["128", "True", "1"]


PARENT = """
import os, subprocess, sys, time
os.environ["BOLTCUTTER_PARENT_PID"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""
LAUNCHER = """
import os, subprocess, sys, time
from boltcutter.environment import startup
with startup.announce_launcher():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {"LOCAL_RANK": "1"})
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_a_starting_rank_ends_with_its_launcher() -> None:
    child = "from boltcutter.environment import startup; startup.begin(); print('started', flush=True); "
    assert_child_ends_with(LAUNCHER, f"{child}import time; time.sleep(60)")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_a_training_rank_that_waits_for_a_device_ends_after_rank_zero() -> None:
    child = "from boltcutter.environment import startup; startup.REPORT_TIMEOUT = 0.5; startup.begin(); "
    child += "startup.prepare(); startup.finish(); print('started', flush=True); import time; time.sleep(60)"
    assert_child_ends_with(LAUNCHER, child)


def assert_child_ends_with(parent: str, child: str) -> None:
    """Kill a parent, which prints the ID of its child, once the child has printed that it has started."""
    command = [sys.executable, "-c", parent, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines - {"started"})
        process.kill()
    end = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_a_training_rank_ends_with_the_parent_that_it_must_not_outlive() -> None:
    child = "from boltcutter.environment import startup; startup.begin(); startup.prepare(); startup.finish(); "
    child += "print('started', flush=True); import time; time.sleep(60)"
    assert_child_ends_with(PARENT, child)
    # It has also ended if the parent had exited before.
    orphan = subprocess.run([sys.executable, "-c", child], env=environment(BOLTCUTTER_PARENT_PID="1"), timeout=30)
    assert orphan.returncode == 1


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


# Rank of torchrun that waits for its agent's end before or after the stage, as a slow import would.
RANK = """
import os, sys, time
agent, stage = os.getppid(), sys.argv[2]
from boltcutter.environment import startup
from boltcutter.environment.identity import run_id
from boltcutter.environment.stop_signals import received_signal
def wait():
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    while not received_signal() if stage == "training" else os.getppid() == agent:
        time.sleep(0.01)
if stage == "import":
    wait()
startup.begin()
if stage == "imported":
    wait()
startup.prepare()
with run_id():
    if stage in ("import", "imported"):
        import torch.distributed as dist
        dist.init_process_group("gloo")
    startup.finish()
    wait()  # until it saves and ends
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")
@pytest.mark.parametrize("options", [["--standalone"], ["--master-port"]])
@pytest.mark.parametrize("stage", ["import", "imported", "training"])
def test_ranks_end_soon_after_the_agent_of_torchrun(stage: str, options: list[str], port: str, tmp_path: Path) -> None:
    """They have sessions of their own, and would wait for its store for minutes, holding their devices."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "pids").mkdir()
    options = [*options, port] if options == ["--master-port"] else options
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2"]
    command += [str(tmp_path / "rank.py"), str(tmp_path / "pids"), stage]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as agent:
        try:
            while len(pids := list((tmp_path / "pids").iterdir())) < 2:
                assert agent.poll() is None
                time.sleep(0.05)
        finally:
            agent.kill()
        end = time.monotonic() + 10
        alive = [int(file.name) for file in pids]
        while alive := [pid for pid in alive if is_alive(pid)]:
            if time.monotonic() > end:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"{len(alive)} ranks are left")
            time.sleep(0.1)
