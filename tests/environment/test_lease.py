import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Script, environment
from forkserver import Forked, ForkServer

from boltcutter.environment import lease
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.lease import Holder, LeaseHeldError, LeaseLostError, hold, read_holder
from boltcutter.environment.this_process import this_process
from boltcutter.run.folder import read_record

HOLDS = """
import sys, time
from pathlib import Path
from typing import Any
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


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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
            lease.check_lease()
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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"start_time": "1"}, False),
        ({"host": "other-host"}, None),
        ({"pid_namespace": "another boot"}, None),  # a container on the same host
        ({"host": "other-host", "pid_namespace": "another boot"}, None),
        ({"pid_namespace": ""}, None),
    ],
    ids=str,
)
def test_a_process_id_is_valid_on_its_host_and_in_its_namespace(changes: dict[str, Any], expected: bool | None) -> None:
    assert replace(Holder.here(), **changes).is_alive() is expected


def test_a_namespace_that_is_unknown_here_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "pid_namespace", lambda: "")
    assert Holder.here().is_alive() is None


@pytest.mark.parametrize(
    ("job", "before", "after", "is_later"),
    [
        ("a", [0, 0], [1, 0], True),
        ("a", [0, 0], [0, 1], True),
        ("a", [1, 3], [2, 0], True),
        ("a", [1, 0], [1, 0], False),  # a second command of the same attempt
        ("a", [1, 0], [0, 1], False),
        (None, [0, 0], [1, 0], False),
        ("b", [0, 0], [1, 0], False),
    ],
)
def test_only_a_later_attempt_of_the_same_job_takes_over(
    job: str | None, before: list[int], after: list[int], is_later: bool
) -> None:
    holder = replace(Holder.here(), job="a" if job else None, restarts=before)
    assert holder.is_restarted_as(replace(Holder.here(), job=job, restarts=after)) is is_later


def test_a_second_command_of_the_same_attempt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with hold(tmp_path), pytest.raises(LeaseHeldError, match="in use by"):
        lease.Lease(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_does_not_renew_the_lease_of_a_process_that_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.05)
    with hold(tmp_path):
        draft = tmp_path / "draft"
        draft.write_text(json.dumps(asdict(replace(Holder.here(), host="other-host", token="x"))))
        os.utime(draft, (1, 1))
        draft.replace(tmp_path / lease.FILE)
        wait_until(lease.is_lost)
        assert (tmp_path / lease.FILE).stat().st_mtime == 1
    assert (tmp_path / lease.FILE).stat().st_mtime == 1


def test_a_takeover_replaces_the_file_that_the_previous_holder_has_open(tmp_path: Path) -> None:
    path = tmp_path / lease.FILE
    path.write_text(json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    with open(path) as before, hold(tmp_path):
        os.utime(before.fileno(), (1, 1))  # its heartbeat
        assert path.stat().st_mtime > 1


def test_a_holder_knows_its_process_and_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", *lease.RESTART_COUNTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    here = Holder.here()
    assert (here.host, here.pid, here.job, here.restarts) == (socket.gethostname(), os.getpid(), "slurm-7", [0, 0])
    assert datetime.fromisoformat(here.acquired_at).utcoffset() == timedelta(0)
    assert str(here) == f"process {os.getpid()} on {socket.gethostname()}, since {here.acquired_at}"
    assert here.token != Holder.here().token
    for count, name in enumerate(lease.RESTART_COUNTS, 1):
        monkeypatch.setenv(name, str(count))
    assert Holder.here().restarts == [1, 2]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"host": "x"', '{"unknown": 1}'])
def test_a_partially_written_lease_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / lease.FILE).write_text(text)
    unknown = read_holder(tmp_path)
    assert unknown
    assert unknown.is_alive() is None
    assert str(unknown) == "process 0 on an unknown host, since an unknown time"
    assert not unknown.is_restarted_as(Holder.here())
    monkeypatch.setattr(lease, "EXPIRY", 0.1)
    began = time.monotonic()
    with hold(tmp_path):
        assert 0.1 <= time.monotonic() - began < 5
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_checked_without_a_lease(tmp_path: Path) -> None:
    assert lease.current() is None
    assert not lease.is_lost()
    lease.check_lease()
    lease.watch(None)
    with hold(tmp_path):
        assert lease.current() is not None
        assert not lease.is_lost()
    assert lease.current() is None
    with pytest.raises(RuntimeError, match="of the run"), hold(tmp_path):
        raise RuntimeError("of the run")
    assert lease.current() is None
    assert list(tmp_path.iterdir()) == []


def test_a_copy_in_another_process_detects_the_loss_and_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.05)
    with hold(tmp_path):
        copy = pickle.loads(pickle.dumps(lease.current()))
        copy.check()
        monkeypatch.setattr(this_process, "lease", None)  # as in a spawned process
        copy.release()
        assert read_holder(tmp_path) is not None
        lease.watch(copy)
        assert lease.current() is copy
        taken = take_over(tmp_path)
        wait_until(lease.is_lost)
        with pytest.raises(LeaseLostError, match="on other-host"):
            lease.check_lease()
        copy.release()
    assert read_holder(tmp_path) == taken


def test_a_storage_that_fails_for_a_while_does_not_lose_the_lease(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with hold(folder):
        path = folder / lease.FILE
        path.rename(tmp_path / "kept")
        path.mkdir()  # which cannot be read as a file
        lease.check_lease()
        path.rmdir()
        (tmp_path / "kept").rename(path)
        lease.check_lease()
        shutil.rmtree(folder)
        lease.check_lease()
        assert not folder.exists()  # a run that the user has removed stays removed


def test_a_previous_attempt_that_is_dead_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    dead = replace(Holder.here(), start_time="1", token="x")
    (tmp_path / ".lease").write_text(json.dumps(asdict(dead)))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    began = time.monotonic()
    with hold(tmp_path):
        assert time.monotonic() - began < lease.INTERVAL
        assert [path.name for path in tmp_path.iterdir()] == [".lease"]


def test_a_lease_that_is_released_while_another_process_waits_is_acquired_at_once(tmp_path: Path) -> None:
    path, foreign = tmp_path / lease.FILE, replace(Holder.here(), host="other-host", token="x")
    path.write_text(json.dumps(asdict(foreign)))
    timer = threading.Timer(0.2, path.unlink)
    timer.start()
    began = time.monotonic()
    with hold(tmp_path):
        assert 0.2 <= time.monotonic() - began < 20
        assert read_holder(tmp_path) != foreign
    timer.join()


def test_a_takeover_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: object) -> None:
        raise PermissionError(errno.EPERM, "refused")

    dead = json.dumps(asdict(replace(Holder.here(), start_time="1", token="x")))
    (tmp_path / lease.FILE).write_text(dead)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(LeaseHeldError, match=r"cannot be written \(refused\); choose another"), hold(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [lease.FILE]
    assert (tmp_path / lease.FILE).read_text() == dead


def test_a_full_disk_leaves_no_lease_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dead = json.dumps(asdict(replace(Holder.here(), start_time="1", token="x")))
    for text, size in ((None, 0), (None, 20), (dead, 0)):  # bytes that still fit
        folder = tmp_path / str(text is None)
        if text:
            folder.mkdir()
            (folder / lease.FILE).write_text(text)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
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


def test_a_process_suspended_while_waiting_checks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 0.5)
    sleep = time.sleep
    with holding(tmp_path, "other-host", "0.2"):
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(1.0))
        with pytest.raises(LeaseHeldError, match="on other-host"), hold(tmp_path):
            pass
    assert capsys.readouterr().out == ""  # a heartbeat that is missing is reported when it is late


def test_the_heartbeat_shows_whether_a_holder_on_another_host_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 2.0)
    monkeypatch.setattr(lease, "INTERVAL", 0.4)
    with holding(tmp_path, "other-host", "0.2") as process:
        with pytest.raises(LeaseHeldError, match=f"process {process.pid} on other-host"), hold(tmp_path):
            pass
        process.kill()
        process.wait()
        began = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - began > 1.9
    notice = f"no heartbeat from process {process.pid} on other-host"
    assert re.fullmatch(
        rf"{re.escape(str(tmp_path))}: {notice}, since .*; taking over in 2 s\n", capsys.readouterr().out
    )


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
        assert 2 * lease.INTERVAL <= time.monotonic() - began < 15
        wait_until(signals.received_signal)  # set by the heartbeat thread
        signals.handle_signal(signal.SIGTERM)
        assert signals.received_signal() == signals.LEASE_LOST
        assert lease.is_lost()
        with pytest.raises(LeaseLostError, match=f"taken over by process {os.getpid()}"):
            lease.check_lease()
        later.check()
    assert read_holder(tmp_path) is not None  # a lost lease is not released
    later.release()
    assert read_holder(tmp_path) is None


DEAD = asdict(replace(Holder.here(), start_time="1", token="x"))


@contextmanager
def paused_takeover(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lease.Lease]:
    """A takeover that has created the file of the successor, but renames it only after the block."""
    (folder / lease.FILE).write_text(json.dumps(DEAD))
    is_paused, later, rename = threading.Event(), threading.Event(), Path.replace
    first = lease.Lease(folder)

    def rename_later(path: Path, target: Path) -> Path:
        if threading.current_thread() is thread:
            is_paused.set()
            later.wait(30)
        return rename(path, target)

    def acquire() -> None:
        with suppress(LeaseHeldError):
            first.acquire()

    monkeypatch.setattr(Path, "replace", rename_later)
    thread = threading.Thread(target=acquire)
    thread.start()
    assert is_paused.wait(30)
    try:
        yield first
    finally:
        later.set()
        thread.join(30)


def test_a_slow_takeover_is_not_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with paused_takeover(tmp_path, monkeypatch) as first:
        for _ in range(2):
            with pytest.raises(LeaseHeldError, match="in use by process"):
                lease.Lease(tmp_path).acquire()
    first.check()
    first.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_takeover_that_was_taken_for_dead_fails_if_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As on a host that was suspended; of the successors but the last, each was killed before it renamed its file."""
    with paused_takeover(tmp_path, monkeypatch) as first:
        before = first._holder
        for number in range(1, count):
            killed = replace(Holder.here(), start_time="1", token=str(number))
            (tmp_path / lease.successor_file(before)).write_text(json.dumps(asdict(killed)))
            before = killed
        is_alive = Holder.is_alive
        monkeypatch.setattr(Holder, "is_alive", lambda holder: holder != first._holder and is_alive(holder))
        second = lease.Lease(tmp_path)
        second.acquire()
    assert [path.name for path in tmp_path.iterdir()] == [lease.FILE]
    second.check()
    with pytest.raises(LeaseLostError):
        first.check()
    first.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", json.dumps(DEAD | {"token": "killed"})], ids=["empty", "written"])
def test_a_takeover_that_was_killed_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 0.1)  # of a partially written file
    (tmp_path / lease.FILE).write_text(json.dumps(DEAD))
    (tmp_path / f"{lease.FILE}.x.next").write_text(content)
    with hold(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [lease.FILE]
        lease.check_lease()
    assert list(tmp_path.iterdir()) == []


def test_a_takeover_of_a_holder_that_was_replaced_meanwhile_is_given_up(tmp_path: Path) -> None:
    with hold(tmp_path):
        late = lease.Lease(tmp_path)
        assert not late._replace(Holder(**DEAD))
        assert [path.name for path in tmp_path.iterdir()] == [lease.FILE]
        lease.check_lease()


def test_one_of_several_concurrent_takeovers_succeeds(tmp_path: Path) -> None:
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    killed = replace(Holder.here(), start_time="1", token="y")  # during a takeover
    (tmp_path / f"{lease.FILE}.x.next").write_text(json.dumps(asdict(killed)))
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
        lease.check_lease()
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
        while not record.exists() or '"saved"' not in record.read_text():  # the last change until training ends
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
        taken = take_over(folder)
        assert process.wait(timeout=30) == 1
    stderr = errors.read_text()  # torch may report that it terminated the other rank
    assert f"taken over by process {os.getpid()} on other-host" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert read_record(folder)["attempts"][-1]["reason"] == "running"  # its end is not written
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
        taken = take_over(folder)
        assert process.wait(timeout=20) == 1
    errors = (tmp_path / "errors").read_text()
    assert f"taken over by process {os.getpid()} on other-host" in errors
    assert errors.count("\n") == 1
    assert read_record(folder)["attempts"][-1]["reason"] == "running"  # its end is not written
    assert read_holder(folder) == taken


@pytest.mark.parametrize("content", [None, "", "[" * 100_000, "{}", '{"pid": "x"}', "wrong type", "path", "escape"])
def test_a_damaged_lease_has_an_unknown_holder(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / lease.FILE
    if content is None:
        os.mkfifo(path)
    else:
        wrong = {"wrong type": {"pid": "1"}, "path": {"token": "../x"}, "escape": {"host": "\x1b]0;"}}
        values = asdict(lease.Holder.here()) | wrong.get(content, {})
        path.write_text(json.dumps(values) if content in wrong else content)
    found = lease.read_holder(tmp_path)
    assert found is not None
    assert (found.host, found.pid) == ("an unknown host", 0)
    assert found.is_alive() is not True
