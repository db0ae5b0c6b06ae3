import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT, Script, environment
from forkserver import Forked, ForkServer

from boltcutter.environment import lease, signals
from boltcutter.environment.lease import Holder, LeaseHeldError, LeaseLostError, hold, read_holder

HOLDS = """
import sys, time
from pathlib import Path
from boltcutter.environment import lease
if len(sys.argv) > 2:  # simulates another host, where the process ID is not valid
    lease.socket.gethostname = lambda: sys.argv[2]
    lease.INTERVAL = float(sys.argv[3])
with lease.hold(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(60)
"""


@contextmanager
def holding(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder."""
    command = [sys.executable, "-c", HOLDS, str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    yield
    signals.restore_handlers()


def test_a_folder_is_held_by_one_process_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with holding(folder) as process:
        named = f"in use by process {process.pid} on {socket.gethostname()}"
        with pytest.raises(LeaseHeldError, match=named), hold(folder):
            pass
        process.kill()
        process.wait()
        with hold(folder):  # immediately: on the same host the process ID shows that the holder has exited
            holder = read_holder(folder)
            assert holder
            assert holder.pid == os.getpid()
            assert holder.is_alive()
            lease.check()
    assert read_holder(folder) is None
    assert not any(thread.name == "lease" for thread in threading.enumerate())


def test_an_empty_folder_is_removed_on_release(tmp_path: Path) -> None:
    with hold(tmp_path / "a" / "b"), hold(tmp_path / "c", is_holder=False):
        assert not (tmp_path / "c").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_reused_process_id_does_not_hold_the_lease(tmp_path: Path) -> None:
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    with hold(tmp_path):
        pass


def test_a_full_disk_leaves_no_lease_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dead = json.dumps(asdict(replace(Holder.here(), start_time="1", token="x")))
    for text in (None, dead):
        folder = tmp_path / str(text is None)
        if text:
            folder.mkdir()
            (folder / lease.FILE).write_text(text)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            with pytest.raises(LeaseHeldError, match="cannot be written"), hold(folder):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.rglob("*")] == ["False", lease.FILE]  # the lease of the dead holder
    assert (tmp_path / "False" / lease.FILE).read_text() == dead


def test_a_hidden_process_is_neither_alive_nor_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    gone = replace(Holder.here(), pid=2**22 + 1)  # no entry in /proc, like other users' processes under hidepid
    assert gone.is_alive() is False
    monkeypatch.setattr(os, "kill", refuse)
    assert gone.is_alive() is None


def test_a_process_suspended_while_waiting_checks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 0.5)
    sleep = time.sleep
    with holding(tmp_path, "other-host", "0.2"):
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(1.0))
        with pytest.raises(LeaseHeldError, match="on other-host"), hold(tmp_path):
            pass


def test_the_heartbeat_shows_whether_a_holder_on_another_host_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 2.0)
    with holding(tmp_path, "other-host", "0.2") as process:
        with pytest.raises(LeaseHeldError, match=f"process {process.pid} on other-host"), hold(tmp_path):
            pass
        process.kill()
        process.wait()
        began = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - began > 1.9


def test_a_restarted_job_takes_over_and_its_previous_attempt_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with hold(tmp_path):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        began = time.monotonic()
        later = lease.Lease(tmp_path)
        later.acquire()
        assert 0.15 < time.monotonic() - began < 20
        end = time.monotonic() + 20
        while not signals.received_signal():  # set by the heartbeat thread
            assert time.monotonic() < end
            time.sleep(0.02)
        signals.handle_signal(signal.SIGTERM)
        assert signals.received_signal() == signals.LEASE_LOST
        assert lease.is_lost()
        with pytest.raises(LeaseLostError, match=f"taken over by process {os.getpid()}"):
            lease.check()
        later.check()
    assert read_holder(tmp_path) is not None  # a lost lease is not released
    later.release()
    assert read_holder(tmp_path) is None


def test_one_of_several_concurrent_takeovers_succeeds(tmp_path: Path) -> None:
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    (tmp_path / f"{lease.FILE}.claim").touch()  # of a process killed during a takeover
    leases, refused = [lease.Lease(tmp_path) for _ in range(8)], []

    def acquire(one: lease.Lease) -> None:
        try:
            one.acquire()
        except LeaseHeldError:
            refused.append(one)

    threads = [threading.Thread(target=acquire, args=[one]) for one in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for one in leases:
        one.release()
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_lease_is_acquired_again(tmp_path: Path) -> None:
    with hold(tmp_path):
        (tmp_path / lease.FILE).unlink()
        lease.check()
        assert read_holder(tmp_path) is not None


TRAIN = ["scripts/train.py", "logger=null", "report=false", "test=false", "model=linear", "trainer.max_epochs=100000"]


@contextmanager
def training(
    forks: ForkServer, folder: Path, errors: Path, *overrides: str, fresh: bool = False
) -> Iterator[Forked | subprocess.Popen[bytes]]:
    """A long run that has saved a checkpoint."""
    with ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "wb")).fileno()
        stderr = stack.enter_context(open(errors, "wb")).fileno()
        command, env = [*TRAIN, *overrides, f"folder={folder}"], environment()
        process: Forked | subprocess.Popen[bytes]
        if fresh:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=nothing, stderr=stderr)
            stack.callback(process.wait)
            stack.callback(process.kill)
        else:
            process = stack.enter_context(forks.start(command, env, nothing, stderr))
        end = time.monotonic() + (120 if fresh else 60)
        record = folder / "record.json"
        while not record.exists() or '"saved": true' not in record.read_text():  # the last change until training ends
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        yield process


def take_over(folder: Path) -> Holder:
    """Replace the lease by that of a process on another host."""
    taken = replace(Holder.here(), host="other-host", token="x")
    draft = folder / "draft"
    draft.write_text(json.dumps(asdict(taken)))
    draft.replace(folder / lease.FILE)
    return taken


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_forked_and_spawned_ranks_of_a_lost_folder_stop_writing(forks: ForkServer, tmp_path: Path, method: str) -> None:
    folder, errors = tmp_path / "run", tmp_path / "errors"
    overrides = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    overrides += [f"trainer.strategy.start_method={method}"]
    with training(forks, folder, errors, *overrides, fresh=method == "spawn") as process:
        record = (folder / "record.json").read_bytes()
        taken = take_over(folder)
        assert process.wait(timeout=30) == 1
    stderr = errors.read_text()  # torch may report that it terminated the other rank
    assert f"taken over by process {os.getpid()} on other-host" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert (folder / "record.json").read_bytes() == record
    assert read_holder(folder) == taken


def test_a_second_training_is_refused_and_a_training_that_lost_its_folder_stops_writing(
    forks: ForkServer, script: Script, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with training(forks, folder, tmp_path / "errors") as process:
        for overrides in ([f"resume={folder}"], [f"folder={folder}", "logger=null"]):
            done = script("train", *overrides)
            assert done.returncode == 2
            assert f"process {process.pid} on" in done.stderr
            assert done.stderr.count("\n") == 1
        record = (folder / "record.json").read_bytes()
        taken = take_over(folder)
        assert process.wait(timeout=20) == 1
    errors = (tmp_path / "errors").read_text()
    assert f"taken over by process {os.getpid()} on other-host" in errors
    assert errors.count("\n") == 1
    assert (folder / "record.json").read_bytes() == record
    assert read_holder(folder) == taken
