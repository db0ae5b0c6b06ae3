import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from boltcutter.environment import signals


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    signals.forget()
    assert {number: signal.getsignal(number) for number in signals.SIGNALS} == before


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_sets_a_flag_and_nothing_else(number: signal.Signals) -> None:
    signals.listen()
    assert signals.listening()
    assert signals.received() == 0
    os.kill(os.getpid(), number)
    assert signals.received() == number


def test_a_second_interrupt_leaves_at_once() -> None:
    signals.listen()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(signals.Preempted, match="SIGINT, at once, nothing saved") as left:
        os.kill(os.getpid(), signal.SIGINT)
    assert left.value.code == left.value.status == 130
    for number in signals.SIGNALS:
        os.kill(os.getpid(), number)  # does nothing any more


def test_what_need_not_wait_leaves_at_once() -> None:
    signals.listen(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received() == signal.SIGTERM
    with pytest.raises(signals.Preempted):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_that_waits_for_a_mark_gets_it_and_status_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "requeue"
    monkeypatch.setenv("BOLTCUTTER_REQUEUE", str(mark))
    signals.listen()
    with pytest.raises(signals.Preempted, match="SIGUSR2, saved x; to be requeued") as left:
        signals.leave(signal.SIGUSR2, "saved x")
    assert (left.value.code, left.value.status) == (0, 128 + signal.SIGUSR2)
    assert mark.read_text() == "SIGUSR2"
    mark.unlink()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(signals.Preempted):
        signals.leave(signal.SIGUSR2, "saved x")
    assert not mark.exists()


WORKER = """
import os, signal, time
from boltcutter.environment import signals
signals.WORKER_SECONDS = 2
signals.listen()
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b".")
    while True:
        time.sleep(0.01)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
time.sleep(0.2)
print(os.waitpid(child, os.WNOHANG)[0], flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_loader_s_worker_outlives_the_signal_for_a_while() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["0", str(-signal.SIGALRM)]
