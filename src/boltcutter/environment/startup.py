"""Signal handling from a script's first line to its first training step.

1. ``begin``: while modules are imported, a signal ends the process immediately.
2. ``prepare``: while components are built, data is read and ranks connect, a signal raises an exception; if the
   process is blocked inside a library, waiting for other ranks, a thread ends it instead.
3. ``finish``: from here on a signal sets a flag, and training saves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from boltcutter.environment import stop_signals as signals
from boltcutter.environment.output import ignore_lost_readers
from boltcutter.environment.process import call_glibc
from boltcutter.environment.this_process import this_process

TRIAL_FD = "BOLTCUTTER_TRIAL_FD"  # descriptor of a socket that is connected to the search that started this trial
LAUNCHER_PID = "BOLTCUTTER_LAUNCHER_PID"  # of the process that starts the other ranks
TRY_LIMITS = "BOLTCUTTER_TRY_LIMITS"  # most runs of tries per hour and in all, which an agent may start
PARENT_PID = "BOLTCUTTER_PARENT_PID"  # of a process that this one must not outlive, or <pid>:<signal to end by>
PR_SET_PDEATHSIG = 1  # prctl(2)
REPORT_TIMEOUT = 15.0  # seconds that a rank has to report that its launcher ended
AGENT_POLL_SECONDS = 1.0  # between two checks that the agent of torchrun exists, while this rank starts
HANDLER_TIMEOUT = 2.0  # seconds within which Python should have called the handler of a signal


def begin() -> None:
    """Let signals end the process immediately, and let a child process end with its launcher."""
    signals.end_process_on_signals()
    _die_with_launcher()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not this_process.training_started.is_set():
        threading.Thread(target=_end_without_agent, daemon=True, name="torchrun").start()


def prepare() -> None:
    """Let signals raise an exception, or end the process if it is blocked waiting for other ranks."""
    signals.install_handlers(*signals.SIGNALS)
    if this_process.watchdog is None and threading.current_thread() is threading.main_thread():
        this_process.watchdog = SignalWatchdog()


def finish() -> None:
    """Let signals set the flag that training checks."""
    this_process.training_started.set()
    signals.install_handlers()
    ignore_lost_readers()  # here for ranks that were spawned
    if this_process.watchdog is not None:
        this_process.watchdog.stop()
        this_process.watchdog = None
    if this_process.announcement is not None and threading.current_thread() is threading.main_thread():
        this_process.announcement.listen()
    # From here on, connected ranks notice when one has exited. A process that torch forked or spawned keeps the
    # parent-death signal of its launcher: its parent is not a rank, so nothing else would report its death.
    if this_process.ends_with_launcher == os.getpid():
        # The agent of torchrun is no rank either; when it is gone, the run saves.
        call_glibc("prctl", PR_SET_PDEATHSIG, signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else 0)
        this_process.ends_with_launcher = 0
        if os.environ.get(LAUNCHER_PID) == str(os.getppid()):
            threading.Thread(target=_end_after_launcher, args=(os.getppid(),), daemon=True, name="launcher").start()


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers and the wake-up file descriptor of this process after the block.

    Also after an exception, for callers that continue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no handlers are installed there
        return
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)  # of an event loop, as in a notebook; it is only read by being replaced
    try:
        yield
    finally:
        if this_process.watchdog is not None:
            this_process.watchdog.stop()
            this_process.watchdog = None
        signals.restore_handlers()
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)


@contextmanager
def announce_launcher() -> Iterator[None]:
    """Pass the ID of this process to the ranks that it starts inside the block."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(LAUNCHER_PID, None)


class SignalWatchdog:
    """A thread that ends the process on a signal whose Python handler is not called in time.

    Python calls handlers between bytecode instructions, and a process that waits for other ranks inside torch executes
    none; but the C-level handler writes each signal number to the wake-up file descriptor, which the thread reads.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._stopped, self._process = False, os.getpid()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="signals")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped = True
        signal.set_wakeup_fd(-1)
        if os.getpid() != self._process:
            return  # threads do not survive a fork
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._write)
        os.close(self._read)

    def _run(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if this_process.announcement is not None:
                this_process.announcement.pass_on(number)
            if number not in signals.SIGNALS or signal.getsignal(number) is not signals.handle_signal:
                continue  # another library has replaced the handler
            end = time.monotonic() + HANDLER_TIMEOUT
            while not (signals.received_signal() or self._stopped):
                if time.monotonic() > end:
                    signals.end_process(number)
                time.sleep(0.05)


def _end_after_launcher(launcher: int) -> None:
    """End this rank some time after rank 0, which launched it: it may wait for a device, where it notices nothing."""
    while os.getppid() == launcher:
        time.sleep(1)
    time.sleep(REPORT_TIMEOUT)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_without_agent() -> None:
    """End this rank when nothing serves the store of torchrun's agent, which is there before any rank is started.

    The agent may be on another node, or may have exited before the kernel could be asked to report that; a client of
    its store would try again for minutes.
    """
    place, refused = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 0
    while refused < 2:
        try:
            socket.create_connection(place, timeout=AGENT_POLL_SECONDS).close()
            refused = 0
        except ConnectionRefusedError:
            refused += 1
        except OSError:  # a slow network
            pass
        if this_process.training_started.wait(AGENT_POLL_SECONDS):
            return
    with suppress(OSError):
        os.write(2, b"error: the agent of torchrun has ended; nothing was trained\n")
    os._exit(1)


def _die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher exits; otherwise it would wait for the other ranks for long."""
    if sys.platform != "linux":
        return
    if parent := os.environ.pop(PARENT_PID, None):
        process, _, number = parent.partition(":")
        call_glibc("prctl", PR_SET_PDEATHSIG, int(number or signal.SIGKILL))  # also after training has started
        if os.getppid() != int(process):  # it exited before that call
            os._exit(1)
        return
    launcher, is_rank = os.environ.get(LAUNCHER_PID), "LOCAL_RANK" in os.environ
    if TRIAL_FD in os.environ and not is_rank:
        call_glibc("prctl", PR_SET_PDEATHSIG, signal.SIGTERM)  # on which it saves
    elif (is_rank and launcher) or "TORCHELASTIC_RUN_ID" in os.environ:
        this_process.ends_with_launcher = os.getpid()
        call_glibc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_rank and launcher and not os.path.exists(f"/proc/{launcher}"):  # it exited before that call
            os._exit(1)
