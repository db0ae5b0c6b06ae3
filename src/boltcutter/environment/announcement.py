"""What this process of a run does, in memory that others of the same user can read, also while it hangs.

``announce`` makes two memory files, which ``/proc/<pid>/fd`` names and which end with the process:

- ``FACTS``: rank, state and counters as JSON. A thread writes them twice a second, so that a step costs nothing.
- ``STACKS``: where ``faulthandler`` writes the stacks of all threads on the signal ``ASK``: in C, so also while other C
  code holds Python's lock.

And a pipe, into which Python's C handler writes the numbers of signals: on SIGUSR2 the stacks are printed.

``hang.py``, which local rank 0 starts as a process of its own, reads both. Other systems than Linux have neither.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from boltcutter.environment.hang import ASK, END, FACTS, MESSAGE, PLACES, SIZE, STACKS, read_text, write_text
from boltcutter.environment.process import c_handler, in_slurm_step
from boltcutter.environment.stop_signals import go_on, is_own
from boltcutter.environment.this_process import this_process
from boltcutter.protocols import PlannedExit

SCRIPT = Path(__file__).with_name("hang.py")
INTERVAL = 0.5  # seconds between two writes
# What distinguishes attempts, and is equal in all processes of one.
ATTEMPT = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")


class HangError(RuntimeError):
    """The run made no progress for twice its timeout, or another rank has failed and this one does not notice it."""

    hide_traceback = True


@contextmanager
def announce(folder: Path, timeout: float, command: str = "train") -> Iterator[None]:
    """Announce this process during the block; local rank 0 also starts the process that watches the run.

    Args:
        folder: Of the run.
        timeout: Seconds without progress until stacks are reported; after twice as many the run is ended.
        command: What is done with the run, which others may do at the same time: ``train``, ``evaluate``, ``predict``.
    """
    if not hasattr(os, "memfd_create"):
        yield
        return
    local = os.environ.get("LOCAL_RANK") or (os.environ.get("SLURM_LOCALID") if in_slurm_step() else None) or "0"
    rank = os.environ.get("RANK") or (os.environ.get("SLURM_PROCID") if in_slurm_step() else None) or local
    withdraw()
    this_process.announcement = own = Announcement(folder, int(rank), timeout, command)
    watcher = None
    if int(local) == 0 and sys.executable:
        script = [sys.executable, "-I", "-S", str(SCRIPT), str(own.folder), str(timeout), str(os.getpid())]
        with suppress(OSError):
            watcher = subprocess.Popen(script, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    except BaseException as error:
        own.set_state("done" if isinstance(error, PlannedExit) else "failed")
        raise
    else:
        own.set_state("done")
    finally:
        if watcher is not None:
            watcher.wait()  # it has started another process


def withdraw() -> None:
    """Withdraw the announcement of a process that goes on after training, which would be ended otherwise."""
    if (own := this_process.announcement) is not None:
        own.close()
        this_process.announcement = None


def follow(trainer: Any) -> None:
    """Announce the counters of a trainer, and its rank; also in a process that was forked or spawned for the rank."""
    if (own := this_process.announcement) is not None:
        own.rank, own.trainer = trainer.global_rank, trainer


def joined(folder: Path, timeout: float, rank: int, command: str = "train") -> bool:
    """Announce this process if another one has started it as a rank; return whether it had to be."""
    own = this_process.announcement
    if not hasattr(os, "memfd_create") or (own is not None and own.pid == os.getpid()):
        return False
    withdraw()
    this_process.announcement = Announcement(folder, rank, timeout, command, joined=True)
    return True


def set_state(state: str) -> None:
    """Announce ``running``, ``failed`` or ``done``: others that still run are ended soon if one has failed."""
    if (own := this_process.announcement) is not None:
        own.set_state(state)


def count_progress() -> None:
    """Count progress that no trainer counts, such as a generated token."""
    this_process.written_parts += 1


class CountedFile:
    """A file that is open for writing, each write to which counts as progress.

    Args:
        file: Any file; all but ``write`` is passed on to it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write, and count it."""
        count_progress()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Announcement:
    """The two memory files of this process.

    Args:
        folder: Of the run.
        rank: Global rank, as far as it is known.
        timeout: Seconds without progress until stacks are reported.
        command: What is done with the run.
        joined: Whether another process of the run has forked or spawned this one as a rank.
    """

    def __init__(
        self, folder: Path, rank: int, timeout: float, command: str = "train", *, joined: bool = False
    ) -> None:
        self.joined, self.command = joined, command
        self.folder, self.rank, self.timeout = Path(os.path.realpath(folder)), rank, timeout
        self.pid, self.trainer, self.state = os.getpid(), None, "running"
        self._facts, self._stacks = os.memfd_create(FACTS), os.memfd_create(STACKS)
        os.ftruncate(self._facts, SIZE)
        faulthandler.register(ASK, self._stacks, all_threads=True)
        self._signals = os.pipe()
        os.set_blocking(self._signals[1], False)
        self._handlers: dict[int, Any] = {}
        self._written, self._since = dict[str, Any](), 0.0  # last facts, and since when they are so
        if threading.current_thread() is threading.main_thread():
            self._handlers[END] = signal.signal(END, self._raise)
            if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL and not c_handler(signal.SIGUSR2):
                self._handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, go_on)
            if this_process.watchdog is None:  # which reads the numbers of signals until training starts
                self.listen()
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self.write()
        threading.Thread(target=self._write_often, daemon=True, name="announcement").start()

    def listen(self) -> None:
        """Have the numbers of signals written into the pipe; in the main thread only."""
        signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)

    def pass_on(self, number: int) -> None:
        """Write the number of a signal into the pipe, which another pipe has received."""
        with suppress(OSError):
            os.write(self._signals[1], bytes([number]))

    def set_state(self, state: str) -> None:
        """Announce another state at once."""
        self.state = state
        self.write()

    def write(self) -> None:
        """Write what this process does now."""
        facts: dict[str, Any] = {"pid": self.pid, "rank": self.rank, "folder": str(self.folder), "state": self.state}
        facts |= {"timeout": self.timeout, "stacks": self._stacks, "host": socket.gethostname()}
        facts |= {"places": PLACES, "saved": this_process.written_parts, "joined": self.joined}
        facts |= {"main": threading.main_thread().ident, "signals": self._signals[0]}
        facts["answers"] = is_own(signal.getsignal(signal.SIGUSR2))
        launched = [os.environ.get(name, "") for name in ATTEMPT]
        facts["attempt"] = [self.command, *(launched if any(launched) else [str(self.pid)])]
        with suppress(Exception):  # a trainer that is not set up yet
            facts |= position(self.trainer) if self.trainer is not None else {}
        with self._lock, suppress(OSError):
            if facts != self._written:
                self._written, self._since = facts, time.monotonic()  # which is the same clock in all processes
            facts = facts | {"since": self._since}
            if self._facts >= 0:
                write_text(self._facts, 0, json.dumps(facts))

    def close(self) -> None:
        """Withdraw the announcement."""
        files, self._facts, self._stacks = (self._facts, self._stacks), -1, -1
        if os.getpid() == self.pid:  # a forked process has no such thread, and may have the lock of one
            self._stopped.set()
            self._lock.acquire()
            faulthandler.unregister(ASK)
            if threading.current_thread() is threading.main_thread():
                if (other := signal.set_wakeup_fd(-1)) not in (-1, self._signals[1]):
                    signal.set_wakeup_fd(other, warn_on_full_buffer=False)
                for number, handler in self._handlers.items():
                    if is_own(signal.getsignal(number)):
                        signal.signal(number, handler)
            self._lock.release()
        for file in (*files, *self._signals):
            os.close(file)

    def _write_often(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.write()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        end_awaited(frame)
        raise HangError(read_text(self._facts, MESSAGE) or "ended by another process")


def end_awaited(frame: FrameType | None) -> None:
    """End the command for which a thread waits, as ``subprocess.run`` does in an error, and ``Popen.wait`` does not."""
    while frame is not None:
        if frame.f_code.co_filename == subprocess.__file__:
            command = frame.f_locals.get("self")
            if isinstance(command, subprocess.Popen):
                command.kill()
                return
        frame = frame.f_back


def position(trainer: Any) -> dict[str, Any]:
    """Where a trainer is: all counters that grow with each batch, of training and of evaluation."""
    epoch = trainer.fit_loop.epoch_loop
    loops = (epoch.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return {
        "stage": str(trainer.state.stage.value) if trainer.state.stage else "",
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "batch": epoch.batch_progress.current.ready,
        "trained": epoch.batch_progress.total.completed,
        "evaluated": [loop.batch_progress.current.ready for loop in loops],
    }
