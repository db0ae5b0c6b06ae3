import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hanging import hanging, places

from boltcutter.environment import hang

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux names memory files in /proc")
STACKS = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/x/threading.py", line 3 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/somewhere/task.py", line 31 in training_step
  File "/somewhere/train.py", line 6 in <module>
"""


def test_the_stack_of_the_main_thread_is_read() -> None:
    assert hang.main_stack(STACKS, 0x7F0000000001)[0].function == "wait"
    assert hang.main_stack(STACKS, 0x7F0000000002)[0] == hang.Frame("/somewhere/task.py", 31, "training_step")
    assert hang.main_stack(STACKS, 5)[0].line == 31  # that of the last thread, as far as is known
    assert hang.main_stack("", 5) == []


def test_calls_in_a_copy_of_the_library_are_none_of_the_user() -> None:
    copy = "/copy/boltcutter/"
    stack = STACKS.replace("/usr/lib/x/threading.py", f"{copy}strategy/mpi.py")
    here, there = (hang.main_stack(stack, 0x7F0000000001, places)[0] for places in ((copy,), hang.PLACES))
    assert (here.is_of_user, there.is_of_user) == (False, True)
    assert str(here).startswith(f"{copy}strategy/mpi.py:3 in wait")


@pytest.mark.parametrize("packages", ["/venv/lib/site-packages/", f"{hang.STANDARD[0]}site-packages/"])
def test_the_place_of_a_rank_that_waits_is_what_calls_the_operation(packages: str) -> None:
    waiting = hang.Frame(f"{packages}torch/distributed/distributed_c10d.py", 9, "all_reduce")
    caller = hang.Frame(f"{hang.LIBRARY}callback/preemption.py", 8, "_reduce")
    outer = hang.Frame(f"{hang.LIBRARY}training/train.py", 7, "train")
    mine = hang.Frame("/mine/task.py", 6, "training_step")
    standard = hang.Frame(f"{hang.STANDARD[0]}threading.py", 5, "wait")
    other = hang.Frame(f"{packages}other/hook.py", 4, "flush")
    assert hang.place_of([waiting, caller, outer]) == caller
    assert hang.place_of([waiting, mine, caller, outer]) == mine
    assert hang.place_of([standard, other, caller, outer]) == other
    assert hang.place_of([standard]) == standard


def test_a_worker_that_a_signal_has_stopped_is_named() -> None:
    facts = {"rank": 0, "pid": 1, "host": "a", "step": 2, "epoch": 0, "batch": 2, "joined": False, "attempt": ["train"]}
    rank: Any = SimpleNamespace(pid=1, is_rank=True, facts=facts, collective="", place=None, note="", frames=[])
    stopped, idle, busy = (SimpleNamespace(**vars(rank) | {"pid": pid, "is_rank": False}) for pid in (2, 3, 4))
    stopped.note, busy.place = hang.STATES["T"], hang.Frame("/mine/data.py", 5, "collate")
    (found,) = hang.describe([rank, stopped, idle, busy])
    assert found["workers"] == [
        {"pid": 2, "place": "stopped by a signal"},
        {"pid": 4, "place": "/mine/data.py:5 in collate"},
    ]


@pytest.mark.parametrize(
    "kinds",
    [["hold_the_lock_of_python", "fork"], pytest.param(["wait_for_lock", "compute", "stop"], marks=pytest.mark.slow)],
)
def test_each_rank_is_found_with_its_place_whatever_it_waits_for(tmp_path: Path, kinds: list[str]) -> None:
    with hanging(tmp_path / "run", *kinds) as started:
        found, end = places(tmp_path / "run", len(kinds)), time.monotonic() + 60
        while any("in fork:" in place and "in compute" not in place for place in found) and time.monotonic() < end:
            found = places(tmp_path / "run", len(kinds))  # the process that it forks has just begun
        for place in found:
            assert str(tmp_path / "program.py") in place
            assert "in fork:" not in place or "in compute" in place
        assert [process.poll() for process in started] == [None] * len(kinds), "asking ends nothing"


def test_sigusr2_has_the_places_of_all_ranks_printed_and_logged(tmp_path: Path) -> None:
    with hanging(tmp_path / "run", "hold_the_lock_of_python", "compute") as started:
        places(tmp_path / "run", 2)
        started[0].send_signal(signal.SIGUSR2)
        assert started[0].stderr is not None
        said = ""
        while said.count("program.py:") < 2:
            said += started[0].stderr.readline()
        assert [process.poll() for process in started] == [None, None]
    assert "SIGUSR2" in said
    assert "in hold_the_lock_of_python" in said
    assert "in compute" in said
    assert "in compute" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_files_that_grow_are_progress(tmp_path: Path) -> None:
    watch = hang.Watch(str(tmp_path), 0.1, os.getpid())
    watch.seen = {1: ("", 0.0)}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "shard").write_text("weights")
    assert not watch.has_saved(10.0, 10.0), "it was written before"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("waiting")
    assert not watch.has_saved(11.0, 11.0)
    (tmp_path / "checkpoints" / "shard").write_text("more weights")
    assert watch.has_saved(12.0, 12.0)
    assert watch.seen == {1: ("", 12.0)}


@pytest.mark.slow
def test_processes_of_another_run_are_not_found(tmp_path: Path) -> None:
    with hanging(tmp_path / "run", "wait_for_lock"):
        assert not hang.find(str(tmp_path / "other"))
        held = [hang.find(str(tmp_path / "run")) for _ in range(2)]
        assert [len(found) for found in held] == [1, 1], "one that reads the facts is no process of the run"
        for process in (*held[0], *held[1]):
            process.close()


@pytest.mark.parametrize("kind", ["wait_for_lock", pytest.param("hold_the_lock_of_python", marks=pytest.mark.slow)])
def test_a_run_without_progress_is_reported_and_ended_after_a_second_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr(hang, "END_SECONDS", 0.5)
    with hanging(tmp_path / "run", kind) as (process,):
        hang.Watch(str((tmp_path / "run").resolve()), 0.4, process.pid).run()
        assert process.wait(10)
        _, err = process.communicate()
    said = capsys.readouterr().err
    assert said.index("timeout=0.4") < said.index("the run is ended")
    assert f"{tmp_path}/program.py" in said
    assert f"{tmp_path}/program.py" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    if kind == "wait_for_lock":
        assert "HangError" in err
    else:
        assert process.returncode == -signal.SIGKILL


def test_what_a_run_uses_is_that_of_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_stored", lambda pid: 5)
    before = hang.usage([os.getpid()])
    with subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) as process:
        end = time.monotonic() + 20
        while hang.usage([os.getpid()])[0] < before[0] + 0.05 and time.monotonic() < end:
            time.sleep(0.02)
        now = hang.usage([process.pid])
        assert hang.usage([os.getpid()])[1] == before[1] + now[1]
        assert now[0] > 0
        process.kill()


@pytest.mark.parametrize(
    ("used", "is_busy"), [((3.05, 9), False), ((3.2, 7), True), ((3.0, 2_000_000), True), ((1.0, 7), True)]
)
def test_a_run_is_busy_that_computes_reads_or_writes(
    monkeypatch: pytest.MonkeyPatch, used: tuple[float, int], *, is_busy: bool
) -> None:
    watch = hang.Watch("/run", 10.0, 1)
    watch.used = 100.0, (3.0, 7)
    monkeypatch.setattr(hang, "usage", lambda pids: used)
    assert watch.is_busy(109.0), "it is too early to tell"
    assert watch.is_busy(110.0) is is_busy
    assert watch.used == (110.0, used)


def test_the_others_of_a_failed_rank_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "GRACE", 0.5)
    with hanging(tmp_path / "run", "wait_for_lock", "stop") as (first, second):
        watch = hang.Watch(str((tmp_path / "run").resolve()), 1000.0, first.pid)
        watch.scan(time.monotonic())
        assert set(watch.members) == {first.pid, second.pid}
        first.kill()
        first.wait()
        watch.run()
        assert second.wait(10)


def test_a_run_that_somebody_stopped_as_a_whole_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "FIRST", 1)
    with hanging(tmp_path / "run", "stop") as (process,):
        watch = hang.Watch(str((tmp_path / "run").resolve()), 0.1, process.pid)
        for _ in range(3):
            watch.scan(now := time.monotonic())
            watch.update(now)
            watch.judge(now)
            time.sleep(0.2)
        assert watch.reported
        assert process.poll() is None


def test_a_rank_that_goes_on_is_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that has withdrawn its announcement, as a notebook after training, is none of the run."""
    with hanging(tmp_path / "run", "end") as (process,):
        assert process.wait(20) == 0
        hang.Watch(str((tmp_path / "run").resolve()), 0.1, process.pid).run()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
def test_a_process_of_another_user_that_allows_no_debugger_is_not_of_root() -> None:
    # PR_SET_DUMPABLE: on most systems, its entry in /proc is of root from then on.
    program = "import ctypes, os, time; os.setuid(54321); ctypes.CDLL(None).prctl(4, 0); print('', flush=True)"
    process = subprocess.Popen([sys.executable, "-S", "-c", f"{program}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()
        assert hang.owner(process.pid) == 54321
    finally:
        process.kill()
        process.communicate()
    assert hang.owner(os.getpid()) == os.geteuid()


def test_a_rank_that_is_found_late_has_not_just_made_progress(tmp_path: Path) -> None:
    with hanging(tmp_path / "run", "wait_for_lock") as (process,):
        time.sleep(1.2)
        watch = hang.Watch(str((tmp_path / "run").resolve()), 1000.0, process.pid)
        watch.scan(now := time.monotonic())
        watch.update(now)
        assert now - watch.seen[process.pid][1] > 1
