"""Signals that ask the process to leave: a handler sets a flag, which is looked at where leaving is safe.

No handler does more: a collective inside one hangs when the ranks stand at different places, and a checkpoint written
inside one can be half of a step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from boltcutter.environment.process import is_rank_zero

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LEASE_LOST = 255  # in place of a signal's number: another process has taken the run over, which no signal undoes
REQUEUE = "BOLTCUTTER_REQUEUE"  # a file that a launcher looks for; then the status is 0

_received = 0
_at_once: tuple[int, ...] = ()
_before: dict[int, Any] = {}
_resets_children = False  # whether the hook for forked processes is registered, which cannot be taken back


class PreemptionError(SystemExit):
    """The process leaves with 128 + the signal's number, or with 0 where a launcher waits for a mark.

    Args:
        number: Of the signal.
        saved: The checkpoint that was written for it, or what there was to save.
        together: Whether all ranks leave at the same place, and can wait for one another.

    Attributes:
        status: Of the process, if no launcher waits for a mark.
        requeued: Whether one does, and starts the run again.
        reason: In words.
    """

    def __init__(self, number: int, saved: str, *, together: bool = True) -> None:
        self.status, self.together = 128 + number, together
        self.requeued = bool(os.environ.get(REQUEUE))
        super().__init__(0 if self.requeued else self.status)
        self.reason = f"preempted by {signal.Signals(number).name}, {saved}"

    def __str__(self) -> str:
        return self.reason


def install_handlers(*at_once: int) -> None:
    """Set the flag from here on, in place of what the signals would do.

    Args:
        at_once: Signals that need not wait for a safe place, as there is nothing yet to save.
    """
    global _at_once
    _at_once = at_once
    _install(handle_signal)


def end_process(number: int, frame: FrameType | None = None) -> None:
    """End the process at once, whatever it is doing; for a start-up in which there is nothing to clean up."""
    status = 0 if os.environ.get(REQUEUE) else 128 + number
    if is_rank_zero():
        name = signal.Signals(number).name
        with suppress(OSError):  # who read it may be gone
            # Not by print, which may be what the signal has interrupted.
            os.write(2, f"error: ended by {name} during start-up; nothing was trained\n".encode())
        try:
            _mark(number)
        except OSError:
            status = 128 + number
    os._exit(status)


def end_process_on_signals() -> None:
    """Have each of the signals end the process at once, as long as it imports."""
    _install(end_process)


def restore_handlers() -> None:
    """Give the signals back to whom they belonged, and lower the flag."""
    global _received
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    _received = 0


def handlers_installed() -> bool:
    """Whether somebody listens already."""
    return bool(_before)


def received_signal() -> int:
    """The number of the signal that came last; 0 for none."""
    return _received


def handle_signal(number: int, frame: FrameType | None = None) -> None:
    """Set the flag, as the handler does; a second interrupt from the keyboard leaves at once."""
    global _received
    again = number == _received == signal.SIGINT
    _received = max(number, _received) if LEASE_LOST in (number, _received) else number
    if again or number in _at_once:
        exit(number, "at once, nothing saved" if again else "before training, nothing saved", together=False)


def exit(number: int, saved: str, *, together: bool = True) -> NoReturn:
    """Leave for a signal; what follows is not cut short by another one.

    Raises:
        PreemptionError: Always.
    """
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    if is_rank_zero():
        _mark(number)
    raise PreemptionError(number, saved, together=together)


def _install(handle: Callable[[int, FrameType | None], None]) -> None:
    global _resets_children
    if threading.current_thread() is not threading.main_thread():
        return  # of a notebook's or another library's thread: Python gives signals to the main one only
    if not _resets_children:
        os.register_at_fork(after_in_child=_reset_in_child)
        _resets_children = True
    for number in SIGNALS:
        before = signal.signal(number, handle)
        if before not in (handle_signal, end_process):
            _before.setdefault(number, signal.SIG_DFL if before is None else before)


def _reset_in_child() -> None:
    """A forked process has nothing to save: signals do what they do elsewhere, so that a pool can end its processes."""
    if _before:
        signal.set_wakeup_fd(-1)
        restore_handlers()


def _mark(number: int) -> None:
    mark = os.environ.get(REQUEUE)
    if mark:
        Path(mark).write_text(signal.Signals(number).name)
