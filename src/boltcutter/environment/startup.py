"""From a script's first line to its first step: a process that is starting ends at once when it is asked to.

1. ``begin``: while modules are imported, a signal ends the process on the spot.
2. ``prepare``: while parts are built, data is read and ranks find each other, a signal ends it by an exception; where
   that does not come through, because the process waits inside a library for other ranks, a thread ends it.
3. ``finish``: from here on a signal sets a flag, and training saves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from boltcutter.environment import signals
from boltcutter.environment.process import call_glibc

STARTER = "BOLTCUTTER_STARTER"  # number of the process that starts the other ranks
PR_SET_PDEATHSIG = 1  # prctl(2)
STUCK_SECONDS = 2.0  # in which Python should have called the handler of a signal

_watch: Watch | None = None
_ends_with_launcher = 0  # process that the kernel ends when its launcher is gone


def begin() -> None:
    """Let signals end the process, and let it end with the launcher that has started it, if one has."""
    signals.end_process_on_signals()
    _die_with_launcher()


def prepare() -> None:
    """Let signals end the process by an exception, also where it waits for other ranks."""
    global _watch
    signals.install_handlers(*signals.SIGNALS)
    if _watch is None and threading.current_thread() is threading.main_thread():
        _watch = Watch()


def finish() -> None:
    """Let signals set the flag that training looks at."""
    global _watch
    signals.install_handlers()
    if _watch is not None:
        _watch.stop()
        _watch = None
    # Ranks that know each other notice when one has gone. A process that torch has forked or spawned keeps the signal
    # that torch has set: its parent is no rank, and nothing else tells that it has gone.
    if _ends_with_launcher == os.getpid():
        call_glibc("prctl", PR_SET_PDEATHSIG, 0)


@contextmanager
def starting_ranks() -> Iterator[None]:
    """Let processes that are started inside the block know which one has started them."""
    os.environ[STARTER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(STARTER, None)


class Watch:
    """A thread that ends the process on a signal which Python does not get round to.

    Python calls its handlers between two of its own instructions, and a process that waits for other ranks inside
    torch executes none; but Python's part in C writes each signal's number to a file.
    """

    def __init__(self) -> None:
        self._numbers, self._write = os.pipe()
        self._stopped, self._process = False, os.getpid()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="signals")
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped = True
        signal.set_wakeup_fd(-1)
        if os.getpid() != self._process:
            return  # a copy, which has no such thread
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._write)
        os.close(self._numbers)

    def _run(self) -> None:
        while number := os.read(self._numbers, 1)[0]:
            if number not in signals.SIGNALS or signal.getsignal(number) is not signals.handle_signal:
                continue  # somebody else handles it
            end = time.monotonic() + STUCK_SECONDS
            while not (signals.received_signal() or self._stopped):
                if time.monotonic() > end:
                    signals.end_process(number)
                time.sleep(0.05)


def _die_with_launcher() -> None:
    """Have the kernel end this rank when the process is gone that has started it; nobody else would, for long."""
    global _ends_with_launcher
    starter = os.environ.get(STARTER)
    by_lightning = starter is not None and "LOCAL_RANK" in os.environ
    if sys.platform != "linux" or not (by_lightning or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    _ends_with_launcher = os.getpid()
    call_glibc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if by_lightning and not os.path.exists(f"/proc/{starter}"):  # since before that call
        os._exit(1)
