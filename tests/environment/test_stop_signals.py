import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter.environment import stop_signals as signals
from boltcutter.strategy import process_launcher


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    signals.restore_handlers()


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_only_sets_a_flag(number: signal.Signals) -> None:
    signals.install_handlers()
    assert signals.handlers_installed()
    assert signals.received_signal() == 0
    os.kill(os.getpid(), number)
    assert signals.received_signal() == number


def test_a_second_interrupt_exits_immediately() -> None:
    signals.install_handlers()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(signals.PreemptionError, match="SIGINT, at once, nothing saved") as error:
        os.kill(os.getpid(), signal.SIGINT)
    assert error.value.code == error.value.status == 130
    for number in signals.SIGNALS:
        os.kill(os.getpid(), number)  # ignored from now on
        assert signals.received_signal() == signal.SIGINT


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals.install_handlers()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received_signal() == 0
        signals.restore_handlers()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_given_as_immediate_raises_an_exception() -> None:
    signals.install_handlers(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received_signal() == signal.SIGTERM
    with pytest.raises(signals.PreemptionError):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_requeue_marker_is_written_by_rank_zero_with_status_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "requeue"
    monkeypatch.setenv("BOLTCUTTER_REQUEUE", str(mark))
    signals.install_handlers()
    with pytest.raises(signals.PreemptionError, match=r"SIGUSR2, saved x$") as error:
        signals.exit(signal.SIGUSR2, "saved x")
    assert (error.value.code, error.value.status) == (0, 128 + signal.SIGUSR2)
    assert mark.read_text() == "SIGUSR2"
    mark.unlink()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(signals.PreemptionError):
        signals.exit(signal.SIGUSR2, "saved x")
    assert not mark.exists()


CHILD = """
import multiprocessing, os
from boltcutter.environment import stop_signals as signals
signals.install_handlers()
started, begin = os.pipe()
blocked, _ = os.pipe()
def work():
    os.write(begin, b"x")
    os.read(blocked, 1)
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
os.read(started, 1)
process.terminate()
process.join(20)
print(process.exitcode)
process.kill()
"""


def test_forked_processes_do_not_inherit_the_handlers() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{-signal.SIGTERM}\n"


IMPORTS = """
import os, signal
from boltcutter.environment import stop_signals as signals
signals.end_process_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    print("caught")
"""


@pytest.mark.parametrize(("requeue", "code"), [(False, 128 + signal.SIGTERM), (True, 0)])
def test_a_signal_during_imports_ends_the_process(tmp_path: Path, requeue: bool, code: int) -> None:
    mark = tmp_path / "requeue"
    env = os.environ | ({"BOLTCUTTER_REQUEUE": str(mark)} if requeue else {})
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=30, env=env)
    assert (done.returncode, done.stdout) == (code, "")
    assert "SIGTERM" in done.stderr
    assert done.stderr.count("\n") == 1
    assert mark.is_file() == requeue


def test_a_process_ends_although_it_cannot_write(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"BOLTCUTTER_REQUEUE": str(tmp_path / "missing" / "requeue")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, stderr=write, timeout=30, env=env
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"")


OWN_HANDLERS = """
import faulthandler, os, signal, sys
from boltcutter.environment import stop_signals as signals
if sys.argv[1] == "end":
    signals.end_process_on_signals()
seen = []
if sys.argv[2] == "python":
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
else:
    faulthandler.register(signal.SIGUSR1, file=open(sys.argv[3], "w"), all_threads=False)
signals.install_handlers()
os.kill(os.getpid(), signal.SIGUSR1)
assert not signals.received_signal()
signals.restore_handlers()
os.kill(os.getpid(), signal.SIGUSR1)
signals.install_handlers()
os.kill(os.getpid(), signal.SIGUSR2)
assert signals.received_signal() == signal.SIGUSR2
print(len(seen) if sys.argv[2] == "python" else open(sys.argv[3]).read().count("most recent call first"))
"""


@pytest.mark.parametrize("start", ["end", "none"])
@pytest.mark.parametrize("kind", ["python", "faulthandler"])
def test_a_users_handler_of_sigusr1_is_kept(tmp_path: Path, start: str, kind: str) -> None:
    command = [sys.executable, "-c", OWN_HANDLERS, start, kind, str(tmp_path / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("handler", [signals.go_on, process_launcher._retry])
def test_a_handler_of_this_library_is_replaced(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        signals.install_handlers()
        assert signal.getsignal(signal.SIGUSR2) is signals.handle_signal
        signals.restore_handlers()
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signals.restore_handlers()
        signal.signal(signal.SIGUSR2, before)


def test_a_launcher_that_requeues_replaces_a_users_handler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(signals.REQUEUE, str(tmp_path / "marker"))
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        signals.install_handlers()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.received_signal() == signal.SIGUSR2
    finally:
        signals.restore_handlers()
        signal.signal(signal.SIGUSR2, before)
