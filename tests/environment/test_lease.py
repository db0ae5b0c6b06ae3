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
from boltcutter.environment.lease import Holder, LeaseHeldError, LeaseLostError, read_holder

HOLDS = """
import sys, time
from pathlib import Path
from boltcutter.environment import lease
if len(sys.argv) > 2:  # as if on another host, of which the number of a process tells nothing
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
        with hold(folder):  # at once, as the number of the process tells on its own host
            holder = read_holder(folder)
            assert holder
            assert holder.pid == os.getpid()
            assert holder.is_alive()
            lease.check()
    assert read_holder(folder) is None
    assert not any(thread.name == "lease" for thread in threading.enumerate())


def test_a_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with hold(tmp_path / "a" / "b"), hold(tmp_path / "c", is_holder=False):
        assert not (tmp_path / "c").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_was_given_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(replace(Holder.here(), started="1", token="x"))))
    with hold(tmp_path):
        pass


def test_on_a_full_disk_nothing_is_left_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dead = json.dumps(asdict(replace(Holder.here(), started="1", token="x")))
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
    assert [path.name for path in tmp_path.rglob("*")] == ["False", lease.FILE]  # that of the dead holder
    assert (tmp_path / "False" / lease.FILE).read_text() == dead


def test_where_a_process_is_hidden_the_heartbeat_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    gone = replace(Holder.here(), pid=2**22 + 1)  # of which there is no /proc, as for other users under hidepid
    assert gone.is_alive() is False
    monkeypatch.setattr(os, "kill", refuse)
    assert gone.is_alive() is None


def test_who_was_suspended_while_waiting_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRES", 0.5)
    sleep = time.sleep
    with holding(tmp_path, "elsewhere", "0.2"):
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(1.0))
        with pytest.raises(LeaseHeldError, match="on elsewhere"), hold(tmp_path):
            pass


def test_from_another_host_the_heartbeat_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRES", 2.0)
    with holding(tmp_path, "elsewhere", "0.2") as process:
        with pytest.raises(LeaseHeldError, match=f"process {process.pid} on elsewhere"), hold(tmp_path):
            pass
        process.kill()
        process.wait()
        began = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - began > 1.9


def test_a_job_that_is_started_again_takes_over_and_the_earlier_start_stops(
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
        while not signals.received_signal():  # nobody has asked: the heartbeat has noticed
            assert time.monotonic() < end
            time.sleep(0.02)
        signals.handle_signal(signal.SIGTERM)
        assert signals.received_signal() == signals.LEASE_LOST
        assert lease.is_lost()
        with pytest.raises(LeaseLostError, match=f"taken over by process {os.getpid()}"):
            lease.check()
        later.check()
    assert read_holder(tmp_path) is not None  # who has lost it does not release it
    later.release()
    assert read_holder(tmp_path) is None


def test_of_many_that_find_a_dead_holder_one_succeeds(tmp_path: Path) -> None:
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(replace(Holder.here(), started="1", token="x"))))
    (tmp_path / f"{lease.FILE}.claim").touch()  # of one that was killed while it took the lease
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


def test_a_removed_lease_is_taken_again(tmp_path: Path) -> None:
    with hold(tmp_path):
        (tmp_path / lease.FILE).unlink()
        lease.check()
        assert read_holder(tmp_path) is not None


TRAIN = ["scripts/train.py", "logger=null", "report=false", "test=false", "model=linear", "trainer.max_epochs=100000"]


@contextmanager
def training(
    forks: ForkServer, folder: Path, errors: Path, *words: str, fresh: bool = False
) -> Iterator[Forked | subprocess.Popen[bytes]]:
    """A run that has a checkpoint, and goes on for long."""
    with ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "wb")).fileno()
        told = stack.enter_context(open(errors, "wb")).fileno()
        command, env = [*TRAIN, *words, f"folder={folder}"], environment()
        process: Forked | subprocess.Popen[bytes]
        if fresh:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=nothing, stderr=told)
            stack.callback(process.wait)
            stack.callback(process.kill)
        else:
            process = stack.enter_context(forks.start(command, env, nothing, told))
        end = time.monotonic() + (120 if fresh else 60)
        while not (folder / "checkpoints" / "last.ckpt").exists():
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        yield process


def take_over(folder: Path) -> Holder:
    """Put the lease of a process on another host in the place of that which is there."""
    taken = replace(Holder.here(), host="elsewhere", token="x")
    draft = folder / "draft"
    draft.write_text(json.dumps(asdict(taken)))
    draft.replace(folder / lease.FILE)
    return taken


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_copies_of_the_process_that_lost_its_folder_stop_writing(
    forks: ForkServer, tmp_path: Path, method: str
) -> None:
    folder, errors = tmp_path / "run", tmp_path / "errors"
    words = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", f"trainer.strategy.start_method={method}"]
    with training(forks, folder, errors, *words, fresh=method == "spawn") as process:
        record = (folder / "record.json").read_bytes()
        taken = take_over(folder)
        assert process.wait(timeout=30) == 1
    told = errors.read_text()  # torch may say that it ended the other one
    assert f"taken over by process {os.getpid()} on elsewhere" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert (folder / "record.json").read_bytes() == record
    assert read_holder(folder) == taken


def test_a_second_training_is_refused_and_one_that_lost_its_folder_stops_writing(
    forks: ForkServer, script: Script, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with training(forks, folder, tmp_path / "errors") as process:
        for words in ([f"resume={folder}"], [f"folder={folder}", "logger=null"]):
            done = script("train", *words)
            assert done.returncode == 2
            assert f"process {process.pid} on" in done.stderr
            assert done.stderr.count("\n") == 1
        record = (folder / "record.json").read_bytes()
        taken = take_over(folder)
        assert process.wait(timeout=20) == 1
    errors = (tmp_path / "errors").read_text()
    assert f"taken over by process {os.getpid()} on elsewhere" in errors
    assert errors.count("\n") == 1
    assert (folder / "record.json").read_bytes() == record
    assert read_holder(folder) == taken
