"""Signals that ask the process to leave: a handler sets a flag, which is looked at where leaving is safe.

No handler does more: a collective inside one hangs when the ranks stand at different places, and a checkpoint written
inside one can be half of a step.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from boltcutter.environment.process import is_first

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
REQUEUE = "BOLTCUTTER_REQUEUE"  # a file that a launcher looks for; then the status is 0
WORKER_SECONDS = 300  # that a loader's worker outlives a signal to the whole process group

_received = 0
_at_once: tuple[int, ...] = ()
_before: dict[int, Any] = {}
_owner = 0  # process that listens


class Preempted(SystemExit):
    """The process leaves with 128 + the signal's number, or with 0 where a launcher waits for a mark.

    Args:
        number: Of the signal.
        saved: The checkpoint that was written for it, or what there was to save.
    """

    def __init__(self, number: int, saved: str) -> None:
        self.status = 128 + number
        mark = os.environ.get(REQUEUE)
        super().__init__(0 if mark else self.status)
        self.reason = f"preempted by {signal.Signals(number).name}, {saved}" + ("; to be requeued" if mark else "")

    def __str__(self) -> str:
        return self.reason


def listen(*at_once: int) -> None:
    """Set the flag from here on, in place of what the signals would do.

    Args:
        at_once: Signals that need not wait for a safe place, as there is nothing yet to save.
    """
    global _at_once, _owner
    if threading.current_thread() is not threading.main_thread():
        return  # of a notebook's or another library's thread: Python gives signals to the main one only
    _at_once, _owner = at_once, os.getpid()
    for number in SIGNALS:
        before = signal.signal(number, receive)
        if before != receive:
            _before.setdefault(number, before)


def forget() -> None:
    """Give the signals back to whom they belonged, and lower the flag."""
    global _received
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    _received = 0


def listening() -> bool:
    """Whether somebody listens already."""
    return bool(_before)


def received() -> int:
    """The number of the signal that came last; 0 for none."""
    return _received


def receive(number: int, frame: FrameType | None = None) -> None:
    """Set the flag, as the handler does; a second interrupt from the keyboard leaves at once."""
    global _received
    if os.getpid() != _owner:
        # A loader's worker: its training process still needs it for the step at which it will save.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WORKER_SECONDS)
        return
    if number in _at_once or number == _received == signal.SIGINT:
        leave(number, "at once, nothing saved")
    _received = number


def leave(number: int, saved: str) -> NoReturn:
    """Leave for a signal; what follows is not cut short by another one.

    Raises:
        Preempted: Always.
    """
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    mark = os.environ.get(REQUEUE)
    if mark and is_first():
        Path(mark).write_text(signal.Signals(number).name)
    raise Preempted(number, saved)
